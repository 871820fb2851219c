"""The arithmetic of links: a ring played out message by message, clusters, published figures, fits."""

from __future__ import annotations

import random

import pytest
from refusals import assert_refused

from course_lib.collectives.links import LINKS, Cluster, Link, bus_bandwidth, fit, ring_seconds

PLAIN = Link("plain", 1e-3, 1e6)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12])
def test_a_ring_that_adds_and_copies_costs_what_the_formula_says(n):
    """Played out message by message: state[rank][chunk] is the set of ranks whose numbers are in it."""
    state = [[{r} for _ in range(n)] for r in range(n)]
    elapsed = 0.0
    for shift in (0, 1):  # add, then copy
        for step in range(n - 1):
            sent = [((r + 1) % n, (r + shift - step) % n, set(state[r][(r + shift - step) % n])) for r in range(n)]
            for to, chunk, ranks in sent:
                state[to][chunk] |= ranks
            elapsed += PLAIN.latency + 1e6 / n / PLAIN.bandwidth
    assert all(chunk == set(range(n)) for rank in state for chunk in rank), "the schedule itself is wrong"
    assert ring_seconds("all_reduce", n, 1e6, PLAIN) == pytest.approx(elapsed)
    assert ring_seconds("all_gather", n, 1e6, PLAIN) == pytest.approx(elapsed / 2)


def test_alone_there_is_nobody_to_talk_to_and_latency_costs_without_bytes():
    assert ring_seconds("all_reduce", 1, 1e6, PLAIN) == 0
    assert ring_seconds("reduce_scatter", 4, 0, PLAIN) == pytest.approx(3e-3)


def test_presets_are_one_direction_and_bound_what_was_published():
    rated = {"pcie4": 31.5, "nvlink3": 300, "nvlink4": 450, "infiniband-ndr": 50, "roce-100": 12.5, "ethernet-10": 1.25}
    for name, expected in rated.items():
        assert LINKS[name].bandwidth / 1e9 == pytest.approx(expected, rel=1e-3), name
    assert all(0 < link.latency < 1e-4 for link in LINKS.values())
    # stas00/ml-engineering, network/README.md: all-reduce by ring on 8 GPUs at 16 GiB
    for name, published, least in (("nvlink4", 367.61e9, 0.81), ("nvlink3", 234.89e9, 0.77)):
        assert least < published / LINKS[name].bandwidth < 1, name


def test_a_cluster_of_one_kind_of_link_is_a_ring():
    alone = Cluster(gpus=8, nodes=1, inner=PLAIN, outer="ethernet-10")
    spread = Cluster(gpus=1, nodes=8, inner="nvlink4", outer=PLAIN)
    for cluster in (alone, spread):
        for collective in ("all_reduce", "reduce_scatter", "all_gather"):
            flat = pytest.approx(ring_seconds(collective, 8, 1e6, PLAIN))
            assert cluster.seconds(collective, 1e6) == flat == cluster.flat_seconds(collective, 1e6), collective
        assert cluster.seconds("all_to_all", 1e6) == pytest.approx(7e-3 + 7 / 8)  # 7 messages of an eighth


def test_the_network_carries_the_array_once_however_many_gpus_a_node_has():
    free = Link("network", 0, 1e9)
    for gpus in (2, 8):
        for cards, carried in ((1, 1), (gpus, gpus), (64, gpus)):  # a GPU's messages take one card
            parts = Cluster(gpus, 4, "nvlink4", free, outer_links=cards).parts("all_reduce", 1e9)
            assert parts["all_reduce between nodes"] == pytest.approx(1.5 / carried), (gpus, cards)


def test_a_hierarchy_beats_one_ring_over_a_slow_network():
    cluster = Cluster(8, 4, "nvswitch-h100", "infiniband-ndr", outer_links=8)
    assert 4 < cluster.flat_seconds("all_reduce", 1e9) / cluster.seconds("all_reduce", 1e9) < 8
    both = cluster.seconds("reduce_scatter", 1e9) + cluster.seconds("all_gather", 1e9)
    assert cluster.seconds("all_reduce", 1e9) == pytest.approx(both)
    far = cluster.parts("all_to_all", 32e9)["all_to_all between nodes"]
    assert far == pytest.approx(24 * (9.6e-6 + 1e9 / 50e9))  # 24 of 32 pieces leave the node, each by its own card


SIZES = [2**k for k in range(10, 27)]


def line_at(size):
    return 5e-4 + size / 2e9


def test_a_line_is_found_exactly_and_among_slow_small_sizes():
    """As seen on a shared machine: large sizes within 10 %, small ones up to 15 times too slow."""
    clean = fit(SIZES, list(map(line_at, SIZES)))
    assert (clean.alpha, clean.bandwidth, clean.half_size) == pytest.approx((5e-4, 2e9, 1e6))
    for seed in range(5):
        chance = random.Random(seed)
        times = [line_at(size) * (1 + chance.uniform(-0.05, 0.05)) for size in SIZES]
        for i in chance.sample(range(10), 3):
            times[i] *= chance.uniform(3, 15)
        noisy = fit(SIZES, times)
        assert all(noisy.predict(size) == pytest.approx(line_at(size), rel=0.15) for size in SIZES), seed


def test_alpha_and_beta_are_never_below_zero():
    steep = fit([1e3, 1e6], [1e-7, 1e-3])  # below the line through the origin
    assert steep.alpha == 0 and steep.beta > 0
    falling = fit([1e3, 2e3], [2e-3, 1e-3])
    assert falling.beta == 0 and 1e-3 <= falling.alpha <= 2e-3
    assert falling.bandwidth == falling.half_size == float("inf")


def test_what_has_no_meaning_is_refused():
    assert_refused(
        [
            (lambda: ring_seconds("allreduce", 2, 1, PLAIN), ValueError, "'all_reduce'"),
            (lambda: ring_seconds("all_reduce", 2.0, 1, PLAIN), ValueError, "ranks=2.0"),
            (lambda: ring_seconds("all_reduce", 2, 1, "nvlink44"), ValueError, "'nvlink4'"),
            (lambda: Link("x", 0, 0), ValueError, "bandwidth=0"),
            (lambda: Cluster(0, 1, PLAIN, PLAIN), ValueError, "gpus=0"),
            (lambda: fit([1, 2], [1]), ValueError, "2 sizes"),
            (lambda: fit([1, 1], [1, 2]), ValueError, "two different sizes"),
            (lambda: bus_bandwidth("all_reduce", 1, 2, 0), ValueError, "seconds=0"),
        ]
    )
