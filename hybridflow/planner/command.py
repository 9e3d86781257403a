"""`hybridflow plan`: what a job costs as configured, and the best way to place it on a cluster."""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.console
import yaml
from rich.table import Table

from hybridflow.config.folders import check_file
from hybridflow.config.load import load, save
from hybridflow.config.preflight import check_shapes
from hybridflow.config.schema import Config, ConfigError
from hybridflow.planner import hardware
from hybridflow.planner.calibration import Calibration
from hybridflow.planner.forecast import Forecast, Phase, Workload, check_forecast, forecast, workload
from hybridflow.planner.memory import GIB
from hybridflow.planner.options import JobRole
from hybridflow.planner.outcome import configured, job_roles, why_slower
from hybridflow.planner.passes import Machine
from hybridflow.planner.records import calibrate, read_runs
from hybridflow.planner.search import Placement, Search
from megatron_ext.hf_config import HFConfig

MOST_GIB = 100_000
# The layout that suits any number of ranks
PLAIN = ("ranks=all", "tp=1", "pp=1", "vpp=1", "cp=1", "ep=1", "etp=1", "sequence_parallel=false", "split.stages=[]")
PHASES = ("phase", "role", "GPUs", "seconds", "GiB/GPU", "time goes to")


def plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The command.

    Raises:
        ConfigError: wrong input, or the job as configured cannot fit; what fits better is shown before.
    """
    shown = Shown()
    _check_outputs(arguments)
    config, models, refused = _job(arguments, overrides)
    machine = Machine(_cluster(arguments, config), _calibration(arguments, shown))
    work = workload(config, arguments.prompt_tokens, arguments.response_tokens)
    shown.line(
        f"{machine.cluster.gpus} {machine.cluster.gpu.name} of {machine.cluster.gpu.memory_bytes / GIB:.1f} GiB;"
        f" a step of {work.samples} samples, {work.prompt_tokens:g} + {work.response_tokens:g} tokens each on average"
    )
    try:
        if not refused:
            as_configured(shown, config, models, machine, work)
    except ConfigError as error:
        refused = error
    if not arguments.no_search:
        if refused:
            shown.line(f"the job as configured cannot run: {refused}")
        _search(shown, arguments, config, models, machine, work)
    if refused:
        raise refused
    return 0


def _job(arguments: argparse.Namespace, overrides: list[str]) -> tuple[Config, dict[str, HFConfig], ConfigError | None]:
    """The job on the cluster that is asked about, and why it cannot run as configured, where its layouts, which are for another
    cluster perhaps, do not suit. Then it has the plainest ones, and the search finds others."""
    keys = {"nodes": arguments.nodes, "ranks_per_node": arguments.gpus_per_node}
    cluster = [f"cluster.{key}={value}" for key, value in keys.items() if value is not None]
    try:
        config = load(arguments.config, [*overrides, *cluster])
        return config, check_shapes(config), None
    except ConfigError as error:
        if arguments.no_search:
            raise
        refused = error
    try:
        own = load(arguments.config, overrides)
        plain = [f"roles.{name}.{key}" for name in own.megatron_roles() for key in PLAIN]
        plain += ["roles.rollout.ranks=all", "roles.rollout.tp=1", "roles.rollout.expert_parallel=false"]
        plain += [f"roles.{name}.ranks=all" for name in own.scoring_roles()]
        config = load(arguments.config, [*overrides, *cluster, *plain])
        return config, check_shapes(config), refused
    except ConfigError:
        raise refused from None  # something else is wrong as well


def _check_outputs(arguments: argparse.Namespace) -> None:
    """What is to be written can be, before minutes are spent on it."""
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top} shows nothing: use at least 1")
    if arguments.write is not None and arguments.no_search:
        raise ConfigError(f"--write {arguments.write} has nothing to write: leave out --no-search")
    for option in ("write", "save"):
        if getattr(arguments, option) is not None:
            check_file(f"--{option} {getattr(arguments, option)}", Path(getattr(arguments, option)))


def as_configured(shown: "Shown", config: Config, models: dict[str, HFConfig], machine: Machine, work: Workload) -> Forecast:
    """Show the forecast of a config as it stands, and refuse what cannot fit."""
    found = forecast(config, models, machine, work)
    per_gpu = found.tokens / found.seconds / found.gpus
    shown.table(f"as configured: {found.seconds:.3g} s a step, {per_gpu:,.0f} tokens/s per GPU", PHASES, found.phases)
    warning = check_forecast(found)
    if warning:
        shown.line(warning)
    return found


def _search(
    shown: "Shown", arguments: argparse.Namespace, config: Config, models: dict[str, HFConfig], machine: Machine, work: Workload
) -> None:
    roles: list[JobRole] = job_roles(config, models, work)
    started = time.monotonic()
    search = Search(roles, machine, work, config.dtype("rollout"))
    ranked = search.run()
    seconds = time.monotonic() - started
    best = ranked[0]
    if not best.pools:
        raise ConfigError(f"nothing fits on {machine.cluster.gpus} GPUs: {best.reason}; use more GPUs")
    shown.line("")
    shown.rows(
        f"{len(ranked)} placements of {len(roles)} roles and the rollout, {search.evaluated:,} layouts,"
        f" {search.combined:,} combinations in {seconds:.1f} s",
        ("", "step s", "rollout", "experience", "update", "pools", "why not"),
        [_ranked(number, found, best) for number, found in enumerate(ranked[: arguments.top], 1)],
    )
    shown.line("")
    shown.table(f"the best: {best.seconds:.3g} s a step", PHASES, search.phases(best))
    chosen, refusal = _runnable(config, ranked, machine.cluster)
    if refusal:
        shown.line(f"this version cannot run it ({refusal}); the best that it can:")
    if chosen is None:
        raise ConfigError("no placement that was found can run in this version: see the reason above")
    shown.line("")
    shown.line(fragment(chosen).rstrip())
    if arguments.write:
        save(chosen, arguments.write)
        shown.line(f"wrote {arguments.write}")


def _ranked(number: int, found: Placement, best: Placement) -> list[str]:
    if not found.pools:
        pools = " | ".join(", ".join(names) for names in found.partition)
        return [str(number), "-", "-", "-", "-", pools, why_slower(found, best)]
    pools = " | ".join(f"{', '.join(pool.names)}: {pool.gpus}" for pool in found.pools)
    stages = [f"{seconds:.3g}" for seconds in found.stages.values()]
    return [str(number), f"{found.seconds:.3g}", *stages, pools, "" if found is best else why_slower(found, best)]


def _runnable(config: Config, ranked: Sequence[Placement], cluster: hardware.Cluster) -> tuple[Config | None, str]:
    """The config of the fastest placement that preflight takes, and why it is not the fastest of all."""
    refusal = ""
    for found in ranked:
        if found.pools:
            chosen = configured(config, found, cluster)
            try:
                check_shapes(chosen)
                return chosen, refusal
            except ConfigError as error:
                refusal = refusal or str(error)
    return None, refusal


def fragment(config: Config) -> str:
    """The keys of `cluster` and `roles` that a placement decides, as YAML."""
    roles = {}
    for name, role in config.megatron_roles().items():
        keys = ["ranks", "tp", "pp", "vpp", "ep", "sequence_parallel", "recompute", "offload", "forward_micro_batch_tokens"]
        keys += ["micro_batch_tokens"] if name in config.trained_roles() else []
        roles[name] = {key: getattr(role, key) for key in keys}
        if role.split.loss:
            roles[name]["split"] = {"loss": role.split.loss}
    rollout = config.roles.rollout
    roles["rollout"] = {key: getattr(rollout, key) for key in ("ranks", "tp", "gpu_memory_utilization", "sleep")}
    cluster = {"nodes": config.cluster.nodes, "ranks_per_node": config.cluster.ranks_per_node}
    lines = [f"cluster: {_flow(cluster)}", "roles:", *(f"  {name}: {_flow(keys)}" for name, keys in roles.items())]
    return "\n".join(lines)


def _flow(keys: dict) -> str:
    return yaml.safe_dump(keys, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _cluster(arguments: argparse.Namespace, config: Config) -> hardware.Cluster:
    gpu = hardware.named(arguments.gpu) if arguments.gpu else gpu_here()
    if gpu is None:
        raise ConfigError("this machine has no GPU that the planner knows: say which one to plan for, such as --gpu H200")
    if arguments.gpu_memory is not None:
        if not 0 < arguments.gpu_memory <= MOST_GIB:
            raise ConfigError(f"--gpu-memory={arguments.gpu_memory} is not above 0 and at most {MOST_GIB} GiB")
        gpu = dataclasses.replace(gpu, memory_bytes=int(arguments.gpu_memory * GIB))
    network = hardware.NETWORK if arguments.network is None else 1e9 * arguments.network
    if not (network > 0 and math.isfinite(network)):
        raise ConfigError(f"--network={arguments.network} is not a number of GB/s above 0")
    return hardware.Cluster(gpu, config.cluster.nodes, config.cluster.ranks_per_node, network)


def gpu_here() -> hardware.GPU | None:
    """This node's kind of GPU, with the memory of the smallest one; None without one that is known."""
    found = [hardware.find(name) for name in hardware.gpu_names()[:1]]
    if not found or found[0] is None:
        return None
    return dataclasses.replace(found[0], memory_bytes=min(hardware.memory_sizes()))


def _calibration(arguments: argparse.Namespace, shown: "Shown") -> Calibration:
    calibration = Calibration.read(arguments.calibration) if arguments.calibration else Calibration()
    if arguments.save and not arguments.calibrate:
        raise ConfigError(f"--save {arguments.save} has nothing to write: give --calibrate RESULTS.json")
    if not arguments.calibrate:
        return calibration
    runs = [run for path in arguments.calibrate for run in read_runs(path)]
    fitted = calibrate(calibration, runs)
    rows = []
    for run in runs:
        before, after = (f"{run.predict(c) / run.seconds - 1:+.0%}" for c in (calibration, fitted))
        memory = f"{run.memory(fitted) / run.peak_bytes - 1:+.0%}" if run.memory else ""
        rows.append([run.name, f"{run.seconds:.3g}", before, after, memory])
    shown.rows(f"calibrated on {len(runs)} runs", ("run", "seconds", "before", "after", "memory"), rows)
    for field in dataclasses.fields(Calibration):
        old, new = getattr(calibration, field.name), getattr(fitted, field.name)
        if old != new:
            shown.line(f"  {field.name}: {old:.4g} -> {new:.4g}")
    if arguments.save:
        fitted.write(arguments.save)
        shown.line(f"wrote {arguments.save}")
    return fitted


class Shown:
    """Tables on a terminal, aligned plain lines elsewhere."""

    def __init__(self):
        self._console = rich.console.Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def table(self, title: str, columns: Sequence[str], phases: Sequence[Phase]) -> None:
        """Phases, and below them what the memory of each stage's fullest one is made of."""
        self.rows(title, columns, [phase.row() for phase in phases])
        stages = dict.fromkeys(phase.stage for phase in phases)
        fullest = [max((p for p in phases if p.stage == stage), key=lambda phase: phase.nbytes) for stage in stages]
        for phase in fullest:
            self.line(f"  {phase.name}, GiB: {phase.memory()}")

    def rows(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self._console.is_terminal:
            table = Table(title=title, title_justify="left")
            for column in columns:
                table.add_column(column)
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        self.line(title)
        for row in [columns, *rows]:
            self.line("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
