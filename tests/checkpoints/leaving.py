"""An actor in the midst of whose update the machine is wanted back."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from hybridflow.controller import faults, notes, stopping
from hybridflow.controller.protocols import THREE_D, remote
from hybridflow.roles.actor import Actor

WHEN = 3  # the update after the start


class LeavingActor(Actor):
    """`hybridflow train` gets a SIGTERM, and has asked for the job's end before the update goes on."""

    count = 0

    @remote(THREE_D)
    def update(self, *arguments: Any) -> dict[str, Any]:
        self.count += 1
        if self.count == WHEN:
            _, hybridflow_train, *_ = psutil.Process().parents()  # behind torchrun
            hybridflow_train.send_signal(signal.SIGTERM)
            while not notes.read(Path(os.environ[faults.FOLDER]) / stopping.ASKED):
                time.sleep(0.05)
        return super().update(*arguments)
