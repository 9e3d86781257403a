"""The rollout: vLLM engines in the training processes, one per `roles.rollout.tp` ranks of a node."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.protocols import MICRO_DP, ONE_TO_ALL, remote
from hybridflow.controller.role import Role
from hybridflow.roles.transfer import WeightTransfer
from hybridflow.rollout.engine import Engine, Sampling
from hybridflow.rollout.grouping import EngineLayout, choose_engines
from hybridflow.rollout.tiles import tile_map
from megatron_ext import device
from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import TileMap


class Rollout(Role):
    """Asleep when built and between steps: wake_weights -> receive -> wake_kv_cache -> generate -> sleep.

    Under `roles.rollout.sleep=false` it is always awake, and takes new weights as it is.
    """

    def __init__(self, name: str, config: Config):
        role = config.roles.rollout
        self.name, self.config = name, config
        path = config.model_path("rollout")
        self.hf = HFConfig.from_folder(path)
        self.layout = choose_layout(config, say=dist.get_rank() == 0)
        self.engine = Engine(
            path,
            role.tp,
            config.dtype("rollout"),
            config.sampling.max_prompt_tokens + config.sampling.max_response_tokens,
            role.gpu_memory_utilization,
            config.run.seed,
            dict(role.engine_args),
            role.expert_parallel,
            self.layout.order,
        )
        self._transfers: dict[str, WeightTransfer] = {}
        self.sleep()

    def tile_map(self, rank: int) -> TileMap:
        return tile_map(self.hf, self.layout.tp, self.layout.coordinates(rank).tp, self.config.roles.rollout.expert_parallel)

    def parameters(self) -> dict[str, Tensor]:
        return self.engine.parameters()

    @remote(ONE_TO_ALL)
    def wake_weights(self) -> None:
        """Memory for the weights comes back; their values come with `receive`."""
        self.engine.wake_weights()
        device.synchronize()

    @remote(ONE_TO_ALL)
    def receive(self, source: str, verify: bool) -> dict[str, Any]:
        """Take the weights that the Megatron role `source` holds now; see `WeightTransfer.run`."""
        if source not in self._transfers:
            self._transfers[source] = WeightTransfer(self.peers[source], self, self.config)
        report = self._transfers[source].run(verify)
        self.engine.weights_changed()
        return report

    @remote(ONE_TO_ALL)
    def wake_kv_cache(self) -> None:
        self.engine.wake_kv_cache()
        device.synchronize()

    @remote(ONE_TO_ALL)
    def sleep(self) -> None:
        """Drop weights and KV cache: the memory goes back to training."""
        if self.config.roles.rollout.sleep:
            self.engine.sleep()
        device.synchronize()

    @remote(MICRO_DP)
    def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> Batch:
        """Sample one response per row of `prompts` (field `prompt` ragged int64); engines draw different numbers.

        Returns a batch with tokens (prompt and response), loss_mask, rollout_log_probs and truncated.
        """
        rows = prompts.rows("prompt")
        engine = self.layout.coordinates(dist.get_rank()).dp
        generations = self.engine.generate([row.tolist() for row in rows], sampling, seed * self.layout.dp + engine)
        tokens, masks, log_probs = [], [], []
        for prompt, generation in zip(rows, generations, strict=True):
            response = torch.tensor(generation.tokens, dtype=torch.int64)
            tokens.append(torch.cat([prompt, response]))
            masks.append(torch.arange(len(tokens[-1])) >= len(prompt))
            log_probs.append(torch.cat([torch.zeros(len(prompt)), torch.tensor(generation.log_probs)]))
        return Batch(
            {
                "tokens": tokens,
                "loss_mask": masks,
                "rollout_log_probs": log_probs,
                "truncated": torch.tensor([generation.truncated for generation in generations]),
            }
        )

    def close(self) -> None:
        self.engine.close()


def choose_layout(config: Config, say: bool = False) -> EngineLayout:
    """Which ranks form an engine (`roles.rollout.grouping`): pure, the same on every rank and for the driver.

    `say`: print the engines that are not neighbours, and why.
    """
    role, training = config.roles.rollout, config.layout("actor")
    if role.grouping == "contiguous":
        return EngineLayout(config.world_size, role.tp)
    hf, per_node = HFConfig.from_folder(config.model_path("rollout")), config.cluster.ranks_per_node
    choice = choose_engines(hf, training, role.tp, per_node, role.expert_parallel)
    if say and choice.layout.order:
        print(choice.describe(getattr(torch, config.dtype("rollout")).itemsize, per_node), flush=True)
    return choice.layout
