"""Shares of the sending against the optimum: Hall's theorem over all sets of ranks, and by hand for a long chain."""

import random

import numpy as np
import pytest

from hybridflow.resharding.senders import SLACK, Request, choose_senders


def loads(requests: list[Request], ranks: int) -> list[int]:
    """What each rank sends, after checking that every request is met by candidates of its own."""
    load = [0] * ranks
    for request, shares in zip(requests, choose_senders(requests, ranks), strict=True):
        assert sum(part for _, part in shares) == request.size
        assert len({sender for sender, _ in shares}) == len(shares)
        for sender, part in shares:
            assert sender in request.candidates and part >= 0
            load[sender] += part
    return load


def least_of_the_busiest(requests: list[Request], ranks: int) -> float:
    """The largest average, over all sets of ranks, of what only they can send."""
    sets = np.arange(1, 1 << ranks)
    only = np.zeros(len(sets))
    for request in requests:
        only += np.where(sum(1 << rank for rank in request.candidates) & ~sets, 0, request.size)
    return float((only / np.bitwise_count(sets)).max())


@pytest.mark.parametrize("seed", range(200))
def test_the_busiest_sends_hardly_more_than_it_must(seed):
    rng = random.Random(seed)
    ranks = rng.randrange(2, 10)
    groups = [tuple(sorted(rng.sample(range(ranks), rng.randrange(1, ranks + 1)))) for _ in range(rng.randrange(1, 12))]
    requests = [
        Request(rng.randrange(ranks), rng.choice([1, 10, 1000]) * rng.randrange(1, 1000), rng.choice(groups))
        for _ in range(rng.randrange(1, 30))
    ]
    rounding = len(requests)  # elements are not cut
    assert max(loads(requests, ranks)) <= 1.01 * SLACK * least_of_the_busiest(requests, ranks) + rounding


def test_a_load_runs_off_along_a_chain():
    """Neighbours share each request, and only the first is large: a chain of 99 small ones cannot take much of it over."""
    requests = [Request(0, 1_000_000, (0, 1))] + [Request(0, 1_000, (i, i + 1)) for i in range(1, 100)]
    assert max(loads(requests, 101)) <= SLACK * 1_000_000 / 2
    requests = [Request(0, 1_000_000, (0,))] + [Request(0, 20_000, (i, i + 1)) for i in range(100)]
    assert max(loads(requests, 101)) == 1_000_000  # all others have somebody else to send for them


def test_bundles_of_equal_size_stay_whole_and_go_to_different_senders():
    requests = [Request(destination, 10, (4, 5, 6, 7)) for destination in range(4)]
    shares = choose_senders(requests, 8)
    assert all(len(parts) == 1 for parts in shares) and {parts[0][0] for parts in shares} == {4, 5, 6, 7}


def test_a_small_bundle_travels_with_a_large_one():
    """The small one of each destination could come from any of four ranks: it takes the message that there is anyhow."""
    requests = [Request(d, 1000, (4 + d // 2,)) for d in range(4)] + [Request(d, 10, (4, 5, 6, 7)) for d in range(4)]
    requests += [Request(d, 3000, (6, 7)) for d in range(2)]
    shares = choose_senders(requests, 8)
    senders = {(request.destination, sender) for request, parts in zip(requests, shares, strict=True) for sender, _ in parts}
    assert len(senders) == 6  # one for each large bundle


def test_nothing_to_send():
    assert choose_senders([], 4) == []
