"""How long pipeline stages idle: schedule x pp x vpp x number of micro-batches, measured beside theory.

    torchrun --nproc-per-node 2 benchmarks/bubble.py --model configs/models/tiny.json --layers 8 --dtype float32 \\
        --out benchmarks/results/bubble_cpu2_tiny.json
    torchrun --nproc-per-node 4 benchmarks/bubble.py --sleep 1.6 --row "PP4 M8" --row "PP4 VPP2 M8" --out sleep.json
    torchrun --nproc-per-node gpu benchmarks/bubble.py --model configs/models/qwen2_7b.json --sequences 32 --length 2048 \\
        --split-loss 2 --out benchmarks/results/bubble_gpu_qwen2_7b.json
    torchrun --nproc-per-node 2 benchmarks/bubble.py --model configs/models/tiny.json --row "PP2 VPP2 M8"

Every row has the same weights, the same sequences and must come to the same loss (exit status 1 otherwise). Rows come from
benchmarks/layouts/bubble_RANKS.txt, a file given by `--rows`, or `--row`. The baseline of an interleaved row is the 1F1B row
with the same stages and micro-batches. `--out X.json` also draws X.png: each schedule as it ran; where all micro-batches have
the same sequences, it holds the rows as runs that `hybridflow plan --calibrate` takes, too. `--sleep`: stages that sleep for so
many seconds in all instead of a model's, so that a few cores can hold many stages. `--cost N`: what the meter itself costs.
"""

import argparse
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import commands, record  # noqa: E402
from benchmarks.bandwidth import device_here  # noqa: E402
from benchmarks.bubble_case import Row, Work, measure  # noqa: E402
from benchmarks.bubble_picture import draw  # noqa: E402
from benchmarks.runs import training_run  # noqa: E402
from hybridflow.planner.hardware import GPU  # noqa: E402
from megatron_ext import device  # noqa: E402
from megatron_ext.hf_config import HFConfig  # noqa: E402
from megatron_ext.layout import Layout, Split  # noqa: E402
from megatron_ext.model import RECOMPUTE, check_layout  # noqa: E402

SAME_LOSS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative
HEADER = (
    f"{'layout':>18} {'m':>3} {'schedule':<33}|{'(p-1)/vm':>9}{'of step':>9} |{'simulated':>10}{'measured':>10}{'worst':>8}"
    f"{'residual':>9} | {'imbalance':>9}{'uneven':>8}{'communic.':>10} |{'of 1F1B':>8}{'seconds':>9} | loss"
)


def main() -> int:
    arguments = parser().parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        rows, work, fields = read_inputs(arguments, world)
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(device.backend(), **device.world_arguments())
    results: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    here = device_here()
    for row in rows:
        results.append(measure(row, work))
        runs += run_of(row, work, fields, here, results[-1])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            report(arguments, fields, work, results, runs)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same_loss(results, work.dtype) else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, metavar="FILE", help="a config.json in HF format")
    what.add_argument("--sleep", type=float, default=0.0, metavar="SECONDS", help="of all forward steps of a stage, instead")
    result.add_argument("--layers", type=commands.at_least(0), default=0, help="so many instead of the model's")
    result.add_argument(
        "--split-loss", type=commands.at_least(0), default=0, help="layers that the output layer counts as in the split"
    )
    result.add_argument("--sequences", type=commands.at_least(1), default=32, help="of the global batch")
    result.add_argument("--length", type=commands.at_least(1), default=128, help="tokens of a sequence")
    result.add_argument("--shortest", type=commands.at_least(0), default=0, help="lengths are drawn from this one to --length")
    layouts = ROOT / "benchmarks" / "layouts" / f"bubble_{os.environ.get('WORLD_SIZE', 1)}.txt"
    result.add_argument("--rows", type=Path, default=layouts, metavar="FILE", help=f"default: {_short(layouts)}")
    result.add_argument("--row", action="append", metavar="'PP2 VPP2 M8'", help="instead of a file; may be repeated")
    result.add_argument("--forward-only", action="store_true")
    result.add_argument("--recompute", choices=RECOMPUTE, default="none")
    result.add_argument("--megatron", type=json.loads, default={}, metavar="JSON", help="fields of TransformerConfig")
    result.add_argument("--repeat", type=commands.at_least(1), default=10)
    result.add_argument(
        "--cost", type=commands.at_least(0), default=0, metavar="ROUNDS", help="passes with and without the meter, in turn"
    )
    result.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    result.add_argument("--out", type=Path, metavar="FILE.json")
    return result


def read_inputs(arguments: argparse.Namespace, world: int) -> tuple[list[Row], Work, dict[str, Any]]:
    """The rows, their work and the model's fields. Raises ValueError if they don't fit."""
    commands.check_out(arguments.out)
    if not arguments.row and not arguments.rows.is_file():
        raise ValueError(f"--rows {_short(arguments.rows)}: no such file: give the layouts of {world} ranks by --row")
    lines = arguments.row or arguments.rows.read_text().splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    split = Split(loss=arguments.split_loss)
    rows = [read_row(text, world, split) for text in texts if text]
    file = arguments.model or ROOT / "configs/models/tiny.json"
    fields = commands.read_model(file, arguments.layers)
    drawn = random.Random(1)
    shortest = arguments.shortest or arguments.length
    work = Work(
        hf=HFConfig.from_dict(fields, str(file)),
        dtype=getattr(torch, arguments.dtype),
        lengths=tuple(drawn.randint(shortest, arguments.length) for _ in range(arguments.sequences)),
        repeat=arguments.repeat,
        forward_only=arguments.forward_only,
        recompute=arguments.recompute,
        overrides=arguments.megatron,
        sleep=arguments.sleep,
        cost=arguments.cost,
    )
    for row in rows:
        row.schedule(arguments.forward_only, overlap=False)
        if arguments.sleep:
            if row.layout.pp != world:
                raise ValueError(f"{row.name}: with --sleep all {world} ranks are stages, use PP{world}")
            continue
        check_layout(work.hf, row.layout)
        if arguments.sequences < row.micro_batches * row.layout.dp:
            raise ValueError(
                f"{row.name}: --sequences={arguments.sequences} do not fill the micro-batches of {row.layout.dp} data-parallel"
                f" ranks: give {row.micro_batches * row.layout.dp} or more"
            )
    return rows, work, fields


def read_row(text: str, world: int, split: Split) -> Row:
    """A row such as `TP1 PP2 VPP2 DP1 M8`; DP is what is left of the ranks, and checked where it is given."""
    if not re.fullmatch(r"((TP|PP|VPP|DP)\d+\s+)+M\d+", text):
        raise ValueError(f"{text!r} is not of the form `TP1 PP2 VPP2 DP1 M8`")
    sizes = {name: int(size) for name, size in re.findall(r"([A-Z]+)(\d+)", text)}
    tp, pp, vpp = (sizes.get(name, 1) for name in ("TP", "PP", "VPP"))
    dp = sizes.get("DP", max(1, world // (tp * pp)))
    if tp * pp * dp != world:
        raise ValueError(f"{text!r}: TP{tp} x PP{pp} x DP{dp} does not make up {world} ranks")
    return Row(Layout(world, tp=tp, pp=pp, vpp=vpp, sequence_parallel=tp > 1, split=split), sizes["M"])


def same_loss(results: list[dict[str, Any]], dtype: torch.dtype) -> bool:
    first = results[0]["loss"]
    return first is None or all(abs(row["loss"] - first) <= SAME_LOSS[dtype] * abs(first) for row in results)


def run_of(row: Row, work: Work, fields: dict[str, Any], here: GPU, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The row as the planner reads it; nothing where micro-batches differ, or gradients are reduced over replicas: to the
    planner a part of the optimizer's step, which is left out here."""
    each, left = divmod(len(work.lengths), row.micro_batches)
    if work.sleep or row.layout.dp > 1 or left or len(set(work.lengths)) > 1:
        return []
    run = training_run(
        "forward" if work.forward_only else "update",
        here,
        fields,
        row.layout,
        row.micro_batches,
        work.lengths[:each],
        result["seconds"]["median"],
        dtype=str(work.dtype).removeprefix("torch."),
        recompute=work.recompute,
        optimizer=False,
        # a forward pass is watched with the gradients' buffers beside it
        peak_bytes=0 if work.forward_only else result["peak_allocated_bytes"] or 0,
    )
    return [run]


def report(
    arguments: argparse.Namespace,
    fields: dict[str, Any],
    work: Work,
    results: list[dict[str, Any]],
    runs: list[dict[str, Any]],
) -> None:
    """After every row, so that nothing is lost when a later one fails."""
    row = results[-1]
    others = [r for r in results if r["chunks"] == 1 and all(r[k] == row[k] for k in ("stages", "micro_batches"))]
    row["of_1f1b"] = row["measured"]["mean"] / others[-1]["measured"]["mean"] if row["chunks"] > 1 and others else None
    row["same_loss"] = same_loss(results, work.dtype)
    if len(results) == 1:
        print("Idle share of the stages, in percent of the step's span; communication inside a forward or backward is busy.")
        print(HEADER)
    print(table_line(row), flush=True)
    if row["meter"]:
        seconds, cost = row["meter"]["seconds"], row["meter"]["cost"]
        print(f"{'':>18}     the meter: {seconds['on']:.4f} s with it, {seconds['off']:.4f} without: {cost:+.2%} of a pass")
    if arguments.out:
        options = {name: _short(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        saved = [{name: value for name, value in one.items() if name != "drawn"} for one in results]
        record.write(arguments.out, {**options, "model_fields": None if work.sleep else fields}, {"rows": saved, "runs": runs})
        what = "stages that sleep" if work.sleep else f"{arguments.model.stem}, {arguments.dtype}"
        draw(results, arguments.out.with_suffix(".png"), what)


def table_line(row: dict[str, Any]) -> str:
    def percent(value: float) -> str:
        return f"{100 * value:.1f}"

    measured, parts = row["measured"], row["parts"]
    loss = "-" if row["loss"] is None else f"{row['loss']:.6f}{'' if row['same_loss'] else ' NOT THE SAME'}"
    return (
        f"{row['layout']:>18} {row['micro_batches']:>3} {row['schedule']:<33}|{percent(row['closed_form_of_ideal_time']):>9}"
        f"{percent(row['closed_form_of_step']):>9} |{percent(row['simulated']['mean']):>10}{percent(measured['mean']):>10}"
        f"{percent(measured['max']):>8}{percent(row['residual']):>9} | {percent(parts['imbalance']):>9}"
        f"{percent(parts['unevenness']):>8}{percent(parts['communication']):>10} |"
        f"{'-' if row['of_1f1b'] is None else percent(row['of_1f1b']):>8}{row['seconds']['median']:>9.3f} | {loss}"
    )


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


if __name__ == "__main__":
    sys.exit(main())
