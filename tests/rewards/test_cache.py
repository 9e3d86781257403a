"""The reward cache: what is asked again and what not, what is forgotten first."""

from concurrent.futures import ThreadPoolExecutor

from hybridflow.rewards.cache import CachedScorer
from hybridflow.rewards.pool import Scores, collect

THREAD = ThreadPoolExecutor(1)


def score(cached: CachedScorer, items: list) -> Scores:
    return cached.start(items, THREAD)()


class Counting:
    """The length of the response, or nothing for "bad"; remembers what it was asked."""

    def __init__(self):
        self.asked: list = []

    def score(self, items) -> Scores:
        self.asked += items
        return collect({n: (None, "bad") if i[1] == "bad" else (float(len(i[1])), None) for n, i in enumerate(items)}, 0)

    def close(self):
        pass


def item(response, prompt="p", answer="a", **metadata):
    return (prompt, response, answer, metadata)


def test_equal_items_are_asked_about_once():
    cached = CachedScorer(inner := Counting(), 100)
    first = score(cached, [item("x"), item("yy"), item("x"), item("x", prompt="q"), item("x", answer="b"), item("x", w=1)])
    assert first.rewards == [1, 2, 1, 1, 1, 1] and first.cached == 1 and len(inner.asked) == 5
    again = score(cached, [item("yy"), item("zzz")])
    assert again.rewards == [2, 3] and again.cached == 1 and inner.asked[5:] == [item("zzz")]
    assert score(cached, [item("zzz")]).cached == 1 and len(inner.asked) == 6
    assert score(cached, []).rewards == []


def test_a_failure_is_asked_about_again():
    cached = CachedScorer(inner := Counting(), 100)
    for _ in range(2):
        found = score(cached, [item("bad"), item("x"), item("bad")])
        assert found.rewards == [0, 1, 0] and found.failed == 2 and found.unscored == {0, 2} and found.first_failure == "bad"
    assert [i[1] for i in inner.asked] == ["bad", "x", "bad"]
    assert found.cached == 1


def test_the_longest_unused_go_first():
    cached = CachedScorer(inner := Counting(), 2)
    score(cached, [item("a"), item("b")])
    score(cached, [item("a")])
    score(cached, [item("c")])  # b goes
    assert len(inner.asked) == 3
    assert score(cached, [item("a"), item("c")]).cached == 2
    assert score(cached, [item("b")]).cached == 0
    many = score(cached, [item("d" * n) for n in range(5)])  # more at once than are kept
    assert many.rewards == [0, 1, 2, 3, 4]


def test_tokens_are_items_as_well():
    class Sum(Counting):
        def score(self, items):
            self.asked += items
            return Scores([float(sum(tokens)) for tokens in items], 0, 0, None)

    cached = CachedScorer(inner := Sum(), 10)
    assert score(cached, [[1, 2], [12], [1, 2]]).rewards == [3, 12, 3] and inner.asked == [[1, 2], [12]]


def test_scores_that_are_known_stay_known_while_others_are_waited_for():
    cached = CachedScorer(Counting(), 1)
    score(cached, [item("a")])
    first = cached.start([item("a"), item("bb")], THREAD)
    assert score(cached, [item("ccc")]).rewards == [3]  # a goes meanwhile
    assert first().rewards == [1, 2]
