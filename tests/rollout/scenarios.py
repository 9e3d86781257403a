"""What the ranks of a test world do with engines. Engines are kept between calls, as building one takes seconds."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hybridflow.rollout.engine import Engine, Sampling
from hybridflow.rollout.tiles import tile_map
from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import as_index

MAX_MODEL_LEN = 96
_engines: dict[str, Engine] = {}  # at most one, by what it was built from


def engine(folder: str, tp: int) -> Engine:
    """The engine for this model's shape and tp; another one is closed first."""
    key = f"{folder} {tp}"
    if key not in _engines:
        close()
        _engines[key] = Engine(folder, tp, "float32", MAX_MODEL_LEN, engine_args={"max_num_seqs": 16})
    return _engines[key]


def close() -> None:
    for old in _engines.values():
        old.close()
    _engines.clear()


def fill(target: Engine, folder: str, tp: int) -> None:
    """Write an HF checkpoint into the engine's parameters through the tile map. Padding becomes garbage on purpose."""
    checkpoint = load_file(Path(folder) / "model.safetensors")
    tiles = tile_map(HFConfig.from_folder(folder), tp, dist.get_rank() % tp)
    parameters = target.parameters()
    assert set(tiles) == set(parameters)
    for name, parameter in parameters.items():
        parameter.fill_(1e4)
        for tile in tiles[name]:
            parameter[as_index(tile.local_slices)] = checkpoint[tile.hf_name][as_index(tile.hf_slices)]
    target.weights_changed()


def run(folder: str, tp: int, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int] | None = None) -> list[tuple]:
    """Fill an engine and generate; plain tuples (tokens, log_probs, truncated)."""
    target = engine(folder, tp)
    fill(target, folder, tp)
    torch.manual_seed(1000 + dist.get_rank())  # as training does: the ranks' generators differ
    generations = target.generate(prompts, seeds or list(range(len(prompts))), sampling)
    return [(g.tokens, g.log_probs, g.truncated) for g in generations]
