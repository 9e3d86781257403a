"""The scorer pool with functions that work, fail, hang, crash and print."""

import os
import signal
import time

import pytest

from hybridflow.rewards.pool import DirectScorer, ScorerPool, open_scorer
from hybridflow.rewards.scorers import RewardError, ScorerSpec

CODE = """
import os, time

def score(prompt, response, answer, metadata):
    print("chatter")
    match response:
        case "hang": time.sleep(1000)
        case "fail": raise KeyError("oh")
        case "crash": os._exit(3)
        case "none": return None
        case "nan": return float("nan")
        case "meet":  # waits for as many others as the answer says
            open(f"{metadata['folder']}/{os.getpid()}", "w").close()
            while len(os.listdir(metadata["folder"])) < int(answer): time.sleep(0.01)
            return os.getpid()
        case "pid": return os.getpid()
    return float(response == answer)
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return ScorerSpec("function", f"{tmp_path}/mine.py:score")


def item(response, answer="a", **metadata):
    return ("p", response, answer, metadata)


@pytest.mark.timeout(120)
def test_order_failures_and_workers_that_are_replaced(spec):
    with ScorerPool(spec, concurrency=2, timeout=2.0) as pool:
        responses = ["a", "b", "fail", "a", "crash", "hang", "a", "none", "nan", "a"]
        scores = pool.score([item(response) for response in responses])
        assert scores.rewards == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
        assert (scores.failed, scores.timed_out, scores.first_failure) == (4, 1, "KeyError: 'oh'")
        assert scores.unscored == {2, 4, 5, 7, 8}
        scores = pool.score([item("crash"), item("hang"), item("a")])
        assert scores.rewards == [0, 0, 1]
        assert (scores.failed, scores.timed_out) == (1, 1)
        assert scores.first_failure == "the scorer's process died with status 3"
        again = pool.score([item("a")] * 30)
        assert (again.rewards, again.failed, again.timed_out, again.first_failure) == ([1.0] * 30, 0, 0, None)
        assert pool.score([]).rewards == []


@pytest.mark.timeout(120)
def test_items_run_side_by_side_and_close_ends_the_processes(spec, tmp_path):
    (tmp_path / "met").mkdir()
    with ScorerPool(spec, concurrency=4, timeout=60) as pool:
        scores = pool.score([item("meet", answer="4", folder=str(tmp_path / "met"))] * 4)
    assert scores.timed_out == 0
    pids = {int(pid) for pid in scores.rewards}
    assert len(pids) == 4 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.timeout(120)
def test_a_module_that_fails_is_an_error_at_the_start(tmp_path, spec):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RewardError, match="importing .*broken.py failed: ZeroDivisionError"):
        ScorerPool(ScorerSpec("function", f"{tmp_path}/broken.py:score"), concurrency=2)
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(RewardError, match="a scorer process died with status 7 while loading"):
        ScorerPool(ScorerSpec("function", f"{tmp_path}/deadly.py:score"), concurrency=1)
    with pytest.raises(RewardError, match="reward.concurrency=0"):
        ScorerPool(spec, concurrency=0)
    with pytest.raises(RewardError, match="reward.timeout=0"):
        ScorerPool(spec, timeout=0)


@pytest.mark.timeout(120)
def test_the_tasks_own_scorer_in_the_pool():
    with ScorerPool(ScorerSpec("task", task="chain_sum"), concurrency=1, timeout=30) as pool:
        assert pool.score([item("7", "7"), item("+07", "7"), item("x", "7")]).rewards == [1.0, 1.0, 0.0]


@pytest.mark.timeout(120)
def test_a_worker_killed_while_idle_is_replaced(spec):
    with ScorerPool(spec, concurrency=1, timeout=30) as pool:
        (pid,) = pool.score([item("pid")]).rewards
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.2)
        scores = pool.score([item("a"), item("pid")])
        assert scores.rewards[0] == 1.0 and scores.rewards[1] != pid and scores.failed == 0


def test_last_integer_needs_no_processes():
    scorer = open_scorer(ScorerSpec("last_integer"), concurrency=8)
    assert isinstance(scorer, DirectScorer)
    assert scorer.score([item("so 7", "7"), item("8", "7"), item("", "7")]).rewards == [1.0, 0.0, 0.0]
    scorer.close()
