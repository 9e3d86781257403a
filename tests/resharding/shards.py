"""Both sides of a resharding written out by hand from one random HF model, and the scenario that moves one into the other."""

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import make_plan
from hybridflow.resharding.verify import verify
from hybridflow.rollout import tiles as rollout
from megatron_ext import weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout
from tests import hf_models


def training_shard(hf: dict[str, Tensor], fields: dict, layout: Layout, rank: int) -> dict[str, Tensor]:
    """What a training rank holds, by splitting and concatenating whole tensors (no tile map); padding is 0."""
    stage, in_stage = divmod(rank, layout.world_size // layout.pp)
    layers = [layer for chunk in layout.stage_layers(fields["num_hidden_layers"])[stage] for layer in chunk]
    etp, ep = (layout.etp, in_stage % layout.etp), (layout.ep, in_stage // layout.etp % layout.ep)
    first, last = stage == 0, stage == layout.pp - 1
    return hf_models.megatron_shard(hf, fields, layout.tp, rank % layout.tp, layers, first, last, etp=etp, ep=ep)


def _router(fields: dict, layer: int) -> str:
    return f"model.layers.{layer}.{'block_sparse_moe' if fields['model_type'] == 'mixtral' else 'mlp'}.gate.weight"


def _experts(hf: dict[str, Tensor], fields: dict, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gate, up and down projection of each expert."""
    letters = ("w1", "w3", "w2") if fields["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    prefix = _router(fields, layer).replace("gate.weight", "experts.")
    count = len({name.removeprefix(prefix).split(".")[0] for name in hf if name.startswith(prefix)})
    return [tuple(hf[f"{prefix}{expert}.{letter}.weight"] for letter in letters) for expert in range(count)]


def vllm_shard(hf: dict[str, Tensor], fields: dict, tp: int, rank: int, expert_parallel: bool = False) -> dict[str, Tensor]:
    """What a rollout rank holds, by splitting and concatenating whole tensors (no tile map); padding is -1."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, 0)[rank]

    def key_rows(tensor: Tensor) -> Tensor:
        heads = tensor.chunk(fields["num_key_value_heads"], 0)
        if len(heads) >= tp:
            return rows(tensor)
        return heads[rank * len(heads) // tp]

    def vocabulary(tensor: Tensor) -> Tensor:
        return rows(torch.cat([tensor, tensor.new_full((-len(tensor) % 64, tensor.shape[1]), -1)]))

    shard = {"model.embed_tokens.weight": vocabulary(hf["model.embed_tokens.weight"])}
    for name, tensor in hf.items():
        if ".experts." in name:
            continue
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            parts = [rows(tensor), *(key_rows(hf[name.replace("q_proj", f"{x}_proj")]) for x in "kv")]
            shard[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif name.endswith("gate_proj.weight"):
            shard[name.replace("gate", "gate_up")] = torch.cat([rows(tensor), rows(hf[name.replace("gate", "up")])])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            shard[name] = tensor.chunk(tp, 1)[rank]
        elif name.endswith(("norm.weight", ".gate.weight")):
            shard[name] = tensor
    if "lm_head.weight" in hf:
        shard["lm_head.weight"] = vocabulary(hf["lm_head.weight"])
    for layer in range(fields["num_hidden_layers"]) if "num_experts_per_tok" in fields else ():
        experts, inner = _experts(hf, fields, layer), (tp, rank)
        if expert_parallel:
            experts, inner = experts[rank * len(experts) // tp :][: len(experts) // tp], (1, 0)
        halves = [tensor.chunk(inner[0])[inner[1]] for gate, up, _ in experts for tensor in (gate, up)]
        name = _router(fields, layer).replace("gate.weight", "experts.routed_experts.")
        shard[name + "w13_weight"] = torch.cat(halves)
        shard[name + "w2_weight"] = torch.cat([down.chunk(inner[0], 1)[inner[1]] for _, _, down in experts])
    return {name: tensor.clone() for name, tensor in shard.items()}


def random_model(fields: dict, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = weights.hf_shapes(HFConfig.from_dict(fields))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Case:
    """One training layout, one rollout TP and a random model, as this rank sees them."""

    def __init__(
        self,
        fields: dict,
        layout: Layout,
        rollout_tp: int,
        dtype: torch.dtype = torch.float32,
        nodes: int = 1,
        unpacked_from: int | None = None,
    ):
        self.rank, ranks = dist.get_rank(), range(layout.world_size)
        self.fields, self.layout, self.rollout_tp, self.dtype = fields, layout, rollout_tp, dtype
        hf = HFConfig.from_dict(fields)
        self.source_tiles = [weights.tile_map(hf, layout, r) for r in ranks]
        self.destination_tiles = [rollout.tile_map(hf, rollout_tp, r % rollout_tp) for r in ranks]
        ranks_per_node = layout.world_size // nodes
        self.plan = make_plan(
            self.rank, self.source_tiles, self.destination_tiles, dtype.itemsize, ranks_per_node, unpacked_from
        )
        self.fill(seed=0)
        self.destination = {name: torch.full_like(tensor, -1.0) for name, tensor in self.expected.items()}

    def fill(self, seed: int) -> None:
        """New random weights, in place where there are weights already."""
        model, rank = random_model(self.fields, seed), self.rank
        shard = training_shard(model, self.fields, self.layout, rank)
        if hasattr(self, "source"):
            for name, tensor in shard.items():
                self.source[name].copy_(tensor)
        else:
            self.source = {name: tensor.clone() for name, tensor in shard.items()}
        expected = vllm_shard(model, self.fields, self.rollout_tp, rank % self.rollout_tp)
        self.expected = {name: tensor.to(self.dtype) for name, tensor in expected.items()}

    def resharder(self, bucket_bytes: int = 1 << 20) -> Resharder:
        return Resharder(self.plan, self.source, self.destination, bucket_bytes)

    def wrong(self) -> list[str]:
        return [name for name, tensor in self.expected.items() if not torch.equal(self.destination[name], tensor)]

    def verify(self) -> str:
        """The mismatch's message, or an empty string."""
        from hybridflow.resharding.verify import ReshardingMismatch

        layouts = (f"training {self.layout.describe()}", f"rollout TP{self.rollout_tp}")
        try:
            verify(self.source_tiles, self.source, self.destination_tiles, self.destination, layouts=layouts)
        except ReshardingMismatch as mismatch:
            return str(mismatch)
        return ""
