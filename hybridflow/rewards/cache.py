"""Rewards that were given before: whoever answers the same prompt with the same response gets the same again."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from hybridflow.rewards.pool import Scores


class BatchScorer(Protocol):
    """Scores many items at once; what an item is depends on the kind."""

    def score(self, items: Sequence[Any]) -> Scores: ...

    def close(self) -> None: ...


class CachedScorer:
    """A scorer that is asked about each item once: a bounded memory by the items' hash, of which the longest unused go first.

    Right for scorers that always say the same of the same item. An item that failed is not kept, and asked about again.
    """

    def __init__(self, scorer: BatchScorer, size: int):
        """`size`: scores that are kept, at least 1 (`reward.cache_size`)."""
        self._scorer, self._size = scorer, size
        self._kept: OrderedDict[bytes, float] = OrderedDict()

    def score(self, items: Sequence[Any]) -> Scores:
        """As the scorer's own; of items that are equal the scorer sees the first only."""
        keys = [_key(item) for item in items]
        new: dict[bytes, int] = {}  # the place of its first item
        for place, key in enumerate(keys):
            if key not in self._kept:
                new.setdefault(key, place)
        asked = self._scorer.score([items[place] for place in new.values()]) if new else Scores([], 0, 0, None)
        known = dict(zip(new, asked.rewards, strict=True))
        bad = {key for number, key in enumerate(new) if number in asked.unscored}
        unscored = frozenset(place for place, key in enumerate(keys) if key in bad)
        rewards = [known[key] if key in known else self._kept[key] for key in keys]
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
