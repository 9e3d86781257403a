"""Responses on disk and back, and what a replay refuses."""

import pytest
import torch

from hybridflow.algorithms.loop import make_algorithm
from hybridflow.batch import Batch
from hybridflow.config.load import load, save
from hybridflow.config.preflight import check
from hybridflow.config.replay import step_file
from hybridflow.config.schema import ConfigError
from hybridflow.data.rollouts import ReplayError, load_rollout, save_rollouts
from tests.algorithms.fakes import fake_run, problems
from tests.config.folders import write_config, write_model

VOCABULARY = 110


def samples(count: int) -> Batch:
    lengths = [3 + n % 2 for n in range(count)]
    return Batch(
        {
            "tokens": [torch.arange(n) + row for row, n in enumerate(lengths)],
            "loss_mask": [torch.arange(n) >= 2 for n in lengths],
            "rollout_log_probs": [-torch.rand(n) for n in lengths],
            "truncated": torch.arange(count) % 2 == 1,
        }
    )


def prompts(batch: Batch) -> Batch:
    return Batch({"prompt": [row[:2] for row in batch.rows("tokens")]})


def test_a_steps_samplings_come_back_as_they_were(tmp_path):
    first, greedy = samples(5), samples(2)
    save_rollouts(tmp_path, 3, [first, greedy], VOCABULARY)
    for number, expected in enumerate([first, greedy]):
        found = load_rollout(tmp_path, 3, number, prompts(expected))
        assert sorted(found.names) == sorted(expected.names)
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            assert torch.equal(found.values(name), expected.values(name)) and found[name].dtype == expected[name].dtype
        assert torch.equal(found.lengths(), expected.lengths()) and torch.equal(found["truncated"], expected["truncated"])


def test_responses_to_other_prompts_are_refused(tmp_path):
    save_rollouts(tmp_path, 1, [samples(3)], VOCABULARY)
    with pytest.raises(ReplayError, match=r"step-1.safetensors has 3 responses, but this run's step 2 prompts"):
        load_rollout(tmp_path, 1, 0, prompts(samples(2)))
    other = Batch({"prompt": [torch.tensor(row) for row in ([0, 1], [7, 7], [2, 3])]})
    with pytest.raises(ReplayError, match=r"response 1 in .* answers the tokens \[1, 2\], but this run's prompt is \[7, 7\]"):
        load_rollout(tmp_path, 1, 0, other)
    with pytest.raises(ReplayError, match="has 1 samplings, and this run's step takes more"):
        load_rollout(tmp_path, 1, 1, prompts(samples(3)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def test_what_is_known_before_the_start(tmp_path, model):
    earlier = tmp_path / "earlier"
    config = load(write_config(tmp_path, model), [f"run.replay={earlier}", "run.steps=2"])

    def refused() -> str:
        with pytest.raises(ConfigError) as error:
            check(config)
        return str(error.value)

    assert refused().startswith(f"run.replay={earlier} holds no responses (") and "run.save_rollouts=true?" in refused()
    earlier.mkdir()
    save(config, earlier / "config.yaml")
    save_rollouts(earlier, 1, [samples(32)], VOCABULARY)
    assert refused() == f"run.replay={earlier} has the responses of 1 steps, but run.steps=2: use at most 1"
    save_rollouts(earlier, 2, [samples(32)], VOCABULARY)
    check(config)
    config.data.options["max_terms"] = 3
    assert "there data.options={'max_terms': 2}, here {'max_terms': 3}: make them equal" in refused()
    config.data.options["max_terms"], config.batch.prompts = 2, 7
    assert refused().endswith("there batch.prompts=8, here 7: make them equal")
    config.batch.prompts = 8
    save_rollouts(earlier, 1, [samples(32)], 99)
    assert refused().endswith("has responses in a vocabulary of 99, but the actor's has 110: use its model")
    save_rollouts(earlier, 1, [samples(31)], VOCABULARY)
    assert refused().endswith("step-1.safetensors has 31 responses, but a step here has 32: is it damaged?")
    save_rollouts(earlier, 1, [samples(32)], VOCABULARY)
    config.algorithm.name = "remax"
    assert "step-1.safetensors has 1 samplings, but algorithm.name=remax takes 2" in refused()
    config.algorithm.name = "grpo"
    whole = step_file(earlier, 2).read_bytes()
    step_file(earlier, 2).write_bytes(whole[:100])
    assert "step-2.safetensors is damaged (SafetensorError: " in refused()
    step_file(earlier, 2).write_bytes(whole.replace(b'"samplings"', b'"samplinks"'))
    assert "step-2.safetensors is damaged (KeyError: " in refused()
    step_file(earlier, 2).write_bytes(whole)
    for text, message in (("{", "cannot be read (while"), ("5", "cannot be read"), ("- a", "holds no sections")):
        (earlier / "config.yaml").write_text(text)
        assert f"run.replay={earlier}: its config.yaml {message}" in refused()
    config.run.dir, config.run.overwrite = str(earlier), True
    assert "is this run's own folder: choose another run.dir" in refused()


def test_a_run_that_replays_does_not_generate(tmp_path):
    remax = ["algorithm.name=remax", "batch.samples_per_prompt=1"]
    run, _ = fake_run(tmp_path, *remax, "run.save_rollouts=true")
    run.begin_step()
    make_algorithm(run).step(problems(2))
    expected = run.metrics["rollout/response_tokens_mean"], run.metrics["rollout/truncated_fraction"]
    run.finish_step()
    assert step_file(tmp_path / "run", 1).is_file()
    again, calls = fake_run(tmp_path, *remax, f"run.replay={tmp_path}/run", f"run.dir={tmp_path}/again")
    again.begin_step()
    make_algorithm(again).step(problems(2))
    assert (again.metrics["rollout/response_tokens_mean"], again.metrics["rollout/truncated_fraction"]) == expected
    names = [name for name, _ in calls]
    assert "rollout.generate" not in names and "rollout.receive" in names
    again.finish_step()
    again.generate(problems(1), 1, greedy=True)  # as an evaluation does
    assert [name for name, _ in calls].count("rollout.generate") == 1
