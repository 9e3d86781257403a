"""Carries out a plan: packs what goes to a peer into few large messages, and copies locally what a rank has itself.

What is large and contiguous on both sides goes from parameter to parameter; the rest of a message is packed and cut into
buckets of one size that all ranks derive from the plan. Round k sends the k-th bucket of every message and a share of what
needs no packing. While a round is on the wire, the next one is packed, a share of the local copies is made and the one before
is unpacked. On CUDA everything is queued on streams: no host synchronisation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.resharding.copies import Copies
from hybridflow.resharding.plan import Piece, Plan
from hybridflow.resharding.rectangles import split, volume
from megatron_ext.tiles import Slices, as_index

ALIGNMENT = 256  # bytes: pieces start at multiples of it in a message, so that copies can use wide loads
TABLES = 1 / 64  # of the budget, for the tables of the copy kernel
# A message is cut into so many buckets even where fewer would fit the budget, unless they get too small for a fast wire: what
# comes before the first and after the last round overlaps with nothing.
ROUNDS, SMALLEST_BUCKET = 8, 32 << 20
UNPACKED_PER_ROUND = 512 << 20  # bytes of a message that go unpacked in one round, about


class Resharder:
    """Moves `source` into `destination`, in place, as often as `run` is called.

    Collective over `group` at construction and at `run`. Views and buffers are kept between runs. The memory under a tensor
    may move (a storage that is resized to nothing and back), as long as the tensors stay. `release` frees the buffers.

    Args:
        plan: this rank's part.
        source: this rank's training parameters; cast to the destination's dtype where they are sent or copied.
        destination: this rank's rollout parameters, all of one dtype.
        bucket_bytes: upper limit of the memory for messages, sent and received together.
        dtype: of the destination; needed only on a rank without one.
    """

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        bucket_bytes: int = 256 << 20,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.plan, self._group = plan, group
        self._source, self._destination = source, destination
        self._dtype = _common_dtype(destination, dtype)
        if self._dtype.itemsize != plan.itemsize:
            raise ValueError(f"the plan was made for elements of {plan.itemsize} bytes, the destination has {self._dtype}")
        _check(plan, source, destination)
        self._capacity = _bucket_elements(plan, bucket_bytes)
        self._tensors = [source[name] for name in sorted({p.name for p in _sources(plan)})]
        self._tensors += [destination[name] for name in sorted({p.name for p in _destinations(plan)})]
        parameters = [*destination.values(), *source.values()]
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._addresses: list[int] = []
        self._rounds: list[_Round] = []
        self._buffers: list[Tensor] = []
        if plan.max_peers and self._device.type == "cuda":
            # NCCL builds a group's communicator when all its ranks first call in; not all have a message in a round
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    @torch.no_grad()
    def run(self) -> None:
        """Move everything once. On CUDA it returns when the work is queued on the current stream."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if not self._rounds:
            self._rounds = self._prepare()
        elif addresses != self._addresses:
            for step in self._rounds:
                step.refresh()
        self._addresses = addresses
        before: tuple[_Round, list[dist.Work]] | None = None
        for step in self._rounds:
            step.pack.run()
            works = step.start(self._group)
            step.local.run()
            if before:
                before[0].finish(before[1])
            before = step, works
        if before:
            before[0].finish(before[1])

    def buffer_bytes(self) -> int:
        """Memory that this rank's messages, sent and received, and the copies' tables take at present: within the budget."""
        messages = sum(buffer.nbytes for buffer in self._buffers)
        return messages + sum(copies.table_bytes() for step in self._rounds for copies in step.copies)

    def release(self) -> None:
        """Free the buffers; the next run makes them again."""
        self._rounds, self._addresses, self._buffers = [], [], []

    def _prepare(self) -> list["_Round"]:
        me = self.plan.rank
        sends = {peer: self._cut(pieces, (me, peer)) for peer, pieces in self.plan.sends.items()}
        receives = {peer: self._cut(pieces, (peer, me)) for peer, pieces in self.plan.receives.items()}
        count = max((len(parts) for parts in [*sends.values(), *receives.values()]), default=1)
        rounds = [_Round() for _ in range(count)]
        for messages, tensors, outgoing in ((sends, self._source, True), (receives, self._destination, False)):
            for peer, parts in messages.items():
                size = max(part.numel for part in parts)
                sets = min(2, len(parts))
                buffers = torch.empty(sets, size, dtype=self._dtype, device=self._device)
                self._buffers.append(buffers)
                for number, part in enumerate(parts):
                    rounds[number].add(peer, buffers[number % sets, : part.numel], part, tensors, outgoing)
        for number, copies in enumerate(_shares(self.plan.local, count)):
            for copy in copies:
                target = self._destination[copy.destination.name][as_index(copy.destination.slices)]
                rounds[number].local.add(target, self._source[copy.source.name][as_index(copy.source.slices)])
        return rounds

    def _cut(self, pieces: Sequence[Piece], pair: tuple[int, int]) -> list["_Part"]:
        """Both ends cut the same shapes in the same order, so that they agree on every part."""
        unpacked = self.plan.unpacked.get(pair, frozenset())
        parts = self._pack(piece for index, piece in enumerate(pieces) if index not in unpacked)
        whole = [pieces[index] for index in sorted(unpacked)]
        total = self.plan.itemsize * sum(piece.numel for piece in whole)
        count = max(len(parts), -(-total // UNPACKED_PER_ROUND))
        parts += [_Part() for _ in range(count - len(parts))]
        for part, share in zip(parts, _shares(whole, count), strict=True):
            part.unpacked = share
        return parts

    def _pack(self, pieces: Iterable[Piece]) -> list["_Part"]:
        step = max(1, ALIGNMENT // self.plan.itemsize)
        parts = [_Part()]
        for piece in pieces:
            at = -(-parts[-1].numel // step) * step
            for block, fresh in split(piece.shape, max(0, self._capacity - at), self._capacity):
                if fresh:
                    parts.append(_Part())
                    at = 0
                starts = [start for start, _ in piece.slices]
                moved = tuple((a + s, b + s) for (a, b), s in zip(block, starts, strict=True))
                parts[-1].blocks.append((at, Piece(piece.name, moved)))
                at += volume(block)
                parts[-1].numel = at
        return parts


@dataclass
class _Part:
    """What a round moves between two ranks: a bucket (where each block begins in it, in elements, and its length), and pieces
    that need none."""

    blocks: list[tuple[int, Piece]] = field(default_factory=list)
    numel: int = 0
    unpacked: list[Piece] = field(default_factory=list)


class _Round:
    """One part to and from every peer that has one left, and a share of the local copies."""

    def __init__(self):
        self.pack, self.unpack, self.local = Copies(), Copies(), Copies()
        self.messages: list[tuple[bool, Tensor, int]] = []  # outgoing, message, peer (of the group)

    @property
    def copies(self) -> tuple[Copies, Copies, Copies]:
        return self.pack, self.unpack, self.local

    def add(self, peer: int, message: Tensor, part: _Part, tensors: Mapping[str, Tensor], outgoing: bool) -> None:
        if part.blocks:
            self.messages.append((outgoing, message, peer))
        for start, piece in part.blocks:
            packed = message[start : start + piece.numel].view(piece.shape)
            view = tensors[piece.name][as_index(piece.slices)]
            if outgoing:
                self.pack.add(packed, view)
            else:
                self.unpack.add(view, packed)
        for piece in part.unpacked:
            view = tensors[piece.name][as_index(piece.slices)]
            if not view.is_contiguous() or view.dtype != message.dtype:
                raise ValueError(f"{piece.name}{list(piece.slices)} of {view.dtype} cannot be sent or received as it is")
            self.messages.append((outgoing, view, peer))

    def refresh(self) -> None:
        for copies in self.copies:
            copies.refresh()

    def start(self, group: dist.ProcessGroup | None) -> list[dist.Work]:
        operations = [
            dist.P2POp(dist.isend if outgoing else dist.irecv, message, group=group, group_peer=peer)
            for outgoing, message, peer in self.messages
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def finish(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait()  # NCCL: the current stream waits, not the host
        self.unpack.run()


def _shares(copies: Sequence, count: int) -> Iterator[list]:
    """Split copies into `count` runs of about equal size."""
    total = sum(copy.numel for copy in copies)
    shares: list[list] = [[] for _ in range(count)]
    done = 0
    for copy in copies:
        shares[min(count - 1, done * count // total)].append(copy)
        done += copy.numel
    yield from shares


def _bucket_elements(plan: Plan, bucket_bytes: int) -> int:
    """Elements of a bucket, the same on all ranks: two sets of them, so that packing and unpacking overlap with the wire."""
    step = max(1, ALIGNMENT // plan.itemsize)
    peers = max(1, plan.max_peers)
    room = int(bucket_bytes * (1 - TABLES)) // (2 * peers)
    wanted = max(SMALLEST_BUCKET, plan.max_message_bytes // ROUNDS)
    capacity = min(room, wanted) // plan.itemsize // step * step
    if not capacity:
        least = int(2 * peers * ALIGNMENT / (1 - TABLES)) + 1
        raise ValueError(f"bucket_bytes={bucket_bytes} is too small for {peers} messages at a time: use at least {least}")
    return capacity


def _common_dtype(destination: Mapping[str, Tensor], dtype: torch.dtype | None) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in destination.values()} | ({dtype} if dtype else set())
    if len(dtypes) != 1:
        raise ValueError(
            f"the destination must have one dtype, not {sorted(map(str, dtypes))}: pass dtype= on a rank without one"
        )
    return dtypes.pop()


def _sources(plan: Plan) -> Iterator[Piece]:
    yield from (copy.source for copy in plan.local)
    yield from (piece for pieces in plan.sends.values() for piece in pieces)


def _destinations(plan: Plan) -> Iterator[Piece]:
    yield from (copy.destination for copy in plan.local)
    yield from (piece for pieces in plan.receives.values() for piece in pieces)


def _check(plan: Plan, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
    for side, tensors, pieces in (("source", source, _sources(plan)), ("destination", destination, _destinations(plan))):
        for piece in pieces:
            if piece.name not in tensors:
                raise ValueError(f"rank {plan.rank}: the plan's {side} {piece.name} is not among the parameters")
            if not _inside(piece.slices, tuple(tensors[piece.name].shape)):
                shape = tuple(tensors[piece.name].shape)
                raise ValueError(f"rank {plan.rank}: {side} {piece.name} has shape {shape}, the plan uses {piece.slices}")


def _inside(slices: Slices, shape: tuple[int, ...]) -> bool:
    return len(slices) == len(shape) and all(stop <= size for (_, stop), size in zip(slices, shape, strict=True))
