"""Rewards that were given before: whoever answers the same prompt with the same response gets the same again."""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Protocol

from hybridflow.rewards.pool import Scores


class BatchScorer(Protocol):
    """Scores many items at once; what an item is depends on the kind.

    One whose work is done elsewhere has, in place of `score`, `start(items, thread)`, which begins and returns the wait for it.
    """

    def score(self, items: Sequence[Any]) -> Scores: ...

    def close(self) -> None: ...


def begin(scorer: BatchScorer, items: Sequence[Any], thread: Executor) -> Callable[[], Scores]:
    """Have items scored while the caller goes on; what is returned waits for the scores. A scorer that computes itself does so
    in `thread`."""
    start = getattr(scorer, "start", None)
    return start(items, thread) if start else thread.submit(_timed, scorer, items).result


def _timed(scorer: BatchScorer, items: Sequence[Any]) -> Scores:
    start = time.monotonic()
    return replace(scorer.score(items), seconds=time.monotonic() - start)


class CachedScorer:
    """A scorer that is asked about each item once: a bounded memory by the items' hash, of which the longest unused go first.

    Right for scorers that always say the same of the same item. An item that failed is not kept, and asked about again.
    """

    def __init__(self, scorer: BatchScorer, size: int):
        """`size`: scores that are kept, at least 1 (`reward.cache_size`)."""
        self._scorer, self._size = scorer, size
        self._kept: OrderedDict[bytes, float] = OrderedDict()

    def start(self, items: Sequence[Any], thread: Executor) -> Callable[[], Scores]:
        """As the scorer's own; of items that are equal the scorer sees the first only."""
        keys = [_key(item) for item in items]
        new: dict[bytes, int] = {}  # the place of its first item
        for place, key in enumerate(keys):
            if key not in self._kept:
                new.setdefault(key, place)
        if not new:
            rewards = [self._kept[key] for key in keys]
            self._remember(keys, {})
            return lambda: Scores(rewards, 0, 0, None, cached=len(keys))
        wait = begin(self._scorer, [items[place] for place in new.values()], thread)
        kept = {key: self._kept[key] for key in keys if key not in new}  # others may be remembered before this is
        return lambda: self._finish(keys, new, kept, wait())

    def _finish(self, keys: Sequence[bytes], new: dict[bytes, int], kept: dict[bytes, float], asked: Scores) -> Scores:
        known = dict(zip(new, asked.rewards, strict=True))
        bad = {key for number, key in enumerate(new) if number in asked.unscored}
        unscored = frozenset(place for place, key in enumerate(keys) if key in bad)
        rewards = [known[key] if key in known else kept[key] for key in keys]
        self._remember(keys, {key: reward for key, reward in known.items() if key not in bad})
        again = len(unscored) - len(bad)  # equal to one that failed
        return replace(
            asked, rewards=rewards, failed=asked.failed + again, unscored=unscored, cached=len(keys) - len(new) - again
        )

    def close(self) -> None:
        self._scorer.close()

    def _remember(self, used: Sequence[bytes], found: dict[bytes, float]) -> None:
        for key in used:
            if key in self._kept:
                self._kept.move_to_end(key)
            elif key in found:
                self._kept[key] = found[key]
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)


def _key(item: Any) -> bytes:
    """Equal for equal items: of prompt, response, answer and metadata, or of a sequence's tokens."""
    return hashlib.sha256(json.dumps(item, sort_keys=True, default=repr).encode()).digest()
