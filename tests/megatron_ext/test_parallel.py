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


PARTIAL = {
    "TP2": (Layout(2, tp=2, sequence_parallel=True), (1, 3)),
    "PP2 VPP2": (Layout(2, pp=2, vpp=2), (0, 3)),
    "DP2": (Layout(2), (1, 2)),
}


def train_on(layout: Layout, ranks: tuple[int, ...] | None) -> dict | None:
    """Some updates of a role on these ranks, beside one on all of them; what came out, None where it does not live."""
    from megatron_ext.optimizer import Optimizer, OptimizerSettings
    from megatron_ext.step import forward_backward
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, named_parameters

    if ranks:
        scenarios.make_role(hf_model("llama"), Layout(torch.distributed.get_world_size()), name="everywhere", seed=9)
    role = scenarios.make_role(hf_model("qwen2"), layout, name="partial", seed=3, ranks=ranks)
    if role is None:
        return None
    with role.state.current():
        optimizer = Optimizer(role.wrapped, OptimizerSettings(lr=1e-2), torch.float32, role.state.group)
        mine = scenarios.share(scenarios.sequences(128, seed=3), layout, role.state.coordinates.dp)
        data = scenarios.micro_batches(mine, True, layout, 4)
        found = {"losses": [], "norms": [], "gradients": [], "noise": []}
        for _ in range(STEPS):
            optimizer.zero_grad()
            sums = forward_backward(role.wrapped, data, scenarios.policy_loss)
            found["losses"].append({name: value.item() for name, value in (sums or {}).items()})
            found["gradients"].append({name: value.clone() for name, value in scenarios.gradients(role).items()})
            found["noise"].append(torch.rand(1).item())
            found["norms"].append(optimizer.step()["grad_norm"])
        found["parameters"] = {key: value.detach().clone() for key, value in named_parameters(role.chunks)}
        return found


@pytest.mark.timeout(240)
def test_a_role_on_some_ranks_gives_what_it_gives_in_a_world_of_its_own(worlds):
    wide, own = worlds(4), worlds(2)
    for layout, ranks in PARTIAL.values():
        found = wide.run(train_on, layout, ranks)
        assert [rank for rank in range(4) if found[rank] is not None] == list(ranks)
        for expected, rank in zip(own.run(train_on, layout, None), ranks, strict=True):
            assert found[rank]["losses"] == expected["losses"]
            assert found[rank]["norms"] == expected["norms"] and found[rank]["noise"] == expected["noise"]
            for ours, theirs in zip(found[rank]["gradients"], expected["gradients"], strict=True):
                assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
            assert found[rank]["parameters"].keys() == expected["parameters"].keys()
            assert all(torch.equal(found[rank]["parameters"][name], value) for name, value in expected["parameters"].items())


def state_elsewhere() -> str:
    from megatron_ext.parallel import ParallelState

    state = ParallelState("partial", Layout(2, tp=2), seed=1, ranks=(0, 1))
    if state.rank is not None:
        return ""
    with pytest.raises(RuntimeError) as error, state.current():
        pass
    return str(error.value)


def two_worlds() -> list[tuple[int, float]]:
    """This rank's number in a role's group and a sum over it: in the world that there is, and in the next one."""
    import torch.distributed as dist

    from megatron_ext.parallel import ParallelState

    found = []
    for attempt in range(2):
        if attempt:
            store = dist.PrefixStore("second world", dist.distributed_c10d._get_default_store())
            rank, size = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        state = ParallelState("role", Layout(2, tp=2), seed=1)
        total = torch.ones(1)
        dist.all_reduce(total, group=state.tp_group)
        found.append((dist.get_rank(state.tp_group), total.item()))
    return found


@pytest.mark.timeout(120)
def test_groups_do_not_outlive_their_world(worlds):
    world = worlds(2, "replaced")
    assert world.run(two_worlds) == [[(rank, 2.0)] * 2 for rank in range(2)]
    world.close()


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
    said = worlds(4).run(state_elsewhere)
    assert said[:2] == ["", ""] and said[3] == "role partial lives on ranks [0, 1] of its world, not on 3"
