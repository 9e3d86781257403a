"""The 3D-HybridEngine as a benchmark: seconds, bytes and memory of a resharding, against the bound and the field's way.

    torchrun --nproc-per-node 4 benchmarks/reshard.py --model configs/models/qwen2_180m.json --tp 2 --pp 2 --rollout-tp 1
    torchrun --nproc-per-node 4 benchmarks/reshard.py --model configs/models/qwen2_180m.json --sweep \\
        --out benchmarks/results/reshard_cpu.json
    torchrun --nproc-per-node gpu benchmarks/reshard.py --model configs/models/qwen2_7b.json --sweep --only TP1 --engine \\
        --cycles 20 --bucket-mb 1024 --out benchmarks/results/reshard_gpu.json
    torchrun --nproc-per-node 2 benchmarks/reshard.py --model configs/models/qwen3_30b_a3b.json --layers 4 --ep 2 \\
        --rollout-tp 2 --rollout-ep

Random weights of the model's shapes, on GPUs where there are any, else on the CPU over gloo. The destination is plain tensors
of vLLM's shapes, or with --engine the parameters of a vLLM engine in these processes. Baselines in the same run: `gathered`
(each tensor broadcast over PP and all-gathered over TP or EP, every rank copying its slice) and with --engine `reload_weights`
(the same stream through vLLM's own loader). Every result is verified bit by bit; exit status 1 if one is wrong. `--sweep` goes
through the layouts of benchmarks/layouts/RANKS.txt, with `--only TP1` those of one rollout: on GPUs an engine lasts as long as
its process. `--out X.json` also draws X.png.
"""

import argparse
import gc
import os
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import commands, record  # noqa: E402
from benchmarks.bandwidth import Bandwidths, bandwidths  # noqa: E402
from benchmarks.reshard_case import Case, Engines, Pair, Settings  # noqa: E402
from megatron_ext import device  # noqa: E402
from megatron_ext.hf_config import HFConfig  # noqa: E402
from megatron_ext.layout import Layout  # noqa: E402


def main() -> int:
    arguments = parser().parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        fields, hf, pairs = read_inputs(arguments, world)
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    join_world()
    settings = Settings(
        hf=hf,
        dtype=getattr(torch, arguments.dtype),
        bucket_bytes=arguments.bucket_mb << 20,
        repeat=arguments.repeat,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        bandwidths=bandwidths(),
        cycles=arguments.cycles,
    )
    engines = Engines(fields, hf, settings.dtype) if arguments.engine else None
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        engine = engines and engines.get(pair.engines(hf, settings.ranks_per_node), pair.rollout_ep)
        rows.append(Case(settings, pair, engine).measure())
        release_memory()
        if dist.get_rank() == 0:
            report(arguments, fields, settings.bandwidths, rows)
    if engines:
        engines.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(row["verified"] and all(b["verified"] for b in row["baselines"].values()) for row in rows) else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", required=True, metavar="FILE", help="a config.json in HF format")
    result.add_argument("--layers", type=commands.at_least(0), default=0, help="so many instead of the model's")
    for name in ("tp", "pp", "vpp", "ep", "etp", "rollout-tp"):
        result.add_argument(f"--{name}", type=int, default=1)
    result.add_argument("--rollout-ep", action="store_true", help="whole experts on every rank of an engine")
    layouts = ROOT / "benchmarks" / "layouts" / f"{os.environ.get('WORLD_SIZE', 1)}.txt"
    result.add_argument("--sweep", type=Path, nargs="?", const=layouts, metavar="FILE", help=f"default: {_short(layouts)}")
    result.add_argument(
        "--only", metavar="ROLLOUT", help="of the sweep, the lines with this behind the arrow, such as `TP2 EP`"
    )
    result.add_argument("--engine", action="store_true", help="write into a vLLM engine's parameters")
    result.add_argument(
        "--cycles", type=commands.at_least(0), default=0, help="with --engine: rounds of sleep, wake, reshard, wake"
    )
    result.add_argument("--bucket-mb", type=commands.at_least(1), default=256)
    result.add_argument("--repeat", type=commands.at_least(1), default=10)
    result.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    result.add_argument("--out", type=Path, metavar="FILE.json")
    return result


def read_inputs(arguments: argparse.Namespace, world: int) -> tuple[dict[str, Any], HFConfig, list[Pair]]:
    """The model's fields, what they say, and the layouts to go through. Raises ValueError if they don't fit."""
    commands.check_out(arguments.out)
    fields = commands.read_model(arguments.model, arguments.layers)
    hf = HFConfig.from_dict(fields, arguments.model)
    pairs = read_sweep(arguments.sweep, world) if arguments.sweep else [pair_of(arguments, world)]
    if arguments.only:
        pairs = [pair for pair in pairs if pair.rollout == arguments.only]
        if not pairs:
            raise ValueError(f"--only {arguments.only!r}: no line of {arguments.sweep or 'the options'} has this rollout")
    for pair in pairs:
        pair.check(hf)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    engines = {(pair.engines(hf, per_node), pair.rollout_ep): pair.rollout for pair in pairs}
    if arguments.engine and torch.cuda.is_available() and len(engines) > 1:
        raise ValueError(
            f"{len(engines)} unlike engines (for {', '.join(engines.values())}), but vLLM's sleep mode allows one in the life"
            " of a process on a GPU: run the benchmark once for each, with --only or a --sweep file of its own"
        )
    return fields, hf, pairs


def pair_of(arguments: argparse.Namespace, world: int) -> Pair:
    sizes = {name.upper(): getattr(arguments, name) for name in ("tp", "pp", "vpp", "ep", "etp")}
    return Pair(_layout(sizes, world, "the options"), arguments.rollout_tp, arguments.rollout_ep)


def read_sweep(file: Path, world: int) -> list[Pair]:
    """Lines such as `TP2 PP2 VPP2 -> TP1` or `TP2 EP2 ETP1 -> TP2 EP`; a DP says how many ranks the line is for.

    `#` starts a comment.
    """
    pairs = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        text, where = line.partition("#")[0].strip(), f"{file}:{number}"
        if not text:
            continue
        match = re.fullmatch(r"((?:(?:TP|PP|VPP|EP|ETP|DP)\d+\s+)+)->\s*TP(\d+)(\s+EP)?", text)
        if not match:
            raise ValueError(f"{where}: {text!r} is not of the form `TP2 PP2 VPP1 EP1 ETP1 DP1 -> TP1` or `... -> TP1 EP`")
        sizes = {name: int(size) for name, size in re.findall(r"([A-Z]+)(\d+)", match[1])}
        pairs.append(Pair(_layout(sizes, world, where), int(match[2]), bool(match[3])))
    return pairs


def _layout(sizes: dict[str, int], world: int, where: str) -> Layout:
    layout = Layout(world, **{name: sizes.get(name.upper(), 1) for name in ("tp", "pp", "vpp", "ep", "etp")})
    dp = sizes.get("DP", max(1, layout.dp))
    if layout.tp * layout.pp * dp != world:
        raise ValueError(f"{where}: TP{layout.tp} x PP{layout.pp} x DP{dp} does not make up {world} ranks")
    return layout


def join_world() -> None:
    """As the trainer does, without its imports: no Megatron is needed here."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(device.backend(), **device.world_arguments())


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(arguments: argparse.Namespace, fields: dict[str, Any], known: Bandwidths, rows: list[dict[str, Any]]) -> None:
    """After every row, so that nothing is lost when a later one fails."""
    if len(rows) == 1:
        wire = f"{known.wire / 1e9:.2f} GB/s" if known.wire else "none"
        print(f"bandwidths ({known.origin}): wire {wire}, memory {known.memory / 1e9:.2f} GB/s")
        print(HEADER)
    print(table_line(rows[-1]), flush=True)
    if "cycles" in rows[-1]:
        print(cycle_line(rows[-1]["cycles"]), flush=True)
    if arguments.out:
        options = {name: _short(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        results = {"bandwidths": known._asdict(), "rows": rows}
        record.write(arguments.out, {**options, "model_fields": fields}, results)
        model = Path(arguments.model).stem + (f" of {arguments.layers} layers" if arguments.layers else "")
        draw(rows, arguments.out.with_suffix(".png"), f"{model}, {arguments.dtype}")


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


HEADER = (
    f"{'training':>16} -> {'rollout':<7}|{'median ms':>9}{'best ms':>9}{'bound ms':>9}{'fraction':>9} |"
    f"{'in MB':>9}{'least MB':>9}{'local MB':>9}{'extra MB':>9} | baselines: median ms (ratio, in MB, extra MB) | verified"
)


def table_line(row: dict[str, Any]) -> str:
    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}"

    def megabytes(size: int) -> str:
        return f"{size / 1e6:.1f}"

    times = [milliseconds(t) for t in (row["seconds"]["median"], row["seconds"]["best"], row["bound_seconds"])]
    times.append(f"{row['wire_bound_fraction']:.2f}")
    sizes = [megabytes(row[name]) for name in ("bytes_received", "least_bytes_received", "bytes_local", "extra_peak_bytes")]
    baselines = ", ".join(
        f"{name} {milliseconds(b['seconds']['median'])} "
        f"(x{b['ratio']:.2f}, {megabytes(b['bytes_received'])}, {megabytes(b['extra_peak_bytes'])})"
        for name, b in row["baselines"].items()
    )
    checks = [row["verified"], *(b["verified"] for b in row["baselines"].values())]
    columns = [f"{row['training']:>16} -> {row['rollout']:<7}|", *(f"{text:>9}" for text in times), " |"]
    columns += [f"{text:>9}" for text in sizes]
    return f"{''.join(columns)} | {baselines} | {'all' if all(checks) else f'NO: {checks}'}"


def cycle_line(cycles: dict[str, list[float]]) -> str:
    awake = [sum(times) for times in zip(*(cycles[n] for n in ("wake_weights", "reshard", "wake_kv_cache")), strict=True)]
    memory = cycles["memory_bytes"]
    return (
        f"{'':>16}    {len(awake)} cycles: wake weights + reshard + wake KV cache {statistics.median(awake) * 1e3:.1f} ms "
        f"(at most {max(awake) * 1e3:.1f}), memory in use after the 3rd {memory[min(2, len(memory) - 1)] / 2**30:.2f} GiB, "
        f"after the last {memory[-1] / 2**30:.2f} GiB"
    )


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of the median by layout: the bound, ours, the baselines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = {"bound": [row["bound_seconds"] * 1e3 for row in rows], "ours": [row["seconds"]["median"] * 1e3 for row in rows]}
    for name in rows[0]["baselines"]:
        series[name] = [row["baselines"][name]["seconds"]["median"] * 1e3 for row in rows]
    figure = Figure(figsize=(max(6, 1.6 * len(rows)), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        at = [index + (number - (len(series) - 1) / 2) * width for index in range(len(rows))]
        labels = [f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values]
        axes.bar_label(axes.bar(at, values, width, label=name), labels, fontsize=6)
    axes.set_xticks(range(len(rows)), [f"{row['training']}\n→ {row['rollout']}" for row in rows], fontsize=8)
    axes.set(ylabel="milliseconds (median)", title=f"resharding {title}, {rows[0]['ranks']} ranks")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
