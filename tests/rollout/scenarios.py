"""What the ranks of a test world do with engines. Engines are kept between calls, as building one takes seconds."""

import dataclasses
import gc
import os
import random
from pathlib import Path

import numpy
import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hybridflow.rollout import vllm_compat
from hybridflow.rollout.engine import Engine, Generation, Sampling
from hybridflow.rollout.tiles import local_shapes, tile_map
from megatron_ext.hf_config import HFConfig
from megatron_ext.tiles import as_index

MAX_MODEL_LEN = 96
_engines: dict[str, Engine] = {}  # at most one, by what it was built from


def engine(folder: str, tp: int, expert_parallel: bool = False) -> Engine:
    """The engine for this model's shape and layout; another one is closed first."""
    key = f"{folder} {tp} {expert_parallel}"
    if key not in _engines:
        close()
        arguments = {"engine_args": {"max_num_seqs": 16}, "expert_parallel": expert_parallel}
        _engines[key] = Engine(folder, tp, "float32", MAX_MODEL_LEN, **arguments)
    return _engines[key]


def close() -> None:
    for old in _engines.values():
        old.close()
    _engines.clear()


def write(target: Engine, folder: str, tp: int, expert_parallel: bool = False) -> dict[str, int]:
    """Write a checkpoint into the engine's parameters through the tile map, and garbage into what no tile covers.

    Returns how many elements of each parameter no tile covers, where there are any.
    """
    checkpoint = load_file(Path(folder) / "model.safetensors")
    layout = HFConfig.from_folder(folder), tp, dist.get_rank() % tp, expert_parallel
    tiles, parameters = tile_map(*layout), target.parameters()
    assert local_shapes(*layout) == {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    uncovered = {}
    for name, parameter in parameters.items():
        parameter.fill_(1e4)
        times = torch.zeros(parameter.shape, dtype=torch.int)
        for tile in tiles[name]:
            parameter[as_index(tile.local_slices)] = checkpoint[tile.hf_name][as_index(tile.hf_slices)]
            times[as_index(tile.local_slices)] += 1
        assert times.max() <= 1, f"tiles of {name} overlap"
        if (times == 0).any():
            uncovered[name] = int((times == 0).sum())
    return uncovered


def fill(target: Engine, folder: str, tp: int, expert_parallel: bool = False) -> dict[str, int]:
    uncovered = write(target, folder, tp, expert_parallel)
    target.weights_changed()
    return uncovered


def diverge_generators() -> None:
    """As training does with dropout and data: the ranks' random number generators differ from here on."""
    torch.manual_seed(1000 + dist.get_rank())


def against_hf(folder: str, tp: int, prompts: list[list[int]], samplings: list[Sampling]) -> dict:
    """The generations for every sampling, and what the tiles leave uncovered on this rank."""
    target = engine(folder, tp)
    uncovered = fill(target, folder, tp)
    diverge_generators()
    return {"uncovered": uncovered, "generations": [target.generate(prompts, sampling, 3) for sampling in samplings]}


def updates(folders: list[str], tp: int, expert_parallel: bool, prompts: list[list[int]], sampling: Sampling) -> list[dict]:
    """What `against_hf` gives for one sampling, for every folder in turn, asleep in between; they have one shape."""
    target, found = engine(folders[0], tp, expert_parallel), []
    for folder in folders:
        target.sleep()
        target.wake_weights()
        uncovered = fill(target, folder, tp, expert_parallel)
        target.wake_kv_cache()
        tokens = [generation.tokens for generation in target.generate(prompts, sampling, 3)]
        found.append({"uncovered": uncovered, "tokens": tokens})
    return found


def generate(folder: str, tp: int, prompts: list[list[int]], sampling: Sampling, seed: int = 0) -> list[Generation]:
    target = engine(folder, tp)
    fill(target, folder, tp)
    diverge_generators()
    return target.generate(prompts, sampling, seed)


def change_weights(shape: str, tp: int, folders: list[str], prompt: list[int], sampling: Sampling) -> dict:
    """Greedy tokens after each change of weights, and with a change that the engine was not told of."""
    target, tokens = engine(shape, tp), []
    for folder in folders:
        fill(target, folder, tp)
        tokens.append(target.generate([prompt], sampling, 0)[0].tokens)
    write(target, folders[0], tp)
    return {"tokens": tokens, "untold": target.generate([prompt], sampling, 0)[0].tokens}


def message(function, *args) -> str:
    """What the call complains about; "" if it does not."""
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def sleep_and_wake(folder: str, tp: int, prompts: list[list[int]], sampling: Sampling) -> dict:
    """Two rounds of sleep and wake, with every misuse on the way."""
    target = engine(folder, tp)
    fill(target, folder, tp)
    storages = vllm_compat.kv_cache_storages(target._llm)
    addresses = {name: parameter.data_ptr() for name, parameter in target.parameters().items()}
    sizes, complaints, rounds = [[s.nbytes() for s in storages]], {}, []
    for _ in range(2):
        target.sleep()
        target.sleep()  # harmless
        sizes.append([s.nbytes() for s in storages])
        complaints["generate asleep"] = message(target.generate, prompts, sampling, 0)
        complaints["KV cache first"] = message(target.wake_kv_cache)
        complaints["weights asleep"] = message(target.weights_changed)
        target.wake_weights()
        complaints["generate half awake"] = message(target.generate, prompts, sampling, 0)
        complaints["sleep half awake"] = message(target.sleep)
        target.wake_kv_cache()
        complaints["unwritten weights"] = message(target.generate, prompts, sampling, 0)
        fill(target, folder, tp)
        rounds.append([g.tokens for g in target.generate(prompts, sampling, 0)])
        sizes.append([s.nbytes() for s in storages])
    same = addresses == {name: parameter.data_ptr() for name, parameter in target.parameters().items()}
    return {"sizes": sizes, "complaints": complaints, "rounds": rounds, "same_addresses": same}


def on_a_gpu(folders: list[str], prompts: list[list[int]], sampling: Sampling) -> dict:
    """Tokens without a stop token, then for every folder in turn, asleep in between, those up to the first response's sixth."""
    target = Engine(folders[0], 1, "bfloat16", MAX_MODEL_LEN, 0.2, engine_args={"max_num_seqs": 16, "enforce_eager": True})
    core = target._llm.engine_core.engine_core
    fill(target, folders[0], 1)
    whole = [generation.tokens for generation in target.generate(prompts, sampling, 0)]
    stopping = dataclasses.replace(sampling, stop_token_ids=(whole[0][5],))
    stopped, in_flight = [], []
    for folder in folders:
        target.sleep()
        target.wake_weights()
        fill(target, folder, 1)
        target.wake_kv_cache()
        stopped.append([generation.tokens for generation in target.generate(prompts, stopping, 3)])
        in_flight.append(len(core.batch_queue))
    target.close()
    return {"ahead": core.async_scheduling, "in_flight": in_flight, "whole": whole, "stopped": stopped}


def complaints(folder: str, tp: int) -> dict[str, str]:
    """What is said to requests and to arguments that cannot be served."""
    target = engine(folder, tp)
    fill(target, folder, tp)

    def request(prompt: list[int], **sampling) -> str:
        return message(target.generate, [prompt], Sampling(**sampling), 0)

    def build(tp: int = tp, **engine_args) -> str:
        return message(Engine, folder, tp, "float32", MAX_MODEL_LEN, 0.5, 0, engine_args)

    return {
        "long": request([1] * MAX_MODEL_LEN), "empty": request([]),
        "cold": request([1], temperature=0.0), "top_p": request([1], top_p=0.0), "max_tokens": request([1], max_tokens=0),
        "unknown": build(max_num_seq=4), "owned": build(dtype="auto"), "fixed": build(load_format="auto"),
        "block_size": build(block_size=16), "tp": build(tp=3),
    }  # fmt: skip


def process_state(folder: str, tp: int, prompts: list[list[int]], sockets: str) -> dict:
    """Build an engine, use it and close it in a process that has a life of its own, and a folder for sockets.

    The batch holds fewer tokens than the prompts have together: they must not be prefilled in chunks.
    """
    close()
    group = dist.new_group(list(range(dist.get_world_size())))
    os.environ |= {"TRAINERS_OWN": "1", "VLLM_RPC_BASE_PATH": sockets}
    diverge_generators()
    random.seed(dist.get_rank())
    numpy.random.seed(dist.get_rank())
    before = _state()
    small_batch = {"max_num_batched_tokens": MAX_MODEL_LEN, "max_num_seqs": 16}
    target = Engine(folder, tp, "float32", MAX_MODEL_LEN, engine_args=small_batch)
    fill(target, folder, tp)
    built = _state()
    bound = [each.laddr for each in psutil.Process().net_connections("unix") if each.laddr.startswith(sockets)]
    from vllm.distributed.parallel_state import get_tp_group  # vLLM is imported by the engine only

    shared_memory = get_tp_group().device_communicator.dist_module is not dist
    generations = target.generate(prompts, Sampling(max_tokens=4), 5)
    target.close()
    target.close()  # harmless
    sums = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(sums[0])
    dist.all_reduce(sums[1], group=group)
    return {
        "changed by building": [name for name in before if built[name] != before[name]],
        "changed by closing": [name for name in before if name != "torch" and _state()[name] != before[name]],
        "shared memory": shared_memory,
        "sockets": len(bound),
        "generations": generations,
        "sums": [s.item() for s in sums],
        "closed": message(target.generate, prompts, Sampling(), 0),
    }


def _state() -> dict:
    functions = (torch.set_num_threads, torch.Event, torch.cuda.Event, torch.cuda.Stream)
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "garbage collector": gc.isenabled(),
        "functions": [id(function) for function in functions],
    }
