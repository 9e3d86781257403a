"""The reward cache: what is asked again and what not, what is forgotten first."""

from hybridflow.rewards.cache import CachedScorer
from hybridflow.rewards.pool import Scores, collect


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
    first = cached.score([item("x"), item("yy"), item("x"), item("x", prompt="q"), item("x", answer="b"), item("x", w=1)])
    assert first.rewards == [1, 2, 1, 1, 1, 1] and first.cached == 1 and len(inner.asked) == 5
    again = cached.score([item("yy"), item("zzz")])
    assert again.rewards == [2, 3] and again.cached == 1 and inner.asked[5:] == [item("zzz")]
    assert cached.score([item("zzz")]).cached == 1 and len(inner.asked) == 6
    assert cached.score([]).rewards == []


def test_a_failure_is_asked_about_again():
    cached = CachedScorer(inner := Counting(), 100)
    for _ in range(2):
        found = cached.score([item("bad"), item("x"), item("bad")])
        assert found.rewards == [0, 1, 0] and found.failed == 2 and found.unscored == {0, 2} and found.first_failure == "bad"
    assert [i[1] for i in inner.asked] == ["bad", "x", "bad"]
    assert found.cached == 1


def test_the_longest_unused_go_first():
    cached = CachedScorer(inner := Counting(), 2)
    cached.score([item("a"), item("b")])
    cached.score([item("a")])
    cached.score([item("c")])  # b goes
    assert len(inner.asked) == 3
    assert cached.score([item("a"), item("c")]).cached == 2
    assert cached.score([item("b")]).cached == 0
    many = cached.score([item("d" * n) for n in range(5)])  # more at once than are kept
    assert many.rewards == [0, 1, 2, 3, 4]


def test_tokens_are_items_as_well():
    class Sum(Counting):
        def score(self, items):
            self.asked += items
            return Scores([float(sum(tokens)) for tokens in items], 0, 0, None)

    cached = CachedScorer(inner := Sum(), 10)
    assert cached.score([[1, 2], [12], [1, 2]]).rewards == [3, 12, 3] and inner.asked == [[1, 2], [12]]
