"""What the ranks report of their calls, as metrics of a step."""

from megatron_ext.intervals import Pass, bubble

OF_THE_STEP = ("grad_norm", "lr", "skipped")  # what an update reports once, the same on every rank; the rest are sums
_CRITICS = ("critic", "cost_critic")


def merge_sums(shards: list[dict[str, float]]) -> dict[str, float]:
    """Metric sums of the data-parallel ranks added up; names ending in `_max` by their maximum."""
    merge = {name: max if name.endswith("_max") else sum for name in shards[0] if name not in OF_THE_STEP}
    return {name: how(shard[name] for shard in shards) for name, how in merge.items()}


_PHASES = {
    "actor.make_room": "make_room",
    "rollout.wake_weights": "wake_weights",
    "rollout.receive": "reshard",
    "actor.release_weights": "release",
    "rollout.wake_kv_cache": "wake",
    "rollout.generate": "rollout",
    "rollout.sleep": "sleep",
    "actor.restore": "restore",
    "reference.log_probs": "reference",
    "actor.log_probs": "log_probs",
    "actor.update": "update",
    **{f"{name}.{call}": "make_room" for name in _CRITICS for call in ("make_room", "release_weights")},
    **{f"{name}.restore": "restore" for name in _CRITICS},
    **{f"{name}.values": "values" for name in _CRITICS},
    **{f"{name}.update": f"update_{name}" for name in _CRITICS},
    "reward.scores": "reward",
    "cost.scores": "cost",
}


# The calls in which replicas, or engines, of a role do not wait for each other
FORWARD = {
    "rollout": "generate",
    "actor": "log_probs",
    "reference": "log_probs",
    **dict.fromkeys(_CRITICS, "values"),
    "reward": "scores",
    "cost": "scores",
}


def phase_of(call: str) -> str:
    """The phase of a step that a call, `role.method`, belongs to; one of your own is a phase by itself."""
    return _PHASES.get(call, call)


def by_phase(memory: dict[str, int]) -> dict[str, int]:
    """A rank's bytes in use by call, as the highest by phase of the step."""
    found: dict[str, int] = {}
    for call, size in memory.items():
        phase = phase_of(call)
        found[phase] = max(found.get(phase, 0), size)
    return found


def trains(one: Pass) -> bool:
    """Whether a pass is an update's."""
    return any(interval.kind == "backward" for rank in one for interval in rank)


def bubbles(passes: list[Pass]) -> dict[str, float]:
    """pipeline/bubble_* of the passes that train: the mean stage and the one that idles most."""
    training = [one for one in passes if trains(one)]
    if not training:
        return {}
    idle = bubble(training)
    return {"pipeline/bubble_mean": idle.mean, "pipeline/bubble_max": idle.max}
