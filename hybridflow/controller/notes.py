"""Notes of a job's processes for each other, written over room that was set aside: the disk may be full by then. No torch."""

from pathlib import Path

from hybridflow.writing import writing

LINE = 512  # bytes set aside for a note of a line


def write(path: Path, text: str, room: int = LINE) -> None:
    """`text`, and blanks up to `room` bytes, over what is there: the file never shrinks below, and needs no further room.

    Raises:
        OSError: naming the file.
    """
    with writing(path), path.open("r+b" if path.exists() else "wb") as file:
        file.write(text.encode().ljust(room))
        file.truncate()


def read(path: Path) -> str:
    """What was written last; empty where there is no such note."""
    return path.read_text().rstrip() if path.exists() else ""
