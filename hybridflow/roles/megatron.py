"""What all Megatron roles share: groups, model, tile map, micro-batches, and handing weights to another role."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller import hang
from hybridflow.controller.placement import place
from hybridflow.controller.protocols import ONE_TO_ALL, remote
from hybridflow.controller.role import Role
from hybridflow.data.packing import partition
from hybridflow.roles.transfer import WeightTransfer
from megatron_ext import checkpoint, device, layers, model, step, weights
from megatron_ext.bubble import BubbleMeter
from megatron_ext.intervals import Interval
from megatron_ext.memory import weights_are_away
from megatron_ext.optimizer import Optimizer
from megatron_ext.parallel import ParallelState
from megatron_ext.tiles import TileMap


class MegatronRole(Role):
    """A GPTModel under TP x PP x DP on all or some ranks of its pool, loaded from an HF folder."""

    optimizer: Optimizer | None = None
    _pending: checkpoint.PendingSave | None = None

    def __init__(self, name: str, config: Config):
        self.name, self.config = name, config
        self.role = role = config.megatron_roles()[name]
        self.layout = layout = config.layout(name)
        self.model_path, self.dtype = config.model_path(name), getattr(torch, config.dtype(name))
        self.hf = config.read_model(name)
        self.spec = layers.default_spec(self.dtype)
        self.state = _parallel_state(name, config)
        self._meter = BubbleMeter(self.state.coordinates.pp) if config.run.profile else None
        self._transfers: dict[str, WeightTransfer] = {}
        with self.context():
            transformer = model.transformer_config(self.hf, layout, self.dtype, role.recompute, dict(role.megatron))
            self.transformer_config = transformer
            self.chunks = model.build_model(self.hf, layout, transformer, self.spec)
            self.read_weights()

    @classmethod
    def stand_by(cls, name: str, config: Config) -> None:
        """Groups are made by all ranks of the pool."""
        _parallel_state(name, config)

    def read_weights(self) -> None:
        """This rank's parameters from the model's folder."""
        held = self.parameters(), self.tile_map(self.state.rank)
        if not self.hf.head_stored:
            held = tuple(map(weights.without_head, held))
        shapes = weights.hf_shapes(self.hf)
        weights.load_hf(*held, self.model_path, shapes, lambda file: hang.starting(f"reading the {self.name}'s {file}"))

    def context(self) -> contextlib.AbstractContextManager:
        return self.state.current()

    def give_to(self, engines: str, verify: bool) -> None:
        """This rank's part in `Rollout.receive`, where it has no engine."""
        if engines not in self._transfers:
            self._transfers[engines] = WeightTransfer(self.config, self.name, engines, self.peers)
        self._transfers[engines].run(verify)

    def copy_to(self, taker: str) -> None:
        """This rank's part in `copy_from` of a role that does not live on it."""
        WeightTransfer(self.config, self.name, taker, self.peers).run(verify=True)

    def tile_map(self, rank: int) -> TileMap:
        return weights.tile_map(self.hf, self.layout, rank, self.spec)

    def require_weights(self) -> None:
        """Raises RuntimeError: the weights have left the device."""
        if weights_are_away(self.parameters()):
            raise RuntimeError(f"the {self.name}'s weights have left the device: call its restore() first")

    def metered(self) -> contextlib.AbstractContextManager:
        """Around a pass of the schedule, whose steps are timed under `run.profile`."""
        return self._meter.watch() if self._meter else contextlib.nullcontext()

    @remote(ONE_TO_ALL)
    def take_passes(self) -> list[list[Interval]]:
        """When this rank worked in each pass of the schedule since the last call; nothing without `run.profile`."""
        return self._meter.take() if self._meter else []

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters under the names of its tile map."""
        return {name: parameter.detach() for name, parameter in weights.named_parameters(self.chunks).items()}

    @remote(ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Begin to write weights and optimizer into `folder`, which is whole when `saved` says so. On CUDA the role may be used
        at once: forked processes write what was copied to the host; on a CPU they would take the cores of the ranks, so that
        everything is written on return."""
        self.require_weights()
        self._pending = checkpoint.save(self._checkpointed(), folder, background=torch.cuda.is_available())

    @remote(ONE_TO_ALL)
    def saved(self, wait: bool) -> bool:
        """Whether the last `save` is on disk on all ranks; with `wait` once it is."""
        if self._pending is not None and self._pending.finished(wait):
            self._pending = None
        return self._pending is None

    @remote(ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Take the weights that a checkpoint of this role holds, and where there is an optimizer its states."""
        checkpoint.load(self._checkpointed(), folder)

    def _checkpointed(self) -> checkpoint.Saved:
        tiles = [self.tile_map(rank) for rank in range(self.layout.world_size)]
        named = weights.named_parameters(self.chunks)
        return checkpoint.Saved(self.state, named, tiles, weights.hf_shapes(self.hf), self.optimizer)

    def micro_batches(self, batch: Batch, budget: int) -> tuple[list[step.MicroBatch], list[int]]:
        """The batch packed into micro-batches of at most `budget` tokens, all of one length: as many on every data-parallel
        rank, and as the schedule takes; filled up where there are too few sequences. Also the batch's row of every packed
        sequence, in packed order."""
        self.require_weights()
        multiple = self.layout.tp * self.layout.cp
        lengths = batch.lengths("tokens").tolist()
        least = torch.tensor(len(partition(lengths, budget, multiple)), device=device.current())
        dist.all_reduce(least, op=dist.ReduceOp.MAX, group=self.state.dp_group)
        count = self.layout.schedulable(int(least))
        parts = [part for part in partition(lengths, budget, multiple, count, self.hf.attention_cost) if part]
        length = _padded(max(sum(lengths[i] for i in part) for part in parts), multiple, budget)
        columns = {name: batch.rows(name) for name in batch.names if batch[name].is_nested}
        packed = [step.pack([{name: rows[i] for name, rows in columns.items()} for i in part], length) for part in parts]
        return step.fill_up(packed, self.layout, count), [i for part in parts for i in part]

    def forward(self, batch: Batch) -> Batch | None:
        """The model's outputs for every token, ragged fp32 in the batch's order; None off the last stage."""
        micro_batches, order = self.micro_batches(batch, self.role.forward_micro_batch_tokens)
        with self.metered():
            outputs = self.outputs(micro_batches)
        if outputs is None:
            return None
        rows = [None] * len(order)
        for index, output in zip(order, outputs, strict=True):
            rows[index] = output
        return Batch({name: [row[name] for row in rows] for name in rows[0]})

    def outputs(self, micro_batches: list[step.MicroBatch]) -> list[dict[str, Tensor]] | None:
        """Log-probs and entropies, by sequence."""
        return step.forward(self.chunks, micro_batches, self.config.sampling.temperature)


def _parallel_state(name: str, config: Config) -> ParallelState:
    return ParallelState(name, config.layout(name), config.run.seed, place(config).within_pool(name))


def _padded(tokens: int, multiple: int, budget: int) -> int:
    """The length of a micro-batch that holds `tokens`, of few different ones: at most 1/16 of it is padding.

    Every new length has the memory allocator cut its blocks anew, so that memory would creep up from step to step.
    """
    step = max(1 << max(tokens.bit_length() - 5, 0), multiple)
    step = -(-step // multiple) * multiple
    return min(-(-tokens // step) * step, budget // multiple * multiple)
