"""The rollout: vLLM engines in the training processes or in their own, one per `roles.rollout.tp` ranks of a node."""

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
from hybridflow.rollout.grouping import choose_layout
from megatron_ext import device


class Rollout(Role):
    """Asleep when built and between steps: wake_weights -> receive -> wake_kv_cache -> generate -> sleep.

    Under `roles.rollout.sleep=false`, and on ranks of its own, it is always awake, and takes new weights as it is.
    """

    def __init__(self, name: str, config: Config):
        role = config.roles.rollout
        self.name, self.config = name, config
        path = config.model_path("rollout")
        choice = choose_layout(config)
        self.layout = choice.layout
        if choice.layout.order and dist.get_rank() == 0:
            print(choice.describe(getattr(torch, config.dtype(name)).itemsize, config.cluster.ranks_per_node), flush=True)
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
        self._sleeps = role.sleep and config.rollout_shares
        self.sleep()

    def parameters(self) -> dict[str, Tensor]:
        return self.engine.parameters()

    @remote(ONE_TO_ALL)
    def wake_weights(self) -> None:
        """Memory for the weights comes back; their values come with `receive`."""
        self.engine.wake_weights()
        device.synchronize()

    @remote(ONE_TO_ALL, giver="give_to")
    def receive(self, source: str, verify: bool) -> dict[str, Any]:
        """Take the weights that the Megatron role `source` holds now; see `WeightTransfer.run`."""
        if source not in self._transfers:
            self._transfers[source] = WeightTransfer(self.config, source, self.name, self.peers)
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
        if self._sleeps:
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
