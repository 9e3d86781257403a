"""Rows that stay on the ranks: of a batch's kept fields (`Batch.keep`) a later call sends a rank only what it lacks.

The driver's `Courier` knows what it has sent where; a rank's `KeptRows` puts the whole share together again. Roles may have any
layouts: what another role of the same ranks was sent counts, and where a rank gets other rows than before, those are sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridflow.batch import Batch


@dataclass(frozen=True)
class Partial:
    """A share of which the rank has a part. Of a kept field, `fresh` has the rows that it lacks, and where in the share they
    stand; `sent` has the fields that are not kept."""

    rows: list[int]
    versions: dict[str, int]
    fresh: dict[str, tuple[list[int], Batch]]
    sent: Batch | None

    @property
    def nbytes(self) -> int:
        batches = [self.sent, *(rows for _, rows in self.fresh.values())]
        return sum(batch.nbytes for batch in batches if batch) + 8 * len(self.rows)


class Courier:
    """Attributes:
    bytes: of all batches so far, summed over the ranks that they went to, the driver's own included.
    """

    def __init__(self):
        self.bytes = 0
        self._there: dict[tuple[int, int], np.ndarray] = {}  # by rank and version of a field: whether it has a row

    def pack(self, args: tuple, ranks: Sequence[int]) -> list[tuple[tuple, list[int]]]:
        """What to send to the ranks that are to get these arguments, of which the first may be a batch: one for all ranks that
        lack the same of it."""
        if not args or not isinstance(args[0], Batch):
            return [(args, list(ranks))]
        batch, *others = args
        alike: dict[tuple[bytes, ...], tuple[tuple, list[int]]] = {}
        for rank in ranks:
            lacking = self._note(rank, batch)
            key = tuple(mask.tobytes() for mask in lacking.values())
            if key not in alike:
                alike[key] = (_partial(batch, lacking) if lacking else batch, *others), []
            alike[key][1].append(rank)
        self.bytes += sum(sent[0].nbytes * len(group) for sent, group in alike.values())
        return list(alike.values())

    def forget(self) -> None:
        """The ranks let go of all rows (`KeptRows.forget`)."""
        self._there.clear()

    def _note(self, rank: int, share: Batch) -> dict[str, np.ndarray]:
        """By kept field: which of the share's rows this rank lacks. From now on it has them."""
        if share.kept is None:
            return {}
        lacking, rows = {}, share.kept.rows.numpy()
        for name, version in share.kept.versions.items():
            there = self._there.setdefault((rank, version), np.zeros(share.kept.size, bool))
            lacking[name] = ~there[rows]
            there[rows] = True
        return lacking


def _partial(share: Batch, lacking: dict[str, np.ndarray]) -> Partial:
    fresh = {}
    for name, mask in lacking.items():
        at = mask.nonzero()[0].tolist()
        if at:
            fresh[name] = at, share.only(name).select(at)  # rows of their own: a view would be sent with all that it is part of
    others = [name for name in share.names if name not in lacking]
    return Partial(share.kept.rows.tolist(), dict(share.kept.versions), fresh, share.only(*others) if others else None)


class KeptRows:
    """A rank's rows, by version of their field and number."""

    def __init__(self):
        self._rows: dict[int, dict[int, Tensor]] = {}

    def complete(self, share: Partial) -> Batch:
        """The whole share; what is new of it is kept."""
        fields = {}
        for name, version in share.versions.items():
            own = self._rows.setdefault(version, {})
            if name in share.fresh:
                at, fresh = share.fresh[name]
                own.update(zip([share.rows[i] for i in at], fresh.rows(name), strict=True))
            fields[name] = [own[row] for row in share.rows]
        sent = {name: share.sent[name] for name in share.sent.names} if share.sent else {}
        return Batch({**fields, **sent})

    def forget(self) -> None:
        self._rows.clear()
