"""What counts as the last integer, reasoning_gym's own scorer, and loading a user's function."""

import pytest

from hybridflow.rewards.scorers import RewardError, ScorerSpec, last_integer, load_scorer


@pytest.mark.parametrize(
    "response,answer,reward",
    [
        ("7", "7", 1), ("-7", "-7", 1), ("7", "-7", 0), ("-7", "7", 0), ("", "7", 0), ("none", "0", 0), ("007", "7", 1),
        ("3 + 4 = 7", "7", 1), ("3 + 4 = 7.", "7", 1), ("4 - 1 = 3, so 3", "3", 1), ("it is 7, not 8", "7", 0),
        ("1-3", "3", 1), ("1 - 3", "3", 1), ("1-3=-2", "-2", 1), ("x - 3", "3", 1), ("(1)-3", "3", 1), ("= - 3", "3", 1),
        ("the answer is -12", "-12", 1), ("**-12**", "-12", 1), ("-0", "0", 1), ("1,234", "1234", 1), ("1,23", "23", 1),
        ("12\n", "12", 1), ("-1\n-12", "-12", 1), ("2 -3", "3", 1),
    ],
)  # fmt: skip
def test_last_integer(response, answer, reward):
    assert last_integer("", response, answer, {}) == reward


def test_the_tasks_own_scorer():
    score = load_scorer(ScorerSpec("task", task="chain_sum", options={"max_terms": 2}))
    assert score("", " +07 ", "7", {}) == 1.0
    assert score("", "8", "7", {}) < 0.5
    with pytest.raises(RewardError, match="reward.kind=task: data.task='sums' is no task"):
        load_scorer(ScorerSpec("task", task="sums"))


def test_a_users_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(prompt, response, answer, metadata):\n    return metadata['w'] * len(response)\n"
    )
    assert load_scorer(ScorerSpec("function", f"{tmp_path}/mine.py:score"))("p", "abc", "", {"w": 0.5}) == 1.5


@pytest.mark.parametrize(
    "code,path,message",
    [
        ("", "mine.py", "must look like path/to/file.py:name"),
        ("", "other.py:score", "other.py does not exist"),
        ("import no_such_module_here\n", "mine.py:score", "importing .*mine.py failed: ModuleNotFoundError: No module named"),
        ("def scores(*a): ...\n", "mine.py:score", "has no function score: there are scores"),
        ("score = 3\n", "mine.py:score", "has no function score: there are none"),
    ],
)
def test_bad_functions(tmp_path, code, path, message):
    (tmp_path / "mine.py").write_text(code)
    path = str(tmp_path / path)
    with pytest.raises(RewardError, match=message):
        load_scorer(ScorerSpec("function", path))


def test_unknown_kind():
    with pytest.raises(RewardError, match="reward.kind='judge' is unknown"):
        load_scorer(ScorerSpec("judge"))


def test_last_integer_needs_integer_answers():
    with pytest.raises(RewardError, match="reward.kind=last_integer needs integer answers, not '1/2'"):
        last_integer("", "3", "1/2", {})
