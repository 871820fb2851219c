"""Schedules on real ranks: one rank's losses, the order that the schedule promises, and the memory that it costs."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from parity import Runs, assert_same_training, one_rank
from refusals import assert_refused
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.parallel.schedules import Action, orders
from course_lib.training.pipeline import LlamaStage, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=3, global_batch=8, seq_len=16, num_microbatches=8, layers=8)
LAUNCHES = {
    4: {
        "gpipe": dict(schedule=ScheduleGPipe),
        "1f1b": {},
        "interleaved": dict(schedule=ScheduleInterleaved1F1B, virtual_stages=2),
    },
    2: {  # SGD: Adam does not see a factor in all gradients
        "gpipe": dict(schedule=ScheduleGPipe, num_microbatches=1, optimizer="sgd"),
        "1f1b": dict(layers=3, num_microbatches=4, optimizer="sgd"),
        "zero_bubble": dict(schedule=ScheduleInterleavedZeroBubble, virtual_stages=2, layers=4, num_microbatches=4),
        "paced": dict(layers=2, num_microbatches=2, steps=2, pace=0.02),
    },
}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(train, LAUNCHES, SIZES)


def test_ranks_train_as_one_does(runs):
    for ranks, name, how, outcomes in runs.every():
        net = tiny_llama(layers=how["layers"])
        losses, _ = one_rank(
            net, steps=how["steps"], global_batch=8, seq_len=16, optimizer=how.get("optimizer", "adamw")
        )
        assert_same_training(outcomes, losses, f"{ranks}: {name}")


def test_each_rank_runs_what_the_schedule_says_when_it_can(runs):
    for ranks, name, how, outcomes in runs.every():
        if name in ("zero_bubble", "paced"):
            continue  # the first is interleaved, which `orders` does not have
        ran = outcomes[0].extra["timeline"]
        for rank, order in enumerate(orders(name, ranks, how["num_microbatches"], how.get("virtual_stages", 1))):
            assert [Action(*event[1:4]) for event in ran.events if event.rank == rank] == order, (ranks, name, rank)
        ends = {(e.kind, e.micro_batch, e.chunk * ranks + e.rank): e.end for e in ran.events}
        for e in ran.events:  # clocks of the ranks agree: nothing begins before what it needs has ended elsewhere
            stage = e.chunk * ranks + e.rank
            need = (e.kind, e.micro_batch, stage - 1 if e.kind == "F" else stage + 1)
            assert e.start >= ends.get(need, 0.0), (ranks, name, e)
        assert ran.events[0].start == 0 and all(outcome.extra["timeline"] == ran for outcome in outcomes)


def test_a_split_backward_is_recorded_in_two_parts(runs):
    kinds = [event.kind for event in runs.outcomes(2, "zero_bubble")[0].extra["timeline"].events]
    assert {kind: kinds.count(kind) for kind in "FBW"} == dict.fromkeys("FBW", 2 * 2 * 4)


def test_a_pace_makes_a_backward_last_at_least_twice_a_forward(runs):
    seconds = {"F": [], "B": []}
    for event in runs.outcomes(2, "paced")[0].extra["timeline"].events:
        seconds[event.kind].append(event.end - event.start)
    assert min(seconds["F"]) >= 0.02 and min(seconds["B"]) >= 0.04 and len(seconds["B"]) == 4


def test_ranks_keep_activations_of_the_micro_batches_in_flight(runs):
    kept = {name: [o.memory["activations"] for o in runs.outcomes(4, name)] for name in LAUNCHES[4]}
    for rank in range(3):  # the last one's head keeps logits besides
        assert kept["gpipe"][rank] / kept["1f1b"][rank] == pytest.approx(8 / (4 - rank), rel=0.02), rank
        assert kept["interleaved"][rank] / kept["1f1b"][rank] == pytest.approx((5.5 - rank) / (4 - rank), rel=0.03), (
            rank
        )


def test_each_layer_lies_on_one_stage():
    def cut(layers, stages):
        model = tiny_llama(layers=layers, device="meta")
        return [LlamaStage(model, index, stages) for index in range(stages)]

    assert [list(stage.numbers) for stage in cut(3, 2)] == [[0, 1], [2]]
    whole = sum(p.numel() for p in tiny_llama(layers=8, device="meta").parameters())
    assert sum(p.numel() for stage in cut(8, 3) for p in stage.parameters()) == whole
    with pytest.raises(ValueError, match="2 layers"):
        cut(2, 3)


def refuse():
    wrong = {"global_batch=9": dict(global_batch=9), "3 micro-batches": dict(num_microbatches=3), "=0": dict(steps=0)}
    assert_refused([(lambda how=how: train(**SIZES | how), ValueError, word) for word, how in wrong.items()])


def test_unequal_micro_batches_are_refused(private_tmp):
    launch(refuse, ranks=2, quiet=True)
