"""Sums of a scorer and a model, and sequences in the tokens of the model that scores them."""

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.load import load
from hybridflow.config.schema import Config
from hybridflow.data.problems import Problem
from hybridflow.data.text import Text
from hybridflow.data.tokenizer import character_tokenizer
from hybridflow.rewards.models import ModelScorer, Retokenizer
from hybridflow.rewards.samples import samples_of
from hybridflow.rewards.scoring import open_scoring
from tests import hf_models
from tests.algorithms.fakes import FakeRole
from tests.config.folders import write_config, write_model

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def config(tmp_path, *overrides: str) -> Config:
    model = tmp_path / "model"
    if not model.exists():
        write_model(model)
    return load(write_config(tmp_path, model), list(overrides))


def problem(text: Text, question: str = "1+2=", answer: str = "3") -> Problem:
    tokens = text.tokenizer(question)["input_ids"]
    return Problem(0, question, question, tokens, answer, {}, [{"role": "user", "content": question}])


def batch(text: Text, asked: Problem, responses: list[str], truncated: int | None = None) -> Batch:
    """Responses end with the end-of-text token, but for the truncated one."""
    ends = [[] if n == truncated else [text.tokenizer.eos_token_id] for n in range(len(responses))]
    rows = [torch.tensor(text.tokenizer(r)["input_ids"] + end) for r, end in zip(responses, ends, strict=True)]
    prompt = torch.tensor(asked.prompt_tokens)
    return Batch(
        {
            "tokens": [torch.cat([prompt, row]) for row in rows],
            "loss_mask": [torch.arange(len(prompt) + len(row)) >= len(prompt) for row in rows],
            "truncated": torch.tensor([n == truncated for n in range(len(responses))]),
            "prompt_index": torch.zeros(len(responses), dtype=torch.int64),
        }
    )


def lengths_as_scores(found: Batch) -> Batch:
    return Batch({"scores": found.lengths().float()})


def test_a_model_beside_a_scorer(tmp_path):
    chosen = config(tmp_path, "reward={kind: last_integer, model_weight: 0.1, cache_size: 10}", "roles.reward.model.path=x")
    chosen.roles.reward.model.path = chosen.model.path  # only its tokenizer is read here
    text, calls = Text(chosen.model.path), []
    scoring = open_scoring("reward", chosen, {"reward": FakeRole("reward", calls, {"scores": lengths_as_scores})}, text)
    asked = problem(text)
    samples = samples_of([asked], batch(text, asked, ["3", "4", "3", "33"]), text)
    assert [sample.response for sample in samples] == ["3", "4", "3", "33"]
    found = scoring.score(samples)
    lengths = torch.tensor([6.0, 6.0, 6.0, 7.0])  # four of the prompt, the response, the end
    torch.testing.assert_close(found.total, torch.tensor([1.0, 0.0, 1.0, 0.0]) + 0.1 * lengths)
    assert found.metrics["reward/last_integer"] == 0.5 and found.metrics["reward/model"] == 6.25
    assert found.metrics["reward/mean"] == pytest.approx(0.5 + 0.625)
    assert found.counts["cached"] == 2 and found.counts["asked"] == 8
    ((_, (sent,)),) = calls
    assert [row.tolist() for row in sent.rows("tokens")] == [samples[n].tokens for n in (0, 1, 3)]
    scoring.score(samples)
    assert len(calls) == 1


def test_a_model_that_scores_no_number():
    role = FakeRole("reward", [], {"scores": lambda found: Batch({"scores": torch.tensor([1.0, float("nan")])})})
    found = ModelScorer(role).start([[1], [2]], thread=None)()
    assert found.rewards == [1, 0] and found.unscored == {1} and found.first_failure == "the model scores nan"
    assert found.seconds == 250
    assert ModelScorer(role).start([], thread=None)().rewards == []


def test_sequences_in_the_models_own_tokens(tmp_path, capsys):
    chosen = config(tmp_path, "reward.kind=model", "roles.reward.model.path=x")
    text = Text(chosen.model.path)
    asked = problem(text, "1 + 2 = ")
    samples = samples_of([asked], batch(text, asked, ["3", "44"], truncated=1), text)
    digits = character_tokenizer("0123456789+=<>aeinrstu")
    plain = Retokenizer(digits, text, 100)
    assert [digits.decode(plain(sample)) for sample in samples] == ["1+2=3<eos>", "1+2=44"]
    assert capsys.readouterr().out == ""
    short = Retokenizer(digits, text, 3)
    assert [digits.decode(short(sample)) for sample in samples] == ["=3<eos>", "=44"]
    assert capsys.readouterr().out == "warning: of 6 tokens for the scoring model the last 3 are taken\n"
    digits.chat_template = TEMPLATE
    assert digits.decode(Retokenizer(digits, text, 100)(samples[0])) == "<user>1+2=<assistant>3"


@pytest.mark.parametrize("retokenize", ["auto", "always", "never"])
@pytest.mark.parametrize("same", [True, False])
def test_when_sequences_are_encoded_anew(tmp_path, retokenize, same):
    model = hf_models.make_classifier(tmp_path / "reward", "qwen2", vocab_size=110)
    chosen = config(tmp_path, "reward.kind=model", f"roles.reward={{retokenize: {retokenize}, model: {{path: {model}}}}}")
    text, calls = Text(chosen.model.path), []
    tokenizer = text.tokenizer if same else character_tokenizer("=+3210")
    tokenizer.save_pretrained(model)
    scoring = open_scoring("reward", chosen, {"reward": FakeRole("reward", calls, {"scores": lengths_as_scores})}, text)
    asked = problem(text)
    samples = samples_of([asked], batch(text, asked, ["3", "12"], truncated=0), text)
    assert scoring.score(samples).metrics == {"reward/mean": 6.0}
    sent = [row.tolist() for row in calls[0][1][0].rows("tokens")]
    assert (sent == [sample.tokens for sample in samples]) == (same or retokenize == "never")
    assert [len(row) for row in sent] == [5, 7]
