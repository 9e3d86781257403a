"""Roles with different layouts in the same processes: the same numbers as alone, one communicator per list of ranks."""

import threading

import pytest
import torch

from megatron_ext.layout import Layout

ACTOR = Layout(4, tp=2, pp=2, sequence_parallel=True)
CRITIC = Layout(4, pp=2)
STEPS = 3


def train(names: list[str], nested: bool = False) -> dict[str, dict]:
    """Train each named role for some updates, their steps interleaved; what came out, per role."""
    from megatron_ext.optimizer import Optimizer, OptimizerSettings
    from megatron_ext.step import forward, forward_backward
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, named_parameters

    roles, optimizers, data = {}, {}, {}
    for name in names:
        layout, family, seed = {"actor": (ACTOR, "qwen2", 3), "critic": (CRITIC, "llama", 4)}[name]
        roles[name] = role = scenarios.make_role(hf_model(family), layout, name=name, seed=seed)
        with role.state.current():
            optimizers[name] = Optimizer(role.wrapped, OptimizerSettings(lr=1e-2), torch.float32)
            mine = scenarios.share(scenarios.sequences(128, seed=seed), layout, role.state.coordinates.dp)
            data[name] = scenarios.micro_batches(mine, True, layout, 4)
    noise = {name: [] for name in names}
    for _ in range(STEPS):
        for name in names:  # all gradients first: they live across the other role's calls
            with roles[name].state.current():
                optimizers[name].zero_grad()
                forward_backward(roles[name].wrapped, data[name], scenarios.policy_loss)
                noise[name].append(torch.rand(1).item())
                if nested and name == "critic":
                    with roles["actor"].state.current():
                        forward(roles["actor"].wrapped, data["actor"])
        for name in names:
            with roles[name].state.current():
                optimizers[name].step()
    return {
        name: {
            "noise": noise[name],
            "parameters": {key: value.detach().clone() for key, value in named_parameters(roles[name].chunks)},
        }
        for name in names
    }


@pytest.mark.timeout(180)
def test_two_roles_give_what_each_gives_alone(worlds):
    world = worlds(4)
    together = world.run(train, ["actor", "critic"], nested=True)
    for name in ("actor", "critic"):
        for alone, both in zip(world.run(train, [name]), together, strict=True):
            assert alone[name]["noise"] == both[name]["noise"]
            assert alone[name]["parameters"].keys() == both[name]["parameters"].keys()
            for key, value in alone[name]["parameters"].items():
                assert torch.equal(value, both[name]["parameters"][key]), key


def groups_and_errors() -> dict:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    from megatron_ext.parallel import ParallelState

    first = ParallelState("first", ACTOR, seed=1)
    before = len(distributed_c10d._world.pg_map)
    second = ParallelState("second", ACTOR, seed=2)
    third = ParallelState("third", CRITIC, seed=2)
    found = {
        "new_groups": len(distributed_c10d._world.pg_map) - before,
        "shared": first.tp_group is second.tp_group,
        "coordinates": first.coordinates,
        "outside": parallel_state.model_parallel_is_initialized(),
    }
    outer_rng = torch.get_rng_state()
    with first.current():
        found["tp"] = parallel_state.get_tensor_model_parallel_world_size()
        with third.current(), third.current():
            found["nested_tp"] = parallel_state.get_tensor_model_parallel_world_size()
            with pytest.raises(RuntimeError, match="role first is suspended while third runs"), first.current():
                pass
        found["tp_again"] = parallel_state.get_tensor_model_parallel_world_size()
        errors = []
        thread = threading.Thread(target=lambda: errors.append(_enter(third)))
        thread.start()
        thread.join()
    found["thread"] = errors[0]
    found["rng_restored"] = torch.equal(outer_rng, torch.get_rng_state())
    found["ranks"] = dist.get_process_group_ranks(third.dp_group)
    with pytest.raises(ValueError, match="in a world of 4"):
        ParallelState("wrong", Layout(8, tp=2), seed=1)
    with pytest.raises(ValueError, match="roles.wrong"):
        ParallelState("wrong", Layout(4, tp=3), seed=1)
    return found


def _enter(state) -> str:
    with pytest.raises(RuntimeError) as error, state.current():
        pass
    return str(error.value)


@pytest.mark.timeout(120)
def test_groups_are_shared_and_current_is_guarded(worlds):
    for rank, found in enumerate(worlds(4).run(groups_and_errors)):
        assert found["new_groups"] <= 4  # of the third role, none of the second
        assert found["shared"] and found["rng_restored"] and not found["outside"]
        assert (found["coordinates"].tp, found["coordinates"].pp) == (rank % 2, rank // 2)
        assert (found["tp"], found["nested_tp"], found["tp_again"]) == (2, 1, 2)
        assert found["thread"] == "role third: another thread is inside role first"
        assert found["ranks"] == [rank // 2 * 2, rank // 2 * 2 + 1]
