"""Every schedule on real ranks: one rank's losses, the order that the schedule promises, and the memory that it costs."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from parity import Runs, assert_same_training, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.parallel.schedules import Action, orders
from course_lib.parallel.simulate import timeline
from course_lib.training.pipeline import pipeline_parallel as pipeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=3, global_batch=8, seq_len=16, num_microbatches=8, layers=4, hidden=32)
SGD = dict(optimizer="sgd", lr=2.0)  # Adam does not see a factor in all gradients; such large steps show every mistake
LAUNCHES = {
    4: {
        "naive": dict(schedule="naive"),
        "gpipe": dict(schedule="gpipe"),
        "1f1b": {},
        "interleaved": dict(schedule="interleaved", virtual_stages=2, layers=8),
        "zero_bubble": dict(schedule="zero_bubble"),
        "hand": dict(implementation="hand"),
    },
    2: {  # few micro-batches
        "gpipe": dict(schedule="gpipe", num_microbatches=1) | SGD,
        "1f1b": dict(layers=3, num_microbatches=4) | SGD,
        "interleaved": dict(schedule="interleaved", virtual_stages=2, num_microbatches=4) | SGD,
        "zero_bubble": dict(schedule="zero_bubble", num_microbatches=4) | SGD,
        "hand": dict(implementation="hand", num_microbatches=1) | SGD,
    },
}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(pipeline.train, LAUNCHES, SIZES)


def test_ranks_train_as_one_does(runs):
    for ranks, name, how, outcomes in runs.every():
        optimizer = SGD if ranks == 2 else {}
        net = tiny_llama(layers=how["layers"], hidden=32)
        losses, _ = one_rank(net, steps=3, global_batch=8, seq_len=16, **optimizer)
        assert_same_training(outcomes, losses, f"{ranks}: {name}")
        assert ("one_f_one_b" in outcomes[0].wrapper) == ("hand" in name)


def test_each_rank_runs_what_the_schedule_says_when_it_can(runs):
    for ranks, name, how, outcomes in runs.every():
        extra = outcomes[0].extra
        ran = timeline(extra["events"])
        schedule, chunks = how.get("schedule", "1f1b"), how.get("virtual_stages", 1)
        for rank, order in enumerate(orders(schedule, ranks, how["num_microbatches"], chunks)):
            assert [Action(*event[1:4]) for event in ran.events if event.rank == rank] == order, (ranks, name, rank)
            assert outcomes[rank].extra["in_flight"] == ran.in_flight[rank], (ranks, name, rank)
        ends = {(e.kind, e.micro_batch, e.chunk * ranks + e.rank): e.end for e in ran.events}
        for e in ran.events:  # clocks of the ranks agree: nothing begins before what it needs has ended elsewhere
            stage = e.chunk * ranks + e.rank
            need = (e.kind, e.micro_batch, stage - 1 if e.kind == "F" else stage + 1)
            assert e.kind == "W" or e.start >= ends.get(need, 0.0), (ranks, name, e)
        assert extra["bubble"] == ran.bubble and ran.events[0].start == 0


def test_ranks_keep_activations_of_the_micro_batches_in_flight(runs):
    kept = {name: [o.extra["activation_bytes"] for o in runs.outcomes(4, name)] for name in LAUNCHES[4]}
    for rank in range(4):
        single = kept["naive"][rank]
        assert single > 16 * 32 * 4 * 10  # ten times a layer's output, at least
        for name, times in {"gpipe": 8, "1f1b": 4 - rank, "hand": 4 - rank}.items():
            assert kept[name][rank] / single == pytest.approx(times, rel=0.02), (name, rank)
    assert kept["zero_bubble"][0] / kept["naive"][0] == pytest.approx(4, rel=0.02)


def test_each_rank_holds_its_layers_and_nothing_else(runs):
    whole = sum(p.numel() for p in tiny_llama(layers=4, hidden=32).parameters())
    outcomes = runs.outcomes(4, "1f1b")
    local = [outcome.extra["local_elements"] for outcome in outcomes]
    assert sum(local) == whole and local[3] - local[1] == 256 * 32 + 32  # the head and its norm
    assert outcomes[1].memory["gradients"] == 4 * local[1]
    layers = {
        (4, "1f1b"): [[0], [1], [2], [3]],
        (4, "interleaved"): [[0, 4], [1, 5], [2, 6], [3, 7]],
        (2, "1f1b"): [[0, 1], [2]],
    }
    for (ranks, name), expected in layers.items():
        assert [o.extra["stage_layers"] for o in runs.outcomes(ranks, name)] == expected, (ranks, name)


def refuse():
    wrong = {
        "schedule='1f1c'": dict(schedule="1f1c"),
        "implementation='head'": dict(implementation="head"),
        "implementation='hand'": dict(implementation="hand", schedule="gpipe"),
        "global_batch=8": dict(num_microbatches=3),
        "layers=1": dict(layers=1),
        "layers=4": dict(schedule="interleaved", virtual_stages=3),
        "multiple": dict(schedule="interleaved", virtual_stages=2, num_microbatches=1),
        "take 6": dict(schedule="zero_bubble", num_microbatches=5, global_batch=10),
        "num_microbatches=1": dict(num_microbatches=1),
        "pace=-1.0": dict(pace=-1.0),
    }
    assert_refused([(lambda how=how: pipeline.train(**SIZES | how), ValueError, word) for word, how in wrong.items()])


def test_what_does_not_fit_the_ranks_is_refused(private_tmp):
    launch(refuse, ranks=2, quiet=True)
