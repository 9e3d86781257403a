"""A disk that is full, for files of the test's own process: none grows beyond a size ("File too large")."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
