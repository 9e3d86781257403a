"""Long waits speak up: every 30 s a line says what is being waited for."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

INTERVAL = 30.0


@contextlib.contextmanager
def waiting(what: str, interval: float = INTERVAL) -> Iterator[None]:
    """While the block runs longer than `interval` seconds, print `waiting for <what>` every `interval` seconds."""
    done, start = threading.Event(), time.monotonic()

    def speak() -> None:
        while not done.wait(interval):
            print(f"waiting for {what} since {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
