"""One resharding with random weights: ours and the baselines into the same destination, timed, verified and accounted for."""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bandwidth import Bandwidths, most, seconds_of
from benchmarks.gathered import GatheredCopy, GatheredStream
from benchmarks.random_weights import fill
from hybridflow.resharding.execute import Resharder
from hybridflow.resharding.plan import Plan, make_plan
from hybridflow.resharding.verify import ReshardingMismatch, verify
from hybridflow.rollout import tiles as rollout
from hybridflow.rollout import vllm_compat
from hybridflow.rollout.engine import Engine
from hybridflow.rollout.grouping import EngineLayout, choose_engines
from megatron_ext import device, weights
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout

ENGINE_ARGUMENTS = {"enforce_eager": True, "max_num_seqs": 8}
ENGINE_BYTES = 16 << 30  # of a GPU for the engine beyond its weights: activations and a small KV cache
ENGINE_SHARE_ON_CPU = 0.1  # of the host's memory, for the KV caches
POISON = -7.0


class Pair(NamedTuple):
    """A training layout and the rollout's."""

    training: Layout
    rollout_tp: int
    rollout_ep: bool = False

    @property
    def rollout(self) -> str:
        return f"TP{self.rollout_tp}" + " EP" * self.rollout_ep

    def check(self, hf: HFConfig) -> None:
        """Raises ValueError if one of the layouts cannot hold the model."""
        if hf.num_heads % self.training.tp:
            raise ValueError(f"TP{self.training.tp} does not divide the model's num_attention_heads={hf.num_heads}")
        self.training.stage_layers(hf.num_layers)
        self.training.check_experts(hf.num_experts, hf.moe_intermediate_size)
        rollout.check_tp(hf, self.rollout_tp, self.rollout_ep)

    def engines(self, hf: HFConfig, ranks_per_node: int) -> EngineLayout:
        """The ranks of each engine, as a job has them by default: those that receive least."""
        return choose_engines(hf, self.training, self.rollout_tp, ranks_per_node, self.rollout_ep).layout


@dataclass(frozen=True)
class Settings:
    hf: HFConfig
    dtype: torch.dtype
    bucket_bytes: int
    repeat: int
    ranks_per_node: int
    bandwidths: Bandwidths
    cycles: int = 0


class Engines:
    """The vLLM engine in this process, kept as long as the next case wants the same layout. Collective."""

    def __init__(self, fields: dict[str, Any], hf: HFConfig, dtype: torch.dtype):
        self._folder, self._hf, self._itemsize = tempfile.TemporaryDirectory(), hf, dtype.itemsize
        (Path(self._folder.name) / "config.json").write_text(json.dumps(fields))
        self._dtype = str(dtype).removeprefix("torch.")
        self._engine: Engine | None = None
        self._layout: tuple[EngineLayout, bool] | None = None

    def get(self, layout: EngineLayout, expert_parallel: bool = False) -> Engine:
        if (layout, expert_parallel) != self._layout:
            self.close()
            share = self._memory_share(layout.tp, expert_parallel)
            arguments = {"engine_args": ENGINE_ARGUMENTS, "expert_parallel": expert_parallel, "order": layout.order}
            self._engine = Engine(self._folder.name, layout.tp, self._dtype, 256, share, **arguments)
            self._layout = layout, expert_parallel
        return self._engine

    def _memory_share(self, tp: int, expert_parallel: bool) -> float:
        if not torch.cuda.is_available():
            return ENGINE_SHARE_ON_CPU
        shapes = rollout.local_shapes(self._hf, tp, 0, expert_parallel).values()
        needed = self._itemsize * sum(torch.Size(shape).numel() for shape in shapes) + ENGINE_BYTES
        return needed / torch.cuda.mem_get_info()[1]

    def close(self) -> None:
        if self._engine:
            self._engine.close()
        self._engine = self._layout = None


class Case:
    """Both sides of one pair of layouts on this rank, and what is done with them. Building and every method is collective."""

    def __init__(self, settings: Settings, pair: Pair, engine: Engine | None = None):
        self.settings, self.pair, self.engine = settings, pair, engine
        self._rank, layout, hf = dist.get_rank(), pair.training, settings.hf
        engines = pair.engines(hf, settings.ranks_per_node)
        places = [(engines.tp, engines.coordinates(rank).tp, pair.rollout_ep) for rank in range(layout.world_size)]
        self.source_tiles = [weights.tile_map(hf, layout, rank) for rank in range(layout.world_size)]
        self.destination_tiles = [rollout.tile_map(hf, *place) for place in places]
        self.source = _empty(weights.local_shapes(hf, layout, self._rank), settings.dtype)
        fill(self.source, self.source_tiles[self._rank], weights.hf_shapes(hf))
        if engine is None:
            self.destination = _empty(rollout.local_shapes(hf, *places[self._rank]), settings.dtype)
        # vLLM's own loader does not repeat the packing of experts on CPU: they come out wrong
        self._reloads = engine is not None and (torch.cuda.is_available() or not hf.is_moe)

    def parameters(self) -> dict[str, Tensor]:
        """The rollout's. An engine is asked anew where its own loader may have replaced what it had."""
        if self.engine is None:
            return self.destination
        return vllm_compat.writable_parameters(self.engine._llm) if self._reloads else self.engine.parameters()

    def measure(self) -> dict[str, Any]:
        """All figures of one row; bytes are the most of any rank, seconds the slowest rank's."""
        started = time.perf_counter()
        sides = self.source_tiles, self.destination_tiles
        plan = make_plan(self._rank, *sides, self.settings.dtype.itemsize, self.settings.ranks_per_node)
        planned = most(time.perf_counter() - started)
        resharder = Resharder(plan, self.source, self.parameters(), self.settings.bucket_bytes)
        stream = GatheredStream(self.settings.hf, self.pair.training, self.source, self.settings.dtype)
        copies = GatheredCopy(stream, self.destination_tiles[self._rank], self.parameters())
        actions = {"ours": resharder.run, "gathered": copies.run}
        if self._reloads:
            actions["reload_weights"] = lambda: self._reload(stream)
        row = {
            "training": self.pair.training.describe() if self.pair.training.world_size > 1 else "TP1",
            "rollout": self.pair.rollout,
            "ranks": self.pair.training.world_size,
            "plan_seconds": planned,
            **self._sizes(plan),
        }
        first = {name: self._first(action, resharder if name == "ours" else stream) for name, action in actions.items()}
        if self.engine and self.settings.cycles:
            row["cycles"] = self._cycles(resharder)
        seconds = _seconds_in_turn(actions, self.settings.repeat)
        median = seconds["ours"]["median"]
        row |= {**first.pop("ours"), "seconds": seconds["ours"], "wire_bound_fraction": row["bound_seconds"] / median}
        row["baselines"] = {
            name: {
                **figures,
                "seconds": seconds[name],
                "bytes_received": int(most(stream.received_bytes)),
                "ratio": seconds[name]["median"] / median,
            }
            for name, figures in first.items()
        }
        return row

    def _sizes(self, plan: Plan) -> dict[str, float]:
        bandwidths = self.settings.bandwidths
        tiles = (tile for tile_map in self.destination_tiles for held in tile_map.values() for tile in held)
        return {
            "bytes_received": max(plan.received_bytes),
            "bytes_local": max(plan.local_bytes),
            "least_bytes_received": max(plan.least_received_bytes),
            "bytes_received_all_ranks": sum(plan.received_bytes),
            "bytes_local_all_ranks": sum(plan.local_bytes),
            "bytes_rollout_all_ranks": plan.itemsize * sum(tile.numel for tile in tiles),
            "bound_seconds": plan.bound_seconds(bandwidths.wire or math.inf, bandwidths.memory),
        }

    def _reload(self, stream: GatheredStream) -> None:
        self.engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})

    def _first(self, action: Callable[[], None], buffers: Resharder | GatheredStream) -> dict[str, Any]:
        """Memory and correctness of a first call, into parameters that hold garbage."""
        for tensor in self.parameters().values():
            tensor.fill_(POISON)
        return {"extra_peak_bytes": _extra_memory(action, buffers), "verified": self.verified()}

    def verified(self) -> bool:
        """What the product's own check says; a mismatch is printed, as the other figures are worth having all the same."""
        names = f"training {self.pair.training.describe()}", f"rollout {self.pair.rollout}"
        shapes = weights.hf_shapes(self.settings.hf)
        try:
            verify(self.source_tiles, self.source, self.destination_tiles, self.parameters(), shapes=shapes, layouts=names)
        except ReshardingMismatch as mismatch:
            if self._rank == 0:
                print(f"MISMATCH: {mismatch}", flush=True)
            return False
        return True

    def _cycles(self, resharder: Resharder) -> dict[str, list[float]]:
        """Sleep, wake the weights, reshard, wake the KV cache, over and over: seconds of each, and device memory afterwards."""
        steps = {
            "sleep": self.engine.sleep,
            "wake_weights": self.engine.wake_weights,
            "reshard": resharder.run,
            "wake_kv_cache": self.engine.wake_kv_cache,
        }
        results: dict[str, list[float]] = {name: [] for name in (*steps, "memory_bytes")}
        for _ in range(self.settings.cycles):
            for name, step in steps.items():
                results[name] += seconds_of(step, 1, warm_up=0)
            self.engine.weights_changed()
            results["memory_bytes"].append(most(device.memory_in_use()))
        return results


def _empty(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype, device=device.current()) for name, shape in shapes.items()}


def _seconds_in_turn(actions: Mapping[str, Callable[[], None]], repeat: int) -> dict[str, dict[str, Any]]:
    """Each action in every round, so that what else the machine does hits all of them; one round of warm-up."""
    rounds = [{name: seconds_of(action, 1, warm_up=0)[0] for name, action in actions.items()} for _ in range(repeat + 1)]
    results = {}
    for name in actions:
        seconds = [times[name] for times in rounds[1:]]
        results[name] = {"median": statistics.median(seconds), "best": min(seconds), "all": seconds}
    return results


def _extra_memory(action: Callable[[], None], buffers: Resharder | GatheredStream) -> int:
    """The most that `action` takes beyond what is there: torch's own count on CUDA, the size of the buffers elsewhere."""
    if device.current().type != "cuda":
        action()
        return int(most(buffers.buffer_bytes()))
    device.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    device.synchronize()
    return int(most(torch.cuda.max_memory_allocated() - before))
