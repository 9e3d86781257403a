"""A vLLM engine inside the training processes, over the default torch.distributed world.

    engine = Engine(path, tp=2, dtype="float32", max_model_len=192, gpu_memory_utilization=0.5, seed=1)   # on all ranks
    engine.sleep()                                            # ... train ...
    engine.wake_weights()                                     # then write into engine.parameters() in place
    engine.weights_changed()
    engine.wake_kv_cache()
    generations = engine.generate(prompts, Sampling(max_tokens=64, stop_token_ids=(2,)), seed=7)

Ranks k x tp .. (k + 1) x tp - 1 form engine k, or those at these places of the list `order`. Building, `sleep`, waking and
`close` are for all ranks; `generate` is for the ranks of one engine, with equal arguments.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from hybridflow import garbage
from hybridflow.rollout import vllm_compat
from hybridflow.rollout.engine_args import LOWEST_TEMPERATURE, check_not_owned
from hybridflow.rollout.tiles import check_tp
from megatron_ext.hf_config import HFConfig

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class Sampling:
    """How to sample. `greedy` ignores temperature and top_p; its log-probs are those of temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop_token_ids: Sequence[int] = ()
    greedy: bool = False


@dataclass(frozen=True)
class Generation:
    """One response: its tokens, the stop token included, and their log-probs after temperature and top_p.

    `truncated`: it ended for want of length, not at a stop token.
    """

    tokens: list[int]
    log_probs: list[float]
    truncated: bool


class Engine:
    """vLLM in this process, with dummy weights until somebody writes `parameters()` and calls `weights_changed()`.

    Args:
        model_path: HF folder; only its config is read. No tokenizer is needed.
        tp: ranks per engine; divides the default world.
        dtype: of weights and KV cache, such as "float32" or "bfloat16".
        max_model_len: tokens of prompt and response together, at most.
        gpu_memory_utilization: share of the device's memory for weights and KV cache. On CPU it bounds the KV caches of
            a host's ranks together.
        seed: of the engine; sampling follows the seed given to `generate`.
        engine_args: further arguments of `vllm.EngineArgs`.
        expert_parallel: every rank of an engine holds its share of whole experts, not its columns of all of them.
        order: all ranks, engine after engine, each engine's in the order of their tensor-parallel ranks; () for 0, 1, 2, ...

    Raises:
        ValueError: an argument that does not fit; the message names the key to change.
    """

    def __init__(
        self,
        model_path: str,
        tp: int,
        dtype: str,
        max_model_len: int,
        gpu_memory_utilization: float = 0.6,
        seed: int = 0,
        engine_args: dict[str, Any] | None = None,
        expert_parallel: bool = False,
        order: Sequence[int] = (),
    ):
        hf = HFConfig.from_folder(model_path)
        check_tp(hf, tp, expert_parallel)
        _check_world(tp)
        self.max_model_len = max_model_len
        self._on_cpu = not torch.cuda.is_available()
        own = {
            "model": str(model_path),
            "tensor_parallel_size": tp,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "seed": seed,
            "enable_expert_parallel": expert_parallel,
        }
        defaults = _cpu_arguments(hf, own, engine_args or {}) if self._on_cpu else {}
        if hf.is_moe and not self._on_cpu:
            own["moe_backend"] = "triton"  # the others permute the experts after loading
        with vllm_compat.preserved_process_state():
            vllm_compat.set_launcher_environment(torch.cuda.current_device() if torch.cuda.is_available() else 0)
            with garbage.none_yet():
                vllm_compat.apply_patches()
            check_engine_args(engine_args or {})
            with vllm_compat.engines_of(order), vllm_compat.sockets_without_files():
                self._llm = _build(own | defaults | (engine_args or {}), enable_sleep_mode=not self._on_cpu)
        self._parameters = vllm_compat.writable_parameters(self._llm)
        self._kv_cache_bytes: list[int] = []  # of the storages that sleep has emptied (CPU)
        self._weights_awake = self._kv_cache_awake = True
        self._weights_valid = False
        self._closed = False

    def parameters(self) -> dict[str, torch.Tensor]:
        """What to write the weights into, by name. Addresses never change; write while the weights are awake.

        They are the engine's own tensors, experts in two dimensions: w13 [experts x 2 x inner, hidden] with each expert's
        gate above its up, w2 [experts x hidden, inner]. Only for experts on CPU they are buffers: see `weights_changed`.
        """
        return self._parameters

    def sleep(self) -> None:
        """Give weights and KV cache back. On CUDA both are dropped; on CPU the weights stay where they are.

        Raises:
            RuntimeError: the engine is half awake: vLLM would free the sleeping half twice.
        """
        self._check_open()
        if not self._weights_awake and not self._kv_cache_awake:
            return
        if not (self._weights_awake and self._kv_cache_awake):
            raise RuntimeError("the rollout engine is half awake: call wake_kv_cache() before sleep()")
        if self._on_cpu:
            self._empty_kv_cache()
        else:
            with vllm_compat.trainers_cache_kept():
                self._llm.sleep(level=2)
        self._weights_awake = self._kv_cache_awake = self._weights_valid = False

    def wake_weights(self) -> None:
        """Give the weights their memory back; what they hold is undefined until it is written."""
        self._check_open()
        if not self._weights_awake and not self._on_cpu:
            vllm_compat.wake_up(self._llm, "weights")
        self._weights_awake = True

    def wake_kv_cache(self) -> None:
        """Give the KV cache its memory back.

        Raises:
            RuntimeError: the weights are asleep still.
        """
        self._check_open()
        if not self._weights_awake:
            raise RuntimeError("the rollout engine's weights are asleep: call wake_weights() before wake_kv_cache()")
        if not self._kv_cache_awake:
            if self._on_cpu:
                self._restore_kv_cache()
            else:
                vllm_compat.wake_up(self._llm, "kv_cache")
        self._kv_cache_awake = True

    def weights_changed(self) -> None:
        """Say that all parameters hold what they should: packs weights that the engine keeps in a layout of its own (experts
        on CPU), and forgets what older weights left in the prefix cache."""
        self._check_open()
        if not self._weights_awake:
            raise RuntimeError("the rollout engine's weights are asleep: call wake_weights() and write them first")
        vllm_compat.finish_weights(self._llm, self._parameters)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self._weights_valid = True

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Generation]:
        """One response per prompt, in order. Every rank of the engine must pass the same arguments.

        The seed makes the ranks of an engine agree, whose random number generators training has driven apart: they draw
        the same numbers for the same batches. (A seed per request costs a kernel launch per request and token.)

        Raises:
            RuntimeError: the engine is asleep, or its weights were not written since it slept.
            ValueError: an argument is unusable; a prompt leaves no room for a response.
        """
        self._check_ready()
        _check_sampling(sampling)
        self._check_prompts(prompts)
        parameters = _sampling_params(sampling)
        generations: dict[int, Generation] = {}
        with vllm_compat.seeded_generators(seed):
            for index, prompt in enumerate(prompts):
                request = {"type": "token", "prompt_token_ids": list(prompt)}
                self._llm.add_request(str(index), request, parameters)
            while self._llm.has_unfinished_requests():
                for output in self._llm.step():
                    generations[int(output.request_id)] = _generation(output.outputs[0])
            vllm_compat.finish_steps(self._llm)
        return [generations[index] for index in range(len(prompts))]

    def close(self) -> None:
        """Shut the engine down and free its memory; the default process group stays. For all ranks, together."""
        if self._closed:
            return
        self._closed = True
        with vllm_compat.preserved_process_state():
            vllm_compat.shut_down(self._llm)
        self._parameters = {}
        del self._llm

    def _empty_kv_cache(self) -> None:
        # vLLM refuses sleep mode on CPU, so the memory under its tensors goes by hand; views and addresses of tensors stay
        storages = vllm_compat.kv_cache_storages(self._llm)
        self._kv_cache_bytes = [storage.nbytes() for storage in storages]
        self._kv_cache = storages
        for storage in storages:
            storage.resize_(0)

    def _restore_kv_cache(self) -> None:
        for storage, size in zip(self._kv_cache, self._kv_cache_bytes, strict=True):
            storage.resize_(size)
            storage.fill_(0)  # a NaN in a block's unused tail would spread through the attention's masked products
        self._llm.reset_prefix_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the rollout engine is closed")

    def _check_ready(self) -> None:
        self._check_open()
        if not self._weights_awake or not self._kv_cache_awake:
            asleep = "KV cache" if self._weights_awake else "weights"
            raise RuntimeError(f"the rollout engine sleeps ({asleep}): wake it before generate()")
        if not self._weights_valid:
            raise RuntimeError("the rollout engine has no weights: write parameters() and call weights_changed() first")

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.max_model_len:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens, where 1 to {self.max_model_len - 1} fit "
                    f"max_model_len={self.max_model_len}: drop it or raise sampling.max_prompt_tokens"
                )


def check_engine_args(engine_args: dict[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, and those that are not the user's to set.

    Raises:
        ValueError: naming the argument.
    """
    from vllm import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    check_not_owned(engine_args)
    for name in engine_args:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"roles.rollout.engine_args.{name} is not an argument of vLLM{hint}")


def _check_world(tp: int) -> None:
    if not dist.is_initialized():
        raise RuntimeError("the rollout engine joins the default process group: initialise torch.distributed first")
    if dist.get_world_size() % tp:
        raise ValueError(f"roles.rollout.tp={tp} does not divide the {dist.get_world_size()} ranks")


def _build(arguments: dict[str, Any], enable_sleep_mode: bool) -> "LLMEngine":
    with garbage.none_yet():  # vLLM looks for some five times while it builds
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

    fixed = {
        "distributed_executor_backend": "external_launcher",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the folder's own would add stop tokens that the caller did not ask for
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": enable_sleep_mode,
        "disable_log_stats": True,
    }
    return LLMEngine.from_engine_args(EngineArgs(**fixed, **arguments), UsageContext.LLM_CLASS)


def _cpu_arguments(hf: HFConfig, own: dict[str, Any], engine_args: dict[str, Any]) -> dict[str, Any]:
    """Defaults that make small rollouts on a few cores fast.

    A seeded request cannot be prefilled in chunks on CPU (its generator has no offset to wind back), hence whole prompts.
    The KV cache has room for every sequence at full length, within the share of the host's memory.
    """
    sequences, block = int(engine_args.get("max_num_seqs", 256)), int(engine_args.get("block_size", 32))
    heads = max(1, hf.num_kv_heads // own["tensor_parallel_size"])
    token_bytes = 2 * hf.num_layers * heads * hf.head_dim * getattr(torch, own["dtype"]).itemsize
    if block % 32:
        raise ValueError(f"roles.rollout.engine_args.block_size={block} is not a multiple of 32, which attention on CPU needs")
    blocks_per_sequence = -(-own["max_model_len"] // block)
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    allowed = int(psutil.virtual_memory().total * own["gpu_memory_utilization"]) // ranks_of_host
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(own["max_model_len"], sequences, 8192),
        "max_num_seqs": sequences,
        "block_size": block,
        "kv_cache_memory_bytes": min((sequences * blocks_per_sequence + 1) * block * token_bytes, allowed),
    }


def _check_sampling(sampling: Sampling) -> None:
    if not sampling.greedy and sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"sampling.temperature={sampling.temperature} is below {LOWEST_TEMPERATURE}: sample greedily instead")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"sampling.top_p={sampling.top_p} is outside (0, 1]")
    if sampling.max_tokens < 1:
        raise ValueError(f"sampling.max_response_tokens={sampling.max_tokens} is below 1")


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the given stop tokens end a response
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # nobody else holds it, and 256 deep copies are felt in a short rollout
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _generation(completion: Any) -> Generation:
    return Generation(list(completion.token_ids), list(completion.logprobs.logprobs), completion.finish_reason == "length")
