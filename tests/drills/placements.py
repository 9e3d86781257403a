"""Drills of placements and launchers that take too long for every change, run by hand:

python -m tests.drills.placements equal [--launcher torchrun|ray]    # the same losses wherever the roles are
python -m tests.drills.placements kills [--launcher torchrun|ray]    # a worker killed in each phase, five times each

Without --launcher both, one after the other. They print what they found; a promise that is not kept is an AssertionError.
"""

import argparse
import contextlib
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridflow.controller import hang
from hybridflow.data.tiny_model import make_tiny_model
from tests.processes import ahead_of_others, living
from tests.small_job import finish, notes_of, ranks_of, rows, start, write_classifier, write_recipe

LAUNCHERS = ("torchrun", "ray")
PATIENCE = 3000  # seconds for anything but what is promised, on a busy machine
HOST = socket.gethostname()

# --- equal

PPO = """
roles:
  actor: {optimizer: {lr: 1.0e-4}}
  critic: {micro_batch_tokens: 2048, optimizer: {lr: 1.0e-3}}
  reference: {}
  reward: {model: {path: CLASSIFIER}}
algorithm: {name: ppo, kl_in: reward, kl_coefficient: 0.05}
reward: {kind: model}
run: {steps: 3, profile: true}
"""
PLACEMENTS = {
    "all on four ranks": """
cluster: {ranks_per_node: 4}
roles: {actor: {tp: 2, pp: 2}, rollout: {tp: 2}, critic: {pp: 2}, reference: {tp: 2}, reward: {tp: 2}}
""",
    "critic on two, reward on the others": """
cluster: {ranks_per_node: 4}
roles:
  actor: {tp: 2, pp: 2}
  rollout: {tp: 2}
  critic: {ranks: [0, 1], pp: 2}
  reference: {tp: 2}
  reward: {ranks: [2, 3], tp: 2}
""",
    "two pools": """
cluster: {ranks_per_node: 4}
roles:
  actor: {ranks: [0, 1], tp: 2}
  rollout: {ranks: [0, 1], tp: 2}
  reference: {ranks: [0, 1], pp: 2}
  critic: {ranks: [2, 3], pp: 2}
  reward: {ranks: [2, 3], tp: 2}
""",
    "a rank for each role": """
cluster: {ranks_per_node: 5}
roles: {actor: {ranks: [0]}, rollout: {ranks: [1]}, reference: {ranks: [2]}, critic: {ranks: [3]}, reward: {ranks: [4]}}
""",
}
FIRST = "all on four ranks", "torchrun"  # the run whose responses all others replay
LOSSES = ("actor/loss", "critic/loss")
WORK = ("generate", "log_probs", "values", "scores", "update")  # calls that compute, and do not hand weights over
CLOSE = 1e-5


def equal(folder: Path, launchers: list[str]) -> None:
    """Each placement under each launcher, with the responses of the first run."""
    model, classifier = make_tiny_model(folder / "tiny"), write_classifier(folder / "classifier")
    jobs = [FIRST, *(job for job in itertools.product(PLACEMENTS, launchers) if job != FIRST)]
    expected: list[dict] = []
    for number, (placement, launcher) in enumerate(jobs):
        run, began = folder / f"run{number}", time.monotonic()
        given = "run: {save_rollouts: true}" if not number else f"run: {{replay: '{folder}/run0'}}"
        ppo = PPO.replace("CLASSIFIER", str(classifier))
        config = write_recipe(folder / f"{number}.yaml", model, run, ppo, PLACEMENTS[placement], given)
        finish(start(config, f"cluster.launcher={launcher}"), PATIENCE)
        steps, took = rows(run / "metrics.jsonl"), time.monotonic() - began
        expected = expected or steps
        assert len(steps) == 3 and all(step["critic/loss"] > 0 for step in steps[1:]), steps
        differ = {
            name: max(abs(one[name] - other[name]) for one, other in zip(steps, expected, strict=True)) for name in LOSSES
        }
        text = "the first" if not number else "  ".join(f"{name} {value:.1e}" for name, value in differ.items())
        print(f"{placement:<36} {launcher:<9} {took:4.0f} s  {text}{_at_once(run, placement)}", flush=True)
        assert max(differ.values()) <= CLOSE, differ
    print(f"largest differences over 3 steps; {', '.join(LOSSES)} equal to {CLOSE:g} in {len(jobs)} runs")


def _at_once(run: Path, placement: str) -> str:
    """How long roles of different pools were at work at the same time, by the timelines; nothing where there is one pool."""
    pools = [
        re.findall(r"\d+", line.split(":")[1]) for line in (run / "placement.txt").read_text().splitlines() if "pool " in line
    ]
    if not pools:
        return ""
    pool_of = {rank: number for number, ends in enumerate(pools) for rank in range(int(ends[0]), int(ends[-1]) + 1)}
    both = sum(_overlap(path, pool_of) for path in (run / "timeline").iterdir())
    assert both > 0, f"{placement}: roles of different pools were never at work at the same time"
    return f"  roles of different pools at work at once for {both:.2f} s"


def _overlap(timeline: Path, pool_of: dict[int, int]) -> float:
    """Seconds of a step in which ranks of at least two pools were at work."""
    events = json.loads(timeline.read_text())["traceEvents"]
    changes = []
    for event in events:
        if event["ph"] == "X" and event["pid"] == 1 and event["name"] in WORK:  # this host's ranks
            changes += [(event["ts"], 1, pool_of[event["tid"]]), (event["ts"] + event["dur"], -1, pool_of[event["tid"]])]
    busy, both, since = dict.fromkeys(pool_of.values(), 0), 0, 0
    for at, change, pool in sorted(changes):
        if sum(count > 0 for count in busy.values()) > 1:
            both += at - since
        busy[pool] += change
        since = at
    return both / 1e6


# --- kills

# Actor and critic on ranks 0 and 1, the rollout in a pool of its own: each resharding goes from pool to pool. Under torchrun
# the driver lives in rank 0. The model is large enough for every phase to take a while.
ENDLESS = """
cluster: {ranks_per_node: 3}
roles:
  actor: {ranks: [0, 1], tp: 2}
  critic: {ranks: [0, 1], pp: 2, micro_batch_tokens: 2048, optimizer: {lr: 1.0e-3}}
  rollout: {ranks: [2]}
algorithm: {name: ppo}
sampling: {max_response_tokens: 24}
resharding: {verify_every: 1}
run: {steps: 100000}
"""
SHAPE = {"layers": 8, "hidden": 256, "intermediate": 512}
PHASES = {"rollout": "rollout", "update": "update", "between pools": "reshard"}  # as the driver calls them
AT_WORK = {"rollout": (2,), "update": (0, 1), "reshard": (0, 1, 2)}  # ranks, of which the others wait for calls
VICTIMS = (2, 1, 2, 0, 1)  # ranks, one after the other; 2 is in another pool than the driver's
PROMISED = 60.0  # seconds
_NAMED = re.compile(r"\(step \d+, (\w+)\)|phase (\w+) after \d+ steps")


@dataclass
class Job:
    """A job that would run for ever."""

    process: subprocess.Popen
    notes: Path
    folder: Path

    def wait_for(self, phase: str, steps: int) -> None:
        """Until the driver has just entered the phase, after so many steps at least."""
        deadline, before = time.monotonic() + PATIENCE, ""
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()[0][-4000:]
            at = hang.latest(self.notes)
            entered = re.fullmatch(rf"phase {phase} after (\d+) steps", at)
            if entered and int(entered[1]) >= steps and before not in ("", at):
                return
            before = at
            time.sleep(0.001 if at else 0.2)
        raise AssertionError(f"the job never came to phase {phase}")

    def rank(self, number: int) -> psutil.Process:
        """On Ray one of 0 and 1 for either: the rollout's process can be told by what it maps, those two cannot."""
        ranks = ranks_of(self.process)
        if "RANK" in ranks[0].environ():
            return ranks[number]
        engine = [rank for rank in ranks.values() if "/vllm/" in Path(f"/proc/{rank.pid}/maps").read_text()]
        assert len(engine) == 1, engine
        return engine[0] if number == 2 else [rank for rank in ranks.values() if rank not in engine][number]

    def kill(self, victim: int, phase: str, steps: int) -> tuple[float, str]:
        """Kill a rank in a phase; the seconds until the job had ended, and its last line. Nothing of it is left."""
        self.wait_for(r"\w+", steps)
        family, rank = psutil.Process(self.process.pid).children(recursive=True), self.rank(victim)
        shared = _shared_memory(family)
        with ahead_of_others():
            self.wait_for(phase, steps)
            rank.kill()
        sent = time.monotonic()
        output, _ = self.process.communicate(timeout=PATIENCE)
        seconds = time.monotonic() - sent
        assert self.process.returncode == 1, output[-4000:]
        left = living(family)
        left += [process for process in psutil.process_iter() if str(self.folder) in " ".join(_words(process))]
        assert not left, left
        assert not [path for path in shared if path.exists()], shared
        assert not list(self.folder.glob("hybridflow*"))  # the notes, and what Ray keeps
        return seconds, output.rstrip().rpartition("\n")[2]


@contextlib.contextmanager
def _started(model: Path, launcher: str, *overrides: str) -> Iterator[Job]:
    """A job with a folder for temporary files of its own. It is ended at the latest on leaving."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as own:  # a short name: Ray's sockets live below it
        config = write_recipe(Path(own) / "c.yaml", model, Path(own) / "run", ENDLESS)
        process = start(config, f"cluster.launcher={launcher}", *overrides, TMPDIR=own)
        try:
            yield Job(process, notes_of(process), Path(own))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def kills(folder: Path, launchers: list[str]) -> None:
    """A worker is killed in each phase, five times each: always the same promises."""
    model, slowest = make_tiny_model(folder / "larger", **SHAPE), 0.0
    cases = list(itertools.product(VICTIMS, PHASES, launchers))
    for number, (victim, what, launcher) in enumerate(cases):
        phase = PHASES[what]
        named: set[str] = set()
        # on a busy machine the phase may be over by the time of the signal
        while not named or (victim in AT_WORK[phase] and phase not in named):
            with _started(model, launcher) as job:
                seconds, line = job.kill(victim, phase, steps=1 + number % 3)
            print(f"{launcher:<9} {what:<14} rank {victim}: ended in {seconds:4.1f} s: {_shown(line)}", flush=True)
            named = set(filter(None, itertools.chain(*_NAMED.findall(line))))
            _check_rank(line, victim, launcher)
            assert named, line
            slowest = max(slowest, seconds)
            assert seconds <= PROMISED
    print(f"all {len(cases)} jobs ended, the slowest in {slowest:.1f} s, named rank, host, roles and phase, and left nothing")


def _shown(line: str) -> str:
    """Without this machine's name."""
    return line.replace(f" on {HOST} ", " on HOST ")


def _check_rank(line: str, victim: int, launcher: str) -> None:
    """The line names the rank, its host and its roles."""
    roles = "rollout" if victim == 2 else "actor, critic"
    start = rf"hybridflow: error: rank {_either(victim, launcher)} on {re.escape(HOST)} "
    assert re.match(rf"{start}.*; its roles: {roles}(;|$)", line), line


def _either(victim: int, launcher: str) -> str:
    return "[01]" if launcher == "ray" and victim != 2 else str(victim)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """What they map of it, under names that others could open."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {Path(mapping.path) for mapping in process.memory_maps() if mapping.path.startswith("/dev/shm/")}
    return {path for path in found if path.exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill", choices=["equal", "kills"])
    parser.add_argument("--launcher", choices=LAUNCHERS)
    arguments = parser.parse_args()
    drill = {"equal": equal, "kills": kills}[arguments.drill]
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
        drill(Path(folder), [arguments.launcher] if arguments.launcher else list(LAUNCHERS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
