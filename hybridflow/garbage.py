"""Python's garbage collector, kept from walking what libraries bring along: millions of objects, none of them garbage."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def none_yet() -> Iterator[None]:
    """Around imports: Python would walk all that is imported by then time and again, a quarter of the time that they take.

    What is there afterwards is never walked again, until somebody calls `gc.unfreeze`.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
