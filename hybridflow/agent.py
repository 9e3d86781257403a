"""torchrun as `hybridflow train` starts it: `python -m hybridflow.agent` takes torchrun's own arguments.

It notes which ranks failed and how instead of printing torchrun's report, which would bury the rank's own message, and ends
with its parent.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from hybridflow.controller import faults
from hybridflow.processes import end_with_parent


def main(arguments: list[str]) -> int:
    end_with_parent(signal.SIGTERM)
    logging.disable(logging.ERROR)  # "Sending process ... closing signal SIGTERM", and the like for every rank
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        faults.note_exits({rank: failure.exitcode for rank, failure in error.failures.items()})
        return 1
    except SignalException:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
