"""Errors of writing that say of which file: of a full disk Python and safetensors say only that it is full. No torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file, or into a folder.

    Raises:
        OSError: naming the path, unless it names one already.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
