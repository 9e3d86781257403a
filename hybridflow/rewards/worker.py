"""One process of the scorer pool: `python -m hybridflow.rewards.worker FD`, answering requests on an inherited socket.

The first message is the ScorerSpec, answered by None or the RewardError's text. Every later one is (prompt, response,
answer, metadata), answered by (reward, None) or (None, what went wrong). The process ends with its parent.
"""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from hybridflow.rewards.scorers import RewardError, checked_reward, load_scorer


def main(descriptor: int) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    try:
        scorer = load_scorer(connection.recv())
    except RewardError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            item = connection.recv()
        except EOFError:  # the pool was closed
            return
        try:
            answer = (checked_reward(scorer(*item)), None)
        except Exception as error:
            # the user's code may fail on an odd response; the pool counts it and shows the first
            answer = (None, f"{type(error).__name__}: {error}")
        connection.send(answer)


def _end_with(parent: int) -> None:
    """Leave when the parent is gone, also while a scorer hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
