"""torchrun as `hybridflow train` starts it: `python -m hybridflow.agent` takes torchrun's own arguments.

It notes which ranks failed and how instead of printing torchrun's report, which would bury the rank's own message, ends with
its parent, says what it waits for, and leaves a batch system's signals to `hybridflow train`.
"""

import logging
import os
import signal
import sys

from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

from hybridflow.controller import faults
from hybridflow.controller.waiting import waiting
from hybridflow.processes import END, end_with_parent, ignore_polite_signals


def main(arguments: list[str]) -> int:
    end_with_parent(END)
    ignore_polite_signals()
    faults.set_room_aside()
    killed = _kill_ranks()
    _say_while_waiting_for_nodes()
    logging.disable(logging.ERROR)  # "Sending process ... closing signal SIGTERM", and the like for every rank
    try:
        # ranks have logs of their own (controller/rank_log.py): torchrun's folder for them would stay in /tmp, empty
        settings = ["--signals-to-handle", f"SIGINT,SIGHUP,{END.name}", "--log-dir", os.devnull]
        run(parse_args([*settings, *arguments]))
    except ChildFailedError as error:
        own = {rank: failure.exitcode for rank, failure in error.failures.items() if not _is_ours(failure, killed)}
        faults.note_exits(own)
        return 1
    except SignalException:
        return 1
    except DistStoreError as error:
        print(f"hybridflow: error: the nodes of the job did not meet: {error}", file=sys.stderr)
        return 1
    return 0


def _kill_ranks() -> set[int]:
    """Ranks that are to end don't listen to SIGTERM, and have nothing to do then that a kill would not leave undone. The
    process ids of those that were killed will be in what is returned.

    The rank alone, not its process group: in it is Python's resource tracker, which deletes what the rank left in shared
    memory. What else a rank has started is ended by `hybridflow train` (supervise.py).
    """
    killed: set[int] = set()

    def close(self: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        killed.add(self.proc.pid)
        self.proc.kill()
        for stream in (self._stdout, self._stderr):
            if stream:
                stream.close()

    SubprocessHandler.close = close
    return killed


def _is_ours(failure: ProcessFailure, killed: set[int]) -> bool:
    """The rank did not fail: it was ended since another one had. torchrun counts it among the failures."""
    return failure.pid in killed and failure.exitcode == -signal.SIGKILL


def _say_while_waiting_for_nodes() -> None:
    meet = StaticTCPRendezvous.next_rendezvous

    def next_rendezvous(self: StaticTCPRendezvous) -> RendezvousInfo:
        with waiting(f"all {self.world_size} nodes to meet at {self.master_addr}:{self.master_port}"):
            return meet(self)

    StaticTCPRendezvous.next_rendezvous = next_rendezvous


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
