"""Ends a job between two steps when its machine is wanted back, so that it can go on later. No torch.

`hybridflow train` gets the batch system's SIGTERM or SIGUSR1 and `ask`s; the driver looks between steps (`Stopping`), saves,
and says that it `left`; `hybridflow train` then ends with REQUEUE. They meet in the folder of the job's notes, which the nodes
of a job share, so that any node may have got the signal.
"""

import os
from pathlib import Path

from hybridflow.controller import faults, notes

REQUEUE = 99  # exit status: ended early and in order, to be started again
READY, ASKED, LEFT = "stoppable", "stop-asked", "stopped"  # names of notes


class Stopping:
    """The driver's side; made when the loop of steps begins. Before, there is nothing to be saved, and a signal ends the job
    at once. Where nobody watches over the job (the user's own torchrun) nothing is ever asked."""

    def __init__(self):
        folder = os.environ.get(faults.FOLDER)
        self._folder = Path(folder) if folder else None
        if self._folder:
            notes.write(self._folder / ASKED, "")
            (self._folder / READY).touch()

    def asked(self) -> str:
        """The name of the signal after which the job is to end; empty while there was none."""
        return notes.read(self._folder / ASKED) if self._folder else ""

    def left(self) -> None:
        """Everything is saved and the job ends by itself now, before its last step."""
        (self._folder / LEFT).touch()


def ask(folder: Path, signal_name: str) -> bool:
    """Have the driver end the job after its step; False: it has not begun its steps yet."""
    if not (folder / READY).exists():
        return False
    notes.write(folder / ASKED, signal_name)
    return True


def has_left(folder: Path) -> bool:
    return (folder / LEFT).exists()
