"""Lab 6: its checks against the planted answers, what they measure memory with, and what is true of its traces."""

import torch
from planted import lab06 as planted
from planted.contract import Contract

from course_checks.harness import LiveTensors
from course_checks.lab06 import lab, mesh_choice, traces
from course_lib.memory import state_bytes


class TestChecks(Contract):
    lab, planted = lab, planted


def test_alive_sees_views_hidden_copies_and_emptied_storages():
    with LiveTensors() as alive:
        hidden = [torch.zeros(1000)]
        assert alive.bytes() == 4000
        view = hidden.pop()[:10]
        assert alive.bytes() == 4000, "ten elements keep the storage of a thousand"
        view.untyped_storage().resize_(0)
        assert alive.bytes() == 0
        torch.empty(10, device="meta")
        assert alive.bytes() == 0
    with LiveTensors(every=True) as alive:
        torch.zeros(1000).sum()
    assert 4000 <= alive.highest < 4100


def test_sixteen_bytes_a_parameter_are_what_the_memory_room_says():
    cluster = mesh_choice.CLUSTERS[2]
    resting = mesh_choice.need_bytes(cluster, 8, True) - 4 * cluster.largest
    assert resting == state_bytes(cluster.parameters, ranks=8, stage=3)
    assert {choice[1] for cluster in mesh_choice.CLUSTERS for choice in mesh_choice.best(cluster)[:1]} == {4, 8, 16, 32}


def test_the_late_rank_is_found_in_what_fully_shard_really_did():
    recorded = traces._recorded()
    assert traces.true_waiting(recorded[False]) == (f"layers.{traces.LATE_BEFORE}", traces.LATE_RANK)
    # prefetched, the wait moves to the unit that was asked for too late
    assert traces.true_waiting(recorded[True]) == (f"layers.{traces.LATE_BEFORE + 1}", traces.LATE_RANK)
