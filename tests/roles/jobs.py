"""Whole jobs inside a test world: what `hybridflow train` runs, with roles that a test may tamper with."""

import contextlib
import io
import json
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from hybridflow.config.load import load
from hybridflow.controller import hang
from hybridflow.controller.worker import Worker
from hybridflow.roles.megatron import MegatronRole
from hybridflow.roles.registry import build_roles
from hybridflow.roles.rollout import Rollout
from hybridflow.train import drive
from megatron_ext.memory import weights_are_away
from tests.world import make_transport


def train(config_path: str, overrides: list[str], stale: str = "", stale_from: int = 0) -> dict:
    """Run the job on the ranks of this world.

    Args:
        stale: a parameter of the engine that resharding does not write any more ...
        stale_from: ... from this one on (counted from 0, the one of the first evaluation).

    Returns:
        away: for each rollout, whether the actor's weights were away while the engine generated, and critic_away: the critic's.
        pieces: of the start, as this rank has noted them.
        On rank 0 also the metrics of all steps, and what was printed.
    """
    config = load(config_path, overrides)
    transport = make_transport()
    pieces: list[str] = []
    with mock.patch.object(hang, "starting", pieces.append):
        roles = build_roles(config, dist.get_rank())
    away = {name: _watch(roles["rollout"], roles[name]) for name in ("actor", "critic") if name in roles}
    if stale:
        _forget(roles["rollout"], stale, stale_from)
    worker = Worker(dist.get_rank(), roles)
    transport.attach(worker)
    printed = io.StringIO()
    if dist.get_rank() == 0:
        with contextlib.redirect_stdout(printed):
            drive(config, transport)
        transport.close()
    else:
        transport.serve()
    worker.close()
    found = {"away": away["actor"], "critic_away": away.get("critic"), "pieces": pieces}
    if dist.get_rank() == 0:
        metrics = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
        found |= {"steps": [json.loads(line) for line in metrics], "printed": printed.getvalue()}
    return found


def _watch(rollout: Rollout, role: MegatronRole) -> list[bool]:
    found, generate = [], rollout.generate

    def watched(*args, **kwargs):
        found.append(weights_are_away(role.parameters()))
        return generate(*args, **kwargs)

    rollout.generate = watched
    return found


def _forget(rollout: Rollout, name: str, first: int) -> None:
    """From resharding number `first` on the parameter keeps what it was given before: what users see as fluent garbage."""
    receive, kept, count = rollout.receive, {}, iter(range(1_000_000))

    def forgetful(*args, **kwargs):
        report = receive(*args, **kwargs)
        parameter = rollout.parameters()[name]
        if next(count) < first:
            kept["value"] = parameter.clone()
        else:
            parameter.copy_(kept["value"])
        return report

    rollout.receive = forgetful
