"""The arithmetic of links: a ring played out message by message, clusters, published figures."""

from __future__ import annotations

import pytest
from refusals import assert_refused

from course_lib.collectives.links import LINKS, Cluster, Link, ring_seconds

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


def test_what_has_no_meaning_is_refused():
    assert_refused(
        [
            (lambda: ring_seconds("allreduce", 2, 1, PLAIN), ValueError, "'all_reduce'"),
            (lambda: ring_seconds("all_reduce", 2.0, 1, PLAIN), ValueError, "ranks=2.0"),
            (lambda: ring_seconds("all_reduce", 2, 1, "nvlink44"), ValueError, "'nvlink4'"),
            (lambda: Link("x", 0, 0), ValueError, "bandwidth=0"),
            (lambda: Cluster(0, 1, PLAIN, PLAIN), ValueError, "gpus=0"),
        ]
    )
