"""Lab 6's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import pytest
import torch
from planted import lab06 as planted
from planted.contract import Contract

from course_checks.harness import LiveTensors
from course_checks.lab06 import hybrid, lab, mesh_choice, reader, traces, wrapping
from course_lib.launch import launch
from course_lib.memory import state_bytes


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    """The first launch of a session imports PyTorch; a check's time is taken warm."""
    launch(float, ranks=1, quiet=True)


class TestChecks(Contract):
    lab, planted = lab, planted


def test_a_rank_that_calls_one_more_collective_is_not_a_pass():
    assert lab.own_unit(planted.LateOnOneRank).status == "not yet"


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


def test_reader_counts_bytes_and_refuses_rows_that_are_not_there(tmp_path):
    for rank, rows in enumerate(torch.arange(12.0).view(6, 2).split(2)):
        reader.save_shard(tmp_path, rank, {"w": rows})
    reader.save_shard(tmp_path, 3, {"w": torch.empty(0, 2)})
    saved = reader.ShardReader(tmp_path, 4, {"w": (6, 2)})
    assert saved.read("w", 1, 1, 2).tolist() == [[6.0, 7.0]]
    assert saved.read("w", 3, 0, 0).shape == (0, 2)
    assert saved.bytes_read == 8
    for wrong in (("v", 0, 0, 1), ("w", 4, 0, 1), ("w", 3, 0, 1), ("w", 0, 1, 3), ("w", -1, 0, 1)):
        with pytest.raises(ValueError):
            saved.read(*wrong)


def test_models_of_mistakes_without_a_mistake_are_right_and_no_two_look_alike():
    pairs = [
        (wrapping.PEAKS, wrapping._mistaken, wrapping.true_peak, wrapping.MISTAKES),
        (hybrid.TRAFFIC, lambda c, m: hybrid._mistaken(c, m)[0], lambda c: hybrid.true_traffic(c)[0], hybrid.INSIDE),
        (hybrid.TRAFFIC, lambda c, m: hybrid._mistaken(c, m)[1], lambda c: hybrid.true_traffic(c)[1], hybrid.ACROSS),
    ]
    for cases, mistaken, true, words in pairs:
        right = tuple(true(case) for case in cases)
        assert tuple(mistaken(case, ()) for case in cases) == pytest.approx(right)
        outcomes = {name: tuple(mistaken(case, (name,)) for case in cases) for name in words}
        assert len({right, *outcomes.values()}) == len(words) + 1


def test_sixteen_bytes_a_parameter_are_what_the_memory_room_says():
    cluster = mesh_choice.CLUSTERS[2]
    resting = mesh_choice.need_bytes(cluster, 8, True) - 4 * cluster.largest
    assert resting == state_bytes(cluster.parameters, ranks=8, stage=3)
    assert {c[1] for cluster in mesh_choice.CLUSTERS for c in mesh_choice.best(cluster)[:1]} == {4, 8, 16, 32}


def test_made_up_traces_have_the_answers_that_they_say():
    for case in traces.EXPOSURES:
        assert traces.true_exposed(case.spans) == pytest.approx(case.seconds), case.shows
    for waiting in traces.WAITING:
        assert traces.true_waiting(waiting.traces) == (waiting.unit, waiting.rank), waiting.shows


def test_the_late_rank_is_found_in_what_fully_shard_really_did():
    recorded = traces._recorded()
    assert traces.true_waiting(recorded[False]) == (f"layers.{traces.LATE_BEFORE}", traces.LATE_RANK)
    unit, late = traces.true_waiting(recorded[True])
    assert late == traces.LATE_RANK
    assert unit == f"layers.{traces.LATE_BEFORE + 1}", (
        "prefetched, the wait moves to the unit that was asked for too late"
    )
