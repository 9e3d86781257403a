"""Reward models as roles: the scores of transformers' own classifiers, in any layout, on sequences of unlike lengths."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.load import load
from hybridflow.roles.reward import HFRewardModel, padded_groups, without_padding
from tests import hf_models
from tests.roles import rewards

PAD = 7
LENGTHS = (5, 9, 3, 30, 1, 12, 7, 17)
ON_THE_HOST = "offload: [params]"
# what the roles.reward section has besides the model, the family and the padding token of the model
CASES = {
    "tp2-pp2": ("{tp: 2, pp: 2}", "qwen2", PAD),
    "tp2-sp-dp2": ("{tp: 2, sequence_parallel: true}", "llama", None),
    "pp2-vpp2-dp2": ("{pp: 2, vpp: 2}", "qwen3", PAD),
    "pp4-bare-ends": ("{pp: 4, split: {stages: [0, 2, 2, 0]}}", "qwen2", None),
    "dp4 on the host": (f"{{{ON_THE_HOST}}}", "qwen2", PAD),
    "qwen3-moe-tp2-ep2": ("{tp: 2, ep: 2, sequence_parallel: true}", "qwen3_moe", PAD),
    "hf": ("{backend: hf}", "qwen2", PAD),
    "hf on the host, without padding": (f"{{backend: hf, {ON_THE_HOST}}}", "llama", None),
}
CONFIG = """
model: {{path: {model}, dtype: float32}}
cluster: {{ranks_per_node: 4}}
sampling: {{max_prompt_tokens: 32, max_response_tokens: 16}}
data: {{task: chain_sum}}
reward: {{kind: model}}
roles: {{reward: {{model: {{path: {model}}}, forward_micro_batch_tokens: 48}}}}
run: {{dir: {run}}}
"""


def tokens() -> list[torch.Tensor]:
    """Some end with padding tokens, and one has nothing else."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(8, 131, (length,), generator=generator) for length in LENGTHS]
    rows[1][-3:] = rows[3][-1] = rows[3][4] = rows[4][0] = PAD
    return rows


def hf_scores(folder: Path) -> torch.Tensor:
    """transformers' scores, one sequence at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.stack([model(row[None]).logits[0, 0] for row in tokens()])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_transformers(worlds, tmp_path, case):
    section, family, pad = CASES[case]
    model = hf_models.make_classifier(tmp_path / "model", family, pad=pad)
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(model=model, run=tmp_path / "run"))
    ranks = worlds(4).run(rewards.scores, str(path), [f"roles.reward={section}"], tokens(), timeout=200)
    assert all(rank["away"] == (ON_THE_HOST in section) for rank in ranks)
    expected = hf_scores(model)
    assert expected.std() > 0.1
    asked = [rank["scores"] for rank in ranks if rank["scores"]]
    assert asked
    for found in asked:
        for scores in found:
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)


def test_any_classifier_of_transformers(tmp_path):
    """An encoder, which sees the padding unless it is masked; and a folder without a head, which is no classifier."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    sizes = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**sizes, num_labels=1, pad_token_id=0)).eval()
    torch.nn.init.normal_(model.classifier.weight, 0, 0.5)
    model.save_pretrained(tmp_path / "bert")
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(model=tmp_path / "bert", run=tmp_path / "run"))
    role = HFRewardModel("reward", load(str(path), ["roles.reward.backend=hf"]))
    found = role.scores(Batch({"tokens": tokens()}))["scores"]
    with torch.no_grad():
        expected = torch.stack([model(row[None]).logits[0, 0] for row in tokens()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert role.parameters() and not any(parameter.requires_grad for parameter in role.parameters().values())
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(RuntimeError, match="lacks weights of BertForSequenceClassification: .*classifier"):
        HFRewardModel("reward", load(str(path), ["roles.reward.backend=hf"]))


def test_the_last_token_that_is_not_padding():
    for row, kept in (([1, 7, 2, 7, 7], 3), ([1, 2], 2), ([7, 7], 1), ([7, 1], 2)):
        assert without_padding(torch.tensor(row), 7).tolist() == row[:kept]
    assert without_padding(torch.tensor([7, 7]), None).tolist() == [7, 7]


def test_sequences_that_run_together():
    assert padded_groups([5, 9, 3, 9, 1], 18) == [[1, 3], [0, 2, 4]]
    assert padded_groups([5, 20, 3], 10) == [[1], [0, 2]]
    assert padded_groups([4, 4], 0) == [[0], [1]]
