"""Every schedule on real ranks: one rank's losses, the order that the schedule promises, and the memory that it costs."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, off_by, one_rank, refusals, train_each

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.parallel.schedules import Action, ideal_bubble, orders
from course_lib.parallel.simulate import timeline
from course_lib.training import single
from course_lib.training.command_line import parse
from course_lib.training.pipeline import pipeline_parallel as pipeline
from course_lib.training.pipeline.stage import LlamaStage, split_layers, token_loss

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

STEPS = 3
SIZES = dict(steps=STEPS, global_batch=8, seq_len=16, num_microbatches=8, layers=4, hidden=32)
SGD = 2.0  # learning rate: Adam does not see a factor in all gradients, and steps this large show every mistake

ON_FOUR = {
    "naive": dict(schedule="naive"),
    "gpipe": dict(schedule="gpipe"),
    "1f1b": dict(pace=0.04, steps=4),
    "interleaved": dict(schedule="interleaved", virtual_stages=2, layers=8),
    "zero_bubble": dict(schedule="zero_bubble"),
    "hand": dict(implementation="hand"),
}
ON_TWO = {
    "naive": dict(schedule="naive", num_microbatches=2),
    "gpipe": dict(schedule="gpipe", num_microbatches=1),
    "1f1b": dict(layers=3, num_microbatches=4),
    "interleaved": dict(schedule="interleaved", virtual_stages=2, num_microbatches=4),
    "zero_bubble": dict(schedule="zero_bubble", num_microbatches=4),
    "hand": dict(implementation="hand", num_microbatches=1, steps=1),
    "hand, 4": dict(implementation="hand", num_microbatches=4),
}
WRAPPERS = {
    "naive": "ScheduleGPipe",
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "hand": "one_f_one_b",
    "hand, 4": "one_f_one_b",
}
LAUNCHES = {4: ON_FOUR, 2: ON_TWO}
EVERY = [(ranks, name) for ranks, settings in LAUNCHES.items() for name in settings]
WRONG = {  # on two ranks
    "no such schedule": (dict(schedule="1f1c"), "did you mean '1f1b'"),
    "no such implementation": (dict(implementation="head"), "did you mean 'hand'"),
    "by hand only 1f1b": (dict(implementation="hand", schedule="gpipe"), "implementation='hand' runs '1f1b' alone"),
    "batch": (dict(num_microbatches=3), "global_batch=8 does not divide into 1 ranks x 3 micro-batches"),
    "layers": (dict(layers=1), "layers=1 are fewer than the 2 stages"),
    "chunks": (
        dict(schedule="interleaved", virtual_stages=3),
        "layers=4 do not divide into 2 ranks x 3 virtual stages",
    ),
    "groups": (dict(schedule="interleaved", virtual_stages=2, num_microbatches=1), "not a multiple of the 2 ranks"),
    "rounds": (dict(schedule="zero_bubble", num_microbatches=5, global_batch=10), "in 2 equal rounds; take 6"),
    "fewer micro-batches than stages": (dict(num_microbatches=1), "num_microbatches=1 are fewer than the 2 stages"),
    "pace": (dict(pace=-1.0), "pace=-1.0"),
    "steps": (dict(steps=0), "steps=0"),
}


def several(settings, sgd):
    if sgd:
        pipeline.build_optimizer = lambda parameters, _, lr: torch.optim.SGD(parameters, lr=SGD)
    found = train_each(pipeline.train, {name: SIZES | how for name, how in settings.items()})
    wrong = {name: lambda how=how: pipeline.train(**SIZES | how) for name, (how, _) in WRONG.items() if sgd}
    return found, refusals(wrong)


@pytest.fixture(scope="module")
def runs(private_tmp):
    return {
        ranks: launch(several, settings, ranks == 2, ranks=ranks, quiet=True, timeout=200).results
        for ranks, settings in LAUNCHES.items()
    }


@cache
def expected_losses(layers, sgd):
    how = dict(optimizer="sgd", lr=SGD) if sgd else {}
    return one_rank(tiny_llama(layers=layers, hidden=32), steps=4, global_batch=8, seq_len=16, **how)[0]


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_it_trains_as_one_rank_does(ranks, name, runs):
    how = SIZES | LAUNCHES[ranks][name]
    losses = expected_losses(how["layers"], ranks == 2)[: how["steps"]]
    for rank, (outcomes, _) in enumerate(runs[ranks]):
        outcome = outcomes[name]
        assert (outcome.rank, outcome.world_size, outcome.wrapper) == (rank, ranks, WRAPPERS[name])
        assert off_by(outcome.losses, losses) < TOLERANCE
        assert outcome.losses == runs[ranks][0][0][name].losses


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_each_rank_runs_what_the_schedule_says_when_it_can(ranks, name, runs):
    how = LAUNCHES[ranks][name]
    count, chunks = how.get("num_microbatches", 8), how.get("virtual_stages", 1)
    extra = runs[ranks][0][0][name].extra
    ran = timeline(extra["events"])
    for rank, order in enumerate(orders(how.get("schedule", "1f1b"), ranks, count, chunks)):
        assert [Action(*event[1:4]) for event in ran.events if event.rank == rank] == order
        assert runs[ranks][rank][0][name].extra["in_flight"] == ran.in_flight[rank]
        assert runs[ranks][rank][0][name].extra["events"] == extra["events"]
    ends = {(e.kind, e.micro_batch, e.chunk * ranks + e.rank): e.end for e in ran.events}
    for e in ran.events:  # clocks of the ranks agree: nothing begins before what it needs has ended elsewhere
        stage = e.chunk * ranks + e.rank
        need = (e.kind, e.micro_batch, stage - 1 if e.kind == "F" else stage + 1)
        assert e.kind == "W" or e.start >= ends.get(need, 0.0)
    assert extra["bubble"] == ran.bubble and ran.events[0].start == 0


def test_a_paced_run_idles_as_the_formula_says(runs):
    extra = runs[4][0][0]["1f1b"].extra
    for event in extra["events"]:
        assert event.end - event.start >= (0.04 if event.kind == "F" else 0.08) * 0.99
    told = ideal_bubble("1f1b", 4, 8)  # 0.27; one micro-batch after another would idle 0.75
    assert told - 0.02 < extra["bubble"] < told + 0.2


def test_ranks_keep_activations_of_the_micro_batches_in_flight(runs):
    kept = {name: [outcomes[name].extra["activation_bytes"] for outcomes, _ in runs[4]] for name in ON_FOUR}
    for rank in range(4):
        one = kept["naive"][rank]
        assert one > 16 * 32 * 4 * 10  # ten times a layer's output, at least
        assert kept["gpipe"][rank] / one == pytest.approx(8, rel=0.02)
        assert kept["1f1b"][rank] / one == pytest.approx(4 - rank, rel=0.02)
        assert kept["hand"][rank] / one == pytest.approx(4 - rank, rel=0.02)
    assert kept["zero_bubble"][0] / kept["naive"][0] == pytest.approx(4, rel=0.02)


def test_each_rank_holds_its_layers_and_nothing_else(runs):
    whole = sum(p.numel() for p in tiny_llama(layers=4, hidden=32).parameters())
    extras = [outcomes["1f1b"].extra for outcomes, _ in runs[4]]
    assert [extra["stage_layers"] for extra in extras] == [[0], [1], [2], [3]]
    assert sum(extra["local_elements"] for extra in extras) == whole
    assert extras[3]["local_elements"] - extras[1]["local_elements"] == 256 * 32 + 32  # the head and its norm
    assert [outcomes["interleaved"].extra["stage_layers"] for outcomes, _ in runs[4]] == [[i, i + 4] for i in range(4)]
    assert [outcomes["1f1b"].extra["stage_layers"] for outcomes, _ in runs[2]] == [[0, 1], [2]]
    memory = runs[4][1][0]["1f1b"].memory
    assert memory["gradients"] == extras[1]["local_elements"] * 4 < memory["parameters"] + 4


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_a_sentence_on_every_rank(name, runs):
    for _, said in runs[2]:
        assert WRONG[name][1] in said[name]


def test_stages_one_after_another_are_the_model(one_thread):
    net = tiny_llama(layers=5, hidden=32)
    batch = sample_batch(0, global_batch=2, seq_len=16)
    x = batch
    pieces = split_layers(5, 3)
    assert pieces == [range(2), range(2, 4), range(4, 5)]
    with pytest.raises(ValueError, match="at least 1"):
        split_layers(2, 0)
    for layers in pieces:
        x = LlamaStage(net, layers)(x)
    told = net(input_ids=batch, labels=batch)
    assert torch.equal(x, told.logits)
    assert token_loss(x, batch).item() == pytest.approx(told.loss.item(), rel=1e-6)


def test_the_command_line_has_every_choice():
    told = parse(pipeline.train, ["--schedule", "gpipe", "--num-microbatches", "2", "--pace", "0.5"])
    assert (told["schedule"], told["num_microbatches"], told["pace"], told["implementation"]) == (
        "gpipe",
        2,
        0.5,
        "torch",
    )
    assert set(parse(single.train, [])) - set(told) == {"gradient_accumulation_steps"}
