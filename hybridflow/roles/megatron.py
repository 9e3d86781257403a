"""What all Megatron roles share: groups, model, tile map, micro-batches, and handing weights to another role."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.protocols import ONE_TO_ALL, remote
from hybridflow.controller.role import Role
from hybridflow.data.packing import partition
from megatron_ext import checkpoint, device, layers, model, step, weights
from megatron_ext.memory import weights_are_away
from megatron_ext.optimizer import Optimizer
from megatron_ext.parallel import ParallelState
from megatron_ext.tiles import TileMap


class MegatronRole(Role):
    """A GPTModel under TP x PP x DP, loaded from an HF folder."""

    optimizer: Optimizer | None = None
    _pending: checkpoint.PendingSave | None = None

    def __init__(self, name: str, config: Config):
        self.name, self.config = name, config
        self.role = role = config.megatron_roles()[name]
        self.layout = layout = config.layout(name)
        self.model_path, self.dtype = config.model_path(name), getattr(torch, config.dtype(name))
        self.hf = config.read_model(name)
        self.spec = layers.default_spec()
        self.state = ParallelState(name, layout, seed=config.run.seed)
        with self.context():
            transformer = model.transformer_config(self.hf, layout, self.dtype, role.recompute, dict(role.megatron))
            self.transformer_config = transformer
            self.chunks = model.build_model(self.hf, layout, transformer, self.spec)
            held = self.parameters(), self.tile_map(dist.get_rank())
            if not self.hf.head_stored:
                held = tuple(map(weights.without_head, held))
            weights.load_hf(*held, self.model_path, weights.hf_shapes(self.hf))

    def context(self) -> contextlib.AbstractContextManager:
        return self.state.current()

    def tile_map(self, rank: int) -> TileMap:
        return weights.tile_map(self.hf, self.layout, rank, self.spec)

    def require_weights(self) -> None:
        """Raises RuntimeError: the weights have left the device."""
        if weights_are_away(self.parameters()):
            raise RuntimeError(f"the {self.name}'s weights have left the device: call its restore() first")

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
        return checkpoint.Saved(self.layout, named, tiles, weights.hf_shapes(self.hf), self.optimizer)

    def micro_batches(self, batch: Batch, budget: int) -> tuple[list[step.MicroBatch], list[int]]:
        """The batch packed into micro-batches of at most `budget` tokens: as many on every data-parallel rank, all of one
        length, filled up to what the schedule needs. Also the batch's row of every packed sequence, in packed order."""
        self.require_weights()
        multiple = self.layout.tp * self.layout.cp
        lengths = batch.lengths("tokens").tolist()
        count = torch.tensor(len(partition(lengths, budget, multiple)), device=device.current())
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.state.dp_group)
        parts = [part for part in partition(lengths, budget, multiple, count=int(count)) if part]
        length = _padded(max(sum(lengths[i] for i in part) for part in parts), multiple, budget)
        columns = {name: batch.rows(name) for name in batch.names if batch[name].is_nested}
        packed = [step.pack([{name: rows[i] for name, rows in columns.items()} for i in part], length) for part in parts]
        return step.fill_up(packed, self.layout, count=int(count)), [i for part in parts for i in part]

    def forward(self, batch: Batch) -> Batch | None:
        """The model's outputs for every token, ragged fp32 in the batch's order; None off the last stage."""
        micro_batches, order = self.micro_batches(batch, self.role.forward_micro_batch_tokens)
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


def _padded(tokens: int, multiple: int, budget: int) -> int:
    """The length of a micro-batch that holds `tokens`, of few different ones: at most 1/16 of it is padding.

    Every new length has the memory allocator cut its blocks anew, so that memory would creep up from step to step.
    """
    step = max(1 << max(tokens.bit_length() - 5, 0), multiple)
    step = -(-step // multiple) * multiple
    return min(-(-tokens // step) * step, budget // multiple * multiple)
