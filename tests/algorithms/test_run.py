"""What happens on the driver: metric sums, memory notes, values per token; and what an algorithm asks of its roles."""

import threading
import time

import pytest
import torch

from hybridflow.algorithms.loop import make_algorithm
from hybridflow.algorithms.objectives import mismatch_sums
from hybridflow.algorithms.reports import by_phase, merge_sums
from hybridflow.algorithms.run import per_token
from hybridflow.batch import Batch
from hybridflow.config import preflight
from hybridflow.config.own_class import load_class
from hybridflow.config.schema import ALGORITHM_METHODS, ConfigError
from hybridflow.roles.registry import handles
from tests.algorithms.fakes import fake_run, problems
from tests.config.folders import write_model


def test_sums_add_up_over_ranks_and_maxima_stay_maxima():
    shards = [
        {"loss": 1.0, "tokens": 4, "mismatch_abs_max": 0.5, "grad_norm": 2.0, "lr": 0.1, "skipped": False},
        {"loss": 2.5, "tokens": 6, "mismatch_abs_max": 0.2, "grad_norm": 2.0, "lr": 0.1, "skipped": False},
    ]
    assert merge_sums(shards) == {"loss": 3.5, "tokens": 10, "mismatch_abs_max": 0.5}


def test_a_sequences_value_stands_at_each_of_its_tokens():
    samples = Batch({"tokens": [torch.arange(n) for n in (3, 1, 2)]})
    rows = per_token(torch.tensor([0.5, -1.0, 2.0]), samples)
    assert [row.tolist() for row in rows] == [[0.5] * 3, [-1.0], [2.0] * 2]


def test_memory_is_toldby_phase():
    memory = {"rollout.wake_weights": 3, "rollout.wake_kv_cache": 7, "actor.update": 5, "actor.export": 1}
    assert by_phase(memory) == {"wake_weights": 3, "wake": 7, "update": 5, "actor.export": 1}


def test_mismatch_is_measured_on_the_sampled_tokens_only():
    ours = torch.tensor([0.0, -1.0, -2.0, -3.0])
    theirs = torch.tensor([9.0, -1.5, -2.0, -2.9])
    found = mismatch_sums(ours, theirs, torch.tensor([False, True, True, True]))
    assert torch.allclose(found["mismatch_abs"], torch.tensor(0.6))
    assert torch.allclose(found["mismatch_abs_max"], torch.tensor(0.5))
    d = torch.tensor([-0.5, 0.0, 0.1])
    assert torch.allclose(found["mismatch_kl"], ((-d).exp() - 1 + d).sum())
    empty = mismatch_sums(ours, theirs, torch.zeros(4, dtype=torch.bool))
    assert [value.item() for value in empty.values()] == [0.0, 0.0, 0.0]


def names(calls: list) -> list[str]:
    return [name for name, _ in calls]


def test_remax_samples_and_takes_its_baseline_in_one_rollout(tmp_path):
    run, calls = fake_run(tmp_path, "algorithm.name=remax")
    make_algorithm(run).step(problems(2))
    found = names(calls)
    assert [found.count(f"rollout.{verb}") for verb in ("wake_weights", "receive", "generate", "sleep")] == [1, 1, 2, 1]
    sampled, greedy = (args for name, args in calls if name == "rollout.generate")
    assert (len(sampled[0]), sampled[1].greedy) == (8, False)
    assert (len(greedy[0]), greedy[1].greedy) == (2, True)
    batches = [args[0] for name, args in calls if name == "actor.update"]
    firsts = sorted(row[0].item() for batch in batches for row in batch.rows("advantages"))
    # rewards 1 to 4 for the first prompt, whose greedy answer has 1, and 5 to 8 for the second, whose has 2
    assert firsts == [0, 1, 2, 3, 3, 4, 5, 6]


def test_ppo_asks_every_role_in_order(tmp_path):
    run, calls = fake_run(tmp_path, "algorithm={name: ppo, kl_coefficient: 0.1, kl_in: reward}", "batch.mini_batches=1")
    algorithm = make_algorithm(run)
    algorithm.prepare()
    assert names(calls) == ["reference.copy_from", "actor.start_training", "critic.copy_from", "critic.start_training"]
    assert calls[1][1][0].lr == 1e-6 and calls[3][1][0].lr == 1e-5
    del calls[:]
    algorithm.step(problems(2))
    expected = """actor.make_room critic.make_room critic.release_weights rollout.wake_weights rollout.receive
        actor.release_weights rollout.wake_kv_cache rollout.generate rollout.sleep actor.restore critic.restore
        reference.log_probs critic.values critic.update actor.update"""
    assert names(calls) == expected.split()


def test_ppos_batches_hold_gae_of_the_token_rewards(tmp_path):
    settings = "{name: ppo, kl_coefficient: 0.1, kl_in: reward, kl_estimator: k1, gae_lambda: 1.0, normalize_advantages: false}"
    run, calls = fake_run(tmp_path, f"algorithm={settings}", "batch={prompts: 2, samples_per_prompt: 1, mini_batches: 1}")
    make_algorithm(run).step(problems(2))
    actors, critics = (next(args[0] for name, args in calls if name == f"{role}.update") for role in ("actor", "critic"))
    assert sorted(critics.names) == ["loss_mask", "returns", "tokens", "values"]
    penalty = 0.1 * (-1.5 + 2.0)
    for row, (prompt, reward) in enumerate([(1, 1.0), (2, 2.0)]):
        # with lambda 1 a token's return is what comes from it on: the reward and the penalties of what is left
        returns = torch.tensor([0.0] * prompt + [reward - left * penalty for left in (3, 2, 1)])
        torch.testing.assert_close(critics.rows("returns")[row], returns)
        advantages = torch.where(critics.rows("loss_mask")[row], returns - 0.5, 0.0)
        torch.testing.assert_close(actors.rows("advantages")[row], advantages)


def test_what_does_not_depend_on_each_other_is_started_before_any_of_it_is_waited_for(tmp_path):
    overrides = ["algorithm={name: ppo, kl_coefficient: 0.1}", "batch.mini_batches=2"]
    run, calls = fake_run(tmp_path, *overrides)
    for role in (run.actor, run.reference, run.critic, run.rollout):
        role.waits = calls
    (scoring,) = run.scorings
    scorer = scoring._terms["made up"].scorer
    asked, score = threading.Event(), scorer.score

    def slow(items):
        assert asked.wait(10)  # the scorers are at work while the critic is called ...
        time.sleep(0.05)
        return score(items)

    scorer.score = slow
    values = run.critic._answers["values"]
    run.critic._answers["values"] = lambda batch: asked.set() or values(batch)
    run.begin_step()
    samples = run.sample(problems(2), 4)
    del calls[:]
    samples = run.assess(problems(2), samples)
    verbs = ["reference.log_probs", "actor.log_probs", "critic.values"]
    assert names(calls) == [*verbs, *(f"wait {verb}" for verb in verbs)]
    assert {"rewards", "log_probs", "reference_log_probs", "values", "rollout_log_probs"} < set(samples.names)
    seconds = run.recorder.seconds()
    assert seconds["reward"] >= 0.05  # ... and their time is their own
    # a role's is what its ranks were at, not what the driver waited for
    assert all(250 <= seconds[phase] < 300 for phase in ("reference", "log_probs", "values"))


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_kl_coefficient_is_adapted_after_each_step(tmp_path, where):
    settings = f"algorithm={{kl_coefficient: 0.1, kl_in: {where}, kl_target: 1.2, kl_estimator: k1}}"
    run, calls = fake_run(tmp_path, settings, "batch.mini_batches=1")
    grpo = make_algorithm(run)
    grpo.step(problems(2))
    kl = 3 * 0.5  # nats of a response
    assert run.metrics["actor/kl_response"] == pytest.approx(kl) and run.metrics["actor/kl_coefficient"] == 0.1
    assert run.kl.value == pytest.approx(0.1 * (1 + 0.1 * 0.2))
    grpo.step(problems(2))
    assert run.metrics["actor/kl_coefficient"] == pytest.approx(0.102)
    objectives = [args[1] for name, args in calls if name == "actor.update"]
    used = [objective.loss.kl_coefficient for objective in objectives]
    assert used == (pytest.approx([0.1, 0.102]) if where == "loss" else [0, 0])


def test_rewards_less_the_kl_of_the_response(tmp_path):
    run, _ = fake_run(tmp_path, "algorithm={kl_coefficient: 0.2, kl_in: reward, kl_estimator: k1}")
    samples = Batch(
        {
            "tokens": [torch.arange(3), torch.arange(2)],
            "loss_mask": [torch.tensor([False, True, True]), torch.tensor([False, False])],
            "log_probs": [torch.tensor([9.0, -1.0, -2.0]), torch.zeros(2)],
            "reference_log_probs": [torch.tensor([0.0, -1.5, -1.0]), torch.ones(2)],
            "rewards": torch.tensor([1.0, 0.5]),
        }
    )
    torch.testing.assert_close(run.rewards_less_kl(samples), torch.tensor([1.0 - 0.2 * (0.5 - 1.0), 0.5]))
    torch.testing.assert_close(run.token_rewards(samples), torch.tensor([0.0, -0.1, 1.0 + 0.2, 0.0, 0.0]))


def test_a_critic_with_a_model_of_its_own_keeps_it(tmp_path):
    other = write_model(tmp_path / "other", num_hidden_layers=2)
    run, calls = fake_run(tmp_path, "algorithm.name=ppo", f"roles.critic.model.path={other}")
    run.start_value_training()
    assert names(calls) == ["critic.start_training"]


MINE = """
class Mine:
    def __init__(self, run):
        self.run = run

    def prepare(self):
        self.run.start_policy_training()

    def step(self, problems):
        self.run.metrics["mine"] = len(problems)


class Half:
    def step(self, problems):
        pass
"""


def test_an_algorithm_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_algorithms.py").write_text(MINE)
    run, calls = fake_run(tmp_path, "algorithm.name=my_algorithms:Mine", "roles.critic={pp: 2}")
    preflight.check(run.config, run_folder=False)
    make_algorithm(run).step(problems(3))
    assert run.metrics["mine"] == 3 and run.critic is not None


MY_ROLE = """
from hybridflow.controller.protocols import PP_ONLY, THREE_D, remote
from hybridflow.roles.reference import Reference


class Mine(Reference):
    @remote(PP_ONLY)
    def stage(self):
        pass


class Silent(Reference):
    def log_probs(self, batch):
        pass
"""


def test_a_role_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_roles.py").write_text(MY_ROLE)
    for name in ("Mine", "Silent"):
        reference = f"roles.reference={{implementation: 'my_roles:{name}'}}"
        run, _ = fake_run(tmp_path, "algorithm.kl_coefficient=0.1", "run.overwrite=true", reference)
        if name == "Silent":
            with pytest.raises(ConfigError, match="Silent': the method log_probs declares no transfer protocol"):
                preflight.check(run.config, run_folder=False)
            continue
        preflight.check(run.config, run_folder=False)
        handle = handles(run.config, transport=None)["reference"]
        assert callable(handle.stage) and callable(handle.log_probs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_algorithms:Mint", "my_algorithms has no class Mint: there are Half, Mine"),
        ("my_algorithms:Half", "the class lacks the method prepare: it needs prepare and step"),
        ("not_there:Mine", "importing not_there failed: ModuleNotFoundError: No module named 'not_there'"),
        (":Mine", "must look like package.module:Class"),
    ],
)
def test_an_algorithm_of_ones_own_that_is_not_one(tmp_path, monkeypatch, name, message):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_algorithms.py").write_text(MINE)
    with pytest.raises(ConfigError) as error:
        load_class("algorithm.name", name, ALGORITHM_METHODS)
    assert str(error.value).startswith(f"algorithm.name={name!r}") and str(error.value).endswith(message)
