"""What flows between roles: N sequences, as a TensorDict of ragged and flat fields.

A ragged field holds one tensor per sequence (a jagged nested tensor); a flat field has one row per sequence. Fields that
say something about tokens are aligned with `tokens`: element t belongs to token t, so `log_probs[t]` is
log p(token t | tokens before t) and is 0 where `loss_mask[t]` is False (the prompt).

Fields by convention:
    tokens             ragged int64    prompt and response
    loss_mask          ragged bool     True where the policy sampled the token
    rollout_log_probs  ragged float32  the rollout engine's log-probs
    log_probs, reference_log_probs, values, advantages, returns    ragged float32
    prompt_index       [N] int64       which prompt of the step a sample answers (the group in GRPO)
    rewards            [N] float32
    truncated          [N] bool        the response hit the length limit
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor


def ragged(rows: Sequence[Tensor]) -> Tensor:
    """One tensor per sequence, lengths may differ (also 0), as one jagged nested tensor."""
    offsets = [0, *itertools.accumulate(len(row) for row in rows)]
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), torch.tensor(offsets, device=rows[0].device))


_versions = itertools.count()


@dataclass(frozen=True)
class Kept:
    """What identifies the content of kept fields (`Batch.keep`): a field's version and a row's number among `size`."""

    rows: Tensor  # int64 [N]
    size: int
    versions: Mapping[str, int]

    def of(self, names: Iterable[str]) -> "Kept":
        return replace(self, versions={name: self.versions[name] for name in names if name in self.versions})


class Batch:
    """An immutable table of N sequences."""

    def __init__(self, fields: dict[str, Tensor | Sequence[Tensor]], kept: Kept | None = None):
        """`fields`: a tensor [N, ...] for a flat field, a sequence of N tensors for a ragged one.

        Raises:
            ValueError: the fields disagree about N, or there are none.
        """
        columns = {name: value if isinstance(value, Tensor) else ragged(value) for name, value in fields.items()}
        sizes = {name: column.shape[0] for name, column in columns.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the fields of a batch must have one length, not {sizes}")
        self._data = TensorDict(columns, batch_size=[next(iter(sizes.values()))])
        self.kept = kept if kept and kept.versions else None

    def __len__(self) -> int:
        return self._data.batch_size[0]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        return self._data[name]

    def __repr__(self) -> str:
        return f"Batch({len(self)} sequences: {', '.join(self.names)})"

    def __reduce__(self) -> tuple:
        """Pickled as numpy arrays: Ray keeps those in shared memory, one copy for all readers of a host."""
        return _unpack, ({name: _pack(self._data[name]) for name in self.names},)

    @property
    def names(self) -> list[str]:
        return list(self._data.keys())

    @property
    def nbytes(self) -> int:
        """Of all fields, the boundaries of ragged ones included."""
        columns = [self._data[name] for name in self.names]
        return sum(c.values().nbytes + c.offsets().nbytes if c.is_nested else c.nbytes for c in columns)

    def keep(self) -> "Batch":
        """This batch, whose ragged fields stay on the ranks that are sent them in this step: they are sent to none of these
        again, in whatever batches made from this one by `select`, `only` and `with_fields`. A field that is replaced is sent
        as any other."""
        kept = self.kept
        if kept is None or len(kept.rows.unique()) < len(self):  # a row that is there twice may differ in what is new
            kept = Kept(torch.arange(len(self)), len(self), {})
        new = {name: next(_versions) for name in self.names if self._data[name].is_nested and name not in kept.versions}
        return Batch({name: self._data[name] for name in self.names}, replace(kept, versions={**kept.versions, **new}))

    def rows(self, name: str) -> list[Tensor]:
        """One tensor per sequence; those of a ragged field are views (by `split`: unbinding checks every row in Python)."""
        column = self._data[name]
        return list(column.values().split(self.lengths(name).tolist()) if column.is_nested else column.unbind(0))

    def lengths(self, name: str = "tokens") -> Tensor:
        """Elements per sequence of a ragged field, int64 [N]."""
        return self._data[name].offsets().diff()

    def values(self, name: str) -> Tensor:
        """All elements of a ragged field, concatenated in the order of the sequences."""
        return self._data[name].values()

    def segments(self, name: str = "tokens") -> Tensor:
        """Which sequence each of `values(name)` belongs to, int64."""
        return torch.repeat_interleave(self.lengths(name))

    def with_values(self, **fields: Tensor) -> "Batch":
        """This batch with ragged fields added or replaced, each given as `values` gives it and aligned with the tokens."""
        lengths = self.lengths().tolist()
        return self.with_fields(**{name: values.split(lengths) for name, values in fields.items()})

    def with_fields(self, **fields: Tensor | Sequence[Tensor]) -> "Batch":
        """This batch with fields added or replaced."""
        kept = self.kept and self.kept.of(set(self.names) - set(fields))
        return Batch({**{name: self._data[name] for name in self.names}, **fields}, kept)

    def only(self, *names: str) -> "Batch":
        return Batch({name: self._data[name] for name in names if name in self}, self.kept and self.kept.of(names))

    def renamed(self, names: Mapping[str, str]) -> "Batch":
        """This batch with fields under other names: `names` by the old ones; the rest keep theirs."""
        kept = self.kept and replace(self.kept, versions={names.get(n, n): v for n, v in self.kept.versions.items()})
        return Batch({names.get(name, name): self._data[name] for name in self.names}, kept)

    def select(self, indices: Iterable[int]) -> "Batch":
        """The sequences at `indices`, in that order."""
        index = torch.as_tensor(list(indices), dtype=torch.int64)
        fields = {}
        for name in self.names:
            column = self._data[name]
            if column.is_nested:
                rows = self.rows(name)
                fields[name] = [rows[i] for i in index.tolist()]
            else:
                fields[name] = column[index]
        return Batch(fields, self.kept and replace(self.kept, rows=self.kept.rows[index]))

    def to(self, device: torch.device | str) -> "Batch":
        return Batch({name: self._data[name].to(device) for name in self.names})

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """All sequences of `batches` in order; fields that not all of them have are an error."""
        names = batches[0].names
        if any(set(batch.names) != set(names) for batch in batches):
            raise ValueError(f"batches with different fields: {[batch.names for batch in batches]}")
        return Batch(
            {
                name: [row for batch in batches for row in batch.rows(name)]
                if batches[0][name].is_nested
                else torch.cat([batch[name] for batch in batches])
                for name in names
            }
        )


_Packed = tuple[torch.dtype, tuple[int, ...], np.ndarray, np.ndarray | None]


def _pack(column: Tensor) -> _Packed:
    """A column's type, shape, bytes, and of a ragged one the offsets; numpy has no bfloat16, but bytes."""
    values = (column.values() if column.is_nested else column).detach().cpu().contiguous()
    offsets = column.offsets().cpu().numpy() if column.is_nested else None
    return values.dtype, tuple(values.shape), values.reshape(-1).view(torch.uint8).numpy(), offsets


def _unpack(columns: dict[str, _Packed]) -> Batch:
    return Batch({name: _unpack_column(*packed) for name, packed in columns.items()})


def _unpack_column(dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray, offsets: np.ndarray | None) -> Tensor:
    values = _writable(data).view(dtype).reshape(shape)
    return values if offsets is None else torch.nested.nested_tensor_from_jagged(values, _writable(offsets))


def _writable(data: np.ndarray) -> Tensor:
    """As a tensor: of a copy where the memory is another's, since a write into that would end the process or reach others."""
    return torch.from_numpy(data if data.flags.writeable else data.copy())
