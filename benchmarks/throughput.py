"""Tokens a second of a job's phases: the update, the pass for log-probs, and the rollout against plain vLLM.

    torchrun --nproc-per-node 2 benchmarks/throughput.py --model configs/models/qwen2_7b.json --parts update log_probs \\
        --tokens 4096 --micro-batches 8 --out benchmarks/results/throughput_h200x2_pp2.json roles.actor.pp=2
    torchrun --nproc-per-node 2 benchmarks/throughput.py --model configs/models/qwen2_7b.json --parts rollout \\
        --prompts 128 --prompt-tokens 512 --response-tokens 512 --out benchmarks/results/rollout_h200x2.json roles.rollout.tp=2
    torchrun --nproc-per-node 2 benchmarks/throughput.py --model configs/models/qwen2_7b.json --parts update --out both.json \\
        --row "--note TP2 roles.actor.tp=2 roles.actor.sequence_parallel=true" --row "--micro-batches 16 roles.actor.pp=2"

The roles are the trainer's own, with random weights of the model's shapes; `key=value` sets any key of a config. What is timed
is one call on every rank, from a barrier until the slowest device has finished; warm-up is left out. The whole step of a job is
`benchmarks/whole_step.py`'s. `--out` also holds the parts as runs that `hybridflow plan --calibrate` and
`benchmarks/forecast.py` take, under `--note` if one is given. Each `--row` is a measurement of its own, with these words behind
the others, so that any option or key can differ; all rows share the processes, which take longer to start than to measure. Not
with a rollout: on a GPU an engine lasts as long as its process.

update, log_probs: every data-parallel rank gets `--micro-batches` of exactly `--tokens` packed tokens: three sequences of a
half and two quarters, or with `--longest L` as many threes of L, L/2 and L/2 as fit, so that micro-batches of several sizes can
do the same work. MFU is training_flops (hybridflow/metrics/throughput.py: 6 N T + 12 L A sum(l^2) over packed sequences,
causal attention not discounted, recomputation not counted; a third of it without backward) / seconds / GPUs / the peak of dense
bf16. A rollout makes `--prompts` responses per engine, all of `--response-tokens`; plain vLLM (`vllm.LLM`, its defaults) makes
the same before, in processes of its own, with the same sampling and its log-probs.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import commands, record  # noqa: E402
from benchmarks.bandwidth import device_here, most, seconds_of  # noqa: E402
from benchmarks.gpu_use import watched  # noqa: E402
from benchmarks.reshard import join_world, release_memory  # noqa: E402
from benchmarks.runs import rollout_run, training_run  # noqa: E402
from hybridflow.algorithms.objectives import policy_objective  # noqa: E402
from hybridflow.batch import Batch  # noqa: E402
from hybridflow.config.load import load  # noqa: E402
from hybridflow.config.preflight import check_shapes  # noqa: E402
from hybridflow.config.schema import Config, ConfigError  # noqa: E402
from hybridflow.metrics.throughput import training_flops  # noqa: E402
from hybridflow.planner.forecast import recomputed  # noqa: E402
from hybridflow.planner.hardware import gpu  # noqa: E402
from hybridflow.planner.memory import engine_weights  # noqa: E402
from hybridflow.rollout import vllm_compat  # noqa: E402
from megatron_ext import device  # noqa: E402
from megatron_ext.hf_config import HFConfig  # noqa: E402

CPU_KV_CACHE_BYTES = 256 << 20  # of plain vLLM; left alone it takes most of the host
PARTS = ("update", "log_probs", "rollout")
RECIPE = """
model: {{path: {model}, dtype: bfloat16}}
cluster: {{nodes: {nodes}, ranks_per_node: {ranks_per_node}}}
roles:
  actor: {{micro_batch_tokens: {tokens}, forward_micro_batch_tokens: {tokens}}}
algorithm: {{name: grpo}}
sampling: {{max_prompt_tokens: {prompt_tokens}, max_response_tokens: {response_tokens}}}
data: {{task: chain_sum}}
reward: {{kind: last_integer}}
run: {{dir: {model}/run}}
"""


class Case(NamedTuple):
    """One measurement."""

    arguments: argparse.Namespace
    overrides: list[str]
    config: Config

    def as_json(self) -> dict[str, Any]:
        options = {name: value for name, value in vars(self.arguments).items() if name != "out"}
        return {**options, "overrides": self.overrides, "model_fields": model_fields(self.arguments)}


def main() -> int:
    rows, words = rows_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        try:
            cases = [read([*words, *row], Path(folder) / str(number)) for number, row in enumerate(rows or [[]])]
            if rows and any("rollout" in case.arguments.parts for case in cases):
                raise ValueError("--row goes with --parts update and log_probs: an engine lasts as long as its process")
        except (ConfigError, ValueError) as error:
            if int(os.environ.get("RANK", 0)) == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2
        run(cases)
        dist.barrier()
        dist.destroy_process_group()
    return 0


def rows_of(words: list[str]) -> tuple[list[list[str]], list[str]]:
    """The words of each `--row`, and all other words."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--row", action="append", default=[])
    found, others = own.parse_known_args(words)
    return [shlex.split(row) for row in found.row], others


def run(cases: list[Case]) -> None:
    """Measures and reports them; joins the world. What there is is written after each, so that nothing is lost."""
    plain = plain_rollout(cases[0]) if "rollout" in cases[0].arguments.parts else []
    device.install()
    join_world()
    results: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for case in cases:
        results.append(measure(case, plain))
        found += runs(case, results[-1])
        release_memory()
        if dist.get_rank() == 0:
            for name, result in results[-1].items():
                print(line(name, result, case.arguments.note), flush=True)
            if case.arguments.out and len(cases) == 1:
                record.write(case.arguments.out, case.as_json(), {**results[-1], "runs": found})
            elif case.arguments.out:
                written = {"rows": [case.as_json() for case in cases]}
                record.write(case.arguments.out, written, {"rows": results, "runs": found})


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", required=True, metavar="FILE", help="a config.json in HF format")
    result.add_argument("--layers", type=commands.at_least(0), default=0, help="so many instead of the model's")
    result.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    result.add_argument("--tokens", type=commands.at_least(8), default=4096, help="of a packed micro-batch")
    result.add_argument(
        "--longest", type=commands.at_least(0), default=0, help="tokens of a micro-batch's longest sequence (half of it)"
    )
    result.add_argument("--micro-batches", type=commands.at_least(1), default=8, help="of a data-parallel rank")
    result.add_argument("--prompts", type=commands.at_least(1), default=64, help="of an engine")
    result.add_argument("--prompt-tokens", type=commands.at_least(1), default=256)
    result.add_argument("--response-tokens", type=commands.at_least(1), default=256)
    result.add_argument("--steps", type=commands.at_least(1), default=10, help="timed ones")
    result.add_argument("--warmup", type=commands.at_least(0), default=3)
    result.add_argument("--note", default="", help="what this run tries")
    result.add_argument("--row", metavar="'WORDS'", help="a measurement with these words behind the others; may be repeated")
    result.add_argument("--out", type=Path, metavar="FILE.json")
    return result


def model_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the model's config.json, with `--layers`."""
    return commands.read_model(arguments.model, arguments.layers)


def micro_batch_lengths(arguments: argparse.Namespace) -> list[int]:
    """Tokens of a micro-batch's sequences."""
    longest = arguments.longest or arguments.tokens // 2
    return [longest, longest // 2, longest // 2] * (arguments.tokens // (2 * longest))


def read(words: list[str], folder: Path) -> Case:
    """What a command's words ask for, over a model folder of shapes only. Raises ConfigError or ValueError if that is wrong."""
    from hybridflow.data.tokenizer import ARITHMETIC, character_tokenizer

    arguments, overrides = parser().parse_known_args(words)
    strangers = [word for word in overrides if "=" not in word or word.startswith("-")]
    if strangers:
        raise ValueError(f"unknown arguments {strangers}: config keys have the form key=value")
    commands.check_out(arguments.out)
    if arguments.tokens % 4 or arguments.tokens < 8:
        raise ValueError(f"--tokens={arguments.tokens} must be a multiple of 4, and 8 at least: three sequences share them")
    if arguments.longest and (arguments.longest < 4 or arguments.longest % 2 or arguments.tokens % (2 * arguments.longest)):
        raise ValueError(
            f"--longest={arguments.longest} must be even, and --tokens={arguments.tokens} a multiple of twice that"
        )
    world = int(os.environ.get("WORLD_SIZE", 1))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    folder.mkdir()
    character_tokenizer(ARITHMETIC).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(model_fields(arguments)))
    recipe = folder / "recipe.yaml"
    sizes = {name: getattr(arguments, name) for name in ("tokens", "prompt_tokens", "response_tokens")}
    if "rollout" not in arguments.parts:
        sizes |= {"prompt_tokens": arguments.tokens // 2, "response_tokens": arguments.tokens // 2}
    recipe.write_text(RECIPE.format(model=folder, nodes=world // ranks, ranks_per_node=ranks, **sizes))
    config = load(recipe, overrides)
    check_shapes(config)
    for key in ("micro_batch_tokens", "forward_micro_batch_tokens"):
        if getattr(config.roles.actor, key) != arguments.tokens:
            raise ValueError(
                f"roles.actor.{key}={getattr(config.roles.actor, key)} is --tokens={arguments.tokens}: set that one"
            )
    return Case(arguments, overrides, config)


def measure(case: Case, plain: list[float]) -> dict[str, Any]:
    """Figures by part; the same on every rank. `plain`: seconds of plain vLLM's rollouts."""
    arguments, _, config = case
    from benchmarks.random_actor import RandomActor
    from hybridflow.roles.rollout import Rollout

    results: dict[str, Any] = {}
    rollout = Rollout("rollout", config) if "rollout" in arguments.parts else None
    actor = RandomActor("actor", config)
    batch = training_batch(arguments, config, actor.hf)
    if rollout:
        rollout.peers = {"rollout": rollout, "actor": actor}
        results["rollout"] = rollout_figures(arguments, config, rollout, plain)
    if "log_probs" in arguments.parts:
        run = lambda: actor_call(actor, actor.log_probs, batch)  # noqa: E731
        results["log_probs"] = figures(arguments, config, batch, run, 1 / 3, beside=gradient_bytes(actor))
    if "update" in arguments.parts:
        from hybridflow.algorithms.run import optimizer_settings

        with actor.context():
            actor.start_training(optimizer_settings(config.roles.actor.optimizer))
        loss = policy_objective(config.algorithm, 0.0)
        results["update"] = figures(arguments, config, batch, lambda: actor_call(actor, actor.update, batch, loss, 1.0), 1.0)
    if rollout:
        rollout.close()
    return results


def gradient_bytes(actor: Any) -> int:
    """Of this rank's buffers, which are there from the start."""
    buffers = [buffer for chunk in actor.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return sum(buffer.grad_data.nbytes for buffer in buffers)


def actor_call(actor: Any, method: Callable, *args: Any) -> None:
    with actor.context():
        method(*args)


def training_batch(arguments: argparse.Namespace, config: Config, hf: HFConfig) -> Batch:
    """This data-parallel rank's sequences, all of whose tokens but the first were sampled."""
    dp = config.layout("actor").coordinates(dist.get_rank()).dp
    generator = torch.Generator().manual_seed(dp)
    lengths = micro_batch_lengths(arguments) * arguments.micro_batches
    ragged = {
        "tokens": [torch.randint(hf.vocab_size, (length,), generator=generator) for length in lengths],
        "loss_mask": [torch.arange(length) > 0 for length in lengths],
        "advantages": [torch.randn(length, generator=generator) for length in lengths],
        "rollout_log_probs": [torch.full((length,), -10.0) for length in lengths],
    }
    return Batch(ragged)


def figures(
    arguments: argparse.Namespace, config: Config, batch: Batch, call: Callable[[], None], share: float, beside: int = 0
) -> dict[str, Any]:
    """Seconds, tokens and operations of one call on all ranks.

    `share`: of the operations of forward and backward. `beside`: bytes that torch has allocated for other calls than this.
    """
    layout = config.layout("actor")
    hf, lengths = HFConfig.from_folder(config.model_path("actor")), batch.lengths().tolist()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with watched() as use:
        seconds = seconds_of(call, arguments.steps, warm_up=arguments.warmup)
    median, known = statistics.median(seconds), gpu()
    flops = share * training_flops(hf, lengths) * layout.dp / layout.world_size / median
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else device.memory_in_use()
    return {
        "layout": layout.describe(),
        "micro_batches": arguments.micro_batches,
        "micro_batch_tokens": arguments.tokens,
        "seconds": {"median": median, "best": min(seconds), "worst": max(seconds), "all": seconds},
        "tokens_per_second_per_gpu": sum(lengths) * layout.dp / layout.world_size / median,
        "flops_per_second_per_gpu": flops,
        "mfu": flops / known.bf16_flops if known else None,
        "peak_allocated_bytes": int(most(peak)),
        "peak_of_call_bytes": int(most(peak - beside)),
        "gpu": use,
    }


def runs(case: Case, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The results as the planner reads them. Memory where torch counts it and no engine sleeps in the process, which it would
    count as well. Collective."""
    arguments, _, config = case
    here, fields, found = device_here(), model_fields(arguments), []
    dtype, role = config.dtype("actor"), config.roles.actor
    for name, phase in (("update", "update"), ("log_probs", "forward")):
        if name in results:
            counts = torch.cuda.is_available() and "rollout" not in results
            row = training_run(
                phase,
                here,
                fields,
                config.layout("actor"),
                arguments.micro_batches,
                micro_batch_lengths(arguments),
                results[name]["seconds"]["median"],
                dtype=dtype,
                recompute=recomputed(role) if phase == "update" else "none",
                peak_bytes=results[name]["peak_of_call_bytes"] if counts else 0,
                note=arguments.note,
            )
            found.append(row)
    if "rollout" in results:
        rolled, asked = results["rollout"], (arguments.prompts, arguments.prompt_tokens, arguments.response_tokens)
        measured = {name: rolled[name] for name in ("memory_bytes", "eager")} | {"seconds": rolled["seconds"]["median"]}
        found.append(rollout_run(here, fields, config.roles.rollout.tp, *asked, dtype=config.dtype("rollout"), **measured))
    return found


def rollout_figures(arguments: argparse.Namespace, config: Config, rollout: Any, plain: list[float]) -> dict[str, Any]:
    """Ours after a resharding as in a step, against `plain` seconds; an engine's ranks pass the same prompts."""
    from hybridflow.rollout.engine import Sampling

    engine = rollout.layout.coordinates(dist.get_rank()).dp
    sampling = Sampling(max_tokens=arguments.response_tokens, stop_token_ids=())
    rollout.wake_weights()
    rollout.receive("actor", False)
    rollout.wake_kv_cache()
    attempts = iter(range(arguments.warmup + arguments.steps))
    hf = HFConfig.from_folder(config.model_path("rollout"))
    memory = engine_bytes(config, hf, rollout)

    def generate() -> None:
        attempt = next(attempts)
        found = rollout.engine.generate(
            prompts(arguments, hf.vocab_size, engine, attempt),
            sampling,
            attempt,
        )
        if any(len(generation.tokens) != arguments.response_tokens for generation in found):
            raise RuntimeError("a response is shorter than --response-tokens: the figures would mean nothing")

    seconds = seconds_of(generate, arguments.steps, warm_up=arguments.warmup)
    rollout.sleep()
    tokens = arguments.prompts * arguments.response_tokens / config.roles.rollout.tp

    def side(times: list[float]) -> dict[str, Any]:
        median = statistics.median(times)
        spread = {"median": median, "best": min(times), "worst": max(times), "all": times}
        return {"seconds": spread, "tokens_per_second_per_gpu": tokens / median}

    slowest = torch.tensor(plain or [0.0] * arguments.steps, dtype=torch.float64, device=device.current())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ours, theirs = side(seconds), side(slowest.tolist())
    ratio = ours["tokens_per_second_per_gpu"] / theirs["tokens_per_second_per_gpu"]
    eager = bool(config.roles.rollout.engine_args.get("enforce_eager", not torch.cuda.is_available()))
    sides = {**ours, "plain": theirs, "ratio": ratio}
    return {"layout": f"TP{config.roles.rollout.tp}", **sides, "memory_bytes": memory, "eager": eager}


def engine_bytes(config: Config, hf: HFConfig, rollout: Any) -> int:
    """Of a rank, for weights and KV cache."""
    if torch.cuda.is_available():
        return int(config.roles.rollout.gpu_memory_utilization * torch.cuda.mem_get_info()[1])
    caches = vllm_compat.kv_cache_storages(rollout.engine._llm)
    return engine_weights(config, hf) + sum(storage.nbytes() for storage in caches)


def prompts(arguments: argparse.Namespace, vocab_size: int, engine: int, attempt: int) -> list[list[int]]:
    """Fresh ones for every attempt: the prefix cache would know the old ones."""
    generator = torch.Generator().manual_seed(1000 * engine + attempt)
    return torch.randint(vocab_size, (arguments.prompts, arguments.prompt_tokens), generator=generator).tolist()


def plain_rollout(case: Case) -> list[float]:
    """Seconds of plain vLLM, the slowest engine's in each round: each engine's first rank starts a process with its GPUs.

    Before this process touches a GPU. Ranks that start none return [] and wait for the others when they join the world.
    """
    arguments, _, config = case
    rank, tp = int(os.environ.get("LOCAL_RANK", 0)), config.roles.rollout.tp
    if rank % tp:
        return []
    job = {
        "model": config.model_path("rollout"),
        "tensor_parallel_size": tp,
        "dtype": config.dtype("rollout"),
        "max_model_len": arguments.prompt_tokens + arguments.response_tokens,
        "gpu_memory_utilization": config.roles.rollout.gpu_memory_utilization,
        "engine": int(os.environ.get("RANK", 0)) // tp,
        "options": {name: value for name, value in vars(arguments).items() if isinstance(value, int)},
        "engine_args": dict(config.roles.rollout.engine_args),
    }
    ours = "VLLM_ENABLE_V1_MULTIPROCESSING"  # an engine among training processes has no choice; vLLM alone has a process for it
    kept = {name: value for name, value in os.environ.items() if not _of_torchrun(name) and name != ours}
    if not torch.cuda.is_available():  # as the trainer's engine has it there: nothing is compiled, cores are shared
        job["engine_args"] = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, **job["engine_args"]}
        kept["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(str(rank + index) for index in range(tp))
    out = Path(config.model_path("rollout")) / f"plain{job['engine']}.json"
    command = [sys.executable, str(Path(__file__).with_name("plain_rollout.py")), str(out)]
    done = subprocess.run(command, input=json.dumps(job), env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"plain vLLM failed:\n{done.stderr[-4000:]}")
    return json.loads(out.read_text())


def _of_torchrun(name: str) -> bool:
    return name.startswith(("TORCHELASTIC", "MASTER_")) or name in (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    )


def line(name: str, result: dict[str, Any], note: str) -> str:
    seconds = result["seconds"]
    text = f"{name:<10} {result['layout']:<20} {seconds['median']:.3f} s ({seconds['best']:.3f} to {seconds['worst']:.3f})"
    text += f"  {result['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU"
    if name == "rollout":
        plain = result["plain"]
        return text + f"  plain vLLM {plain['tokens_per_second_per_gpu']:,.0f}: ratio {result['ratio']:.3f}"
    text += f"  {result['flops_per_second_per_gpu'] / 1e12:.2f} TFLOP/s/GPU"
    if result["mfu"] is not None:
        text += f"  MFU {100 * result['mfu']:.1f}%"
    text += f"  peak {result['peak_allocated_bytes'] / 2**30:.1f} GiB"
    use = result["gpu"]
    if "gpu/sm_clock_hz_mean" in use:
        text += f"  {use['gpu/sm_clock_hz_mean'] / 1e6:,.0f} MHz"
    if "gpu/power_watts_mean" in use:
        text += f" {use['gpu/power_watts_mean']:.0f} W"
    return text + (f"  {note}" if note else "")


if __name__ == "__main__":
    sys.exit(main())
