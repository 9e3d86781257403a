"""What Linux offers to leave no process behind, and the signals by which a job's processes speak."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# A batch system sends these to every process of a job, not only to the one it started: what `hybridflow train` starts ignores
# them, and leaves it to that one process to let the step come to its end.
POLITE = (signal.SIGTERM, signal.SIGUSR1)
END = signal.SIGQUIT  # from `hybridflow train` to what it started: end now
DUMP = signal.SIGUSR2  # to a rank: write down where every thread is


def adopt_orphans() -> None:
    """Grandchildren whose parent dies become children of this process, where they can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: signal.Signals) -> None:
    """This process gets the signal when its parent dies, however that comes about."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def ignore_polite_signals() -> None:
    """In this process and, since they inherit it, in all that it starts from now on."""
    for number in POLITE:
        signal.signal(number, signal.SIG_IGN)


def inside_torchrun() -> bool:
    """Whether this process is one of a job's ranks already, started by torchrun or with the variables that it sets."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
