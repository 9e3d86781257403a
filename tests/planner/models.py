"""Shapes of models and clusters for tests of the planner."""

import json
from pathlib import Path

from hybridflow.planner.hardware import Cluster, named
from megatron_ext.hf_config import HFConfig

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).parent / "h200_updates.json"


def shape(name: str, head: str = "lm", **fields) -> HFConfig:
    """A model of configs/models, some of its fields changed."""
    return HFConfig.from_dict(json.loads((ROOT / "configs" / "models" / f"{name}.json").read_text()) | fields, head=head)


def h200s(gpus: int, nodes: int = 1) -> Cluster:
    return Cluster(named("H200"), nodes, gpus)
