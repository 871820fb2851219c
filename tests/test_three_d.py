"""Three axes at once against one rank on the whole batch: losses, who holds what, and who talks to whom about what."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
from parity import TOLERANCE, Runs, last_step, one_rank, refusals

from course_lib.launch import RankFailed, launch
from course_lib.models import tiny_llama
from course_lib.parallel.grid import Grid
from course_lib.training import three_d
from course_lib.training.command_line import parse
from course_lib.training.pipeline.stage import split_layers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

STEPS = 5
SIZES = dict(steps=STEPS, global_batch=8, seq_len=16, layers=2, hidden=32, lr=3e-2)
SGD = dict(optimizer="sgd", lr=0.5)  # Adam does not see a factor in all gradients; plain large steps show it
WHOLE, NORMS = 90_272, 5 * 32  # numbers of the model, and of its norms, which every rank of a tp group holds

LAUNCHES = {
    1: {"alone": dict(dp=1, pp=1, tp=1)},
    4: {
        "dp pp": dict(dp=2, pp=2, tp=1) | SGD,
        "dp tp": dict(dp=2, pp=1, tp=2),
        "pp tp": dict(dp=1, pp=2, tp=2, schedule="gpipe", num_microbatches=4),
        "copies": dict(dp=2, pp=2, tp=1, shard_data=False, layers=3) | SGD,  # 3 layers on 2 stages: 2 and 1
    },
    8: {"all": dict(dp=2, pp=2, tp=2)},
}
EVERY = [(ranks, name) for ranks, settings in LAUNCHES.items() for name in settings]


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(three_d.train, LAUNCHES, SIZES)


@cache
def expected_losses(layers, optimizer="adamw", lr=3e-2):
    net = tiny_llama(seed=0, layers=layers, hidden=32)
    return one_rank(net, steps=STEPS, global_batch=8, seq_len=16, optimizer=optimizer, lr=lr)[0]


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_it_trains_as_one_rank_does(ranks, name, runs):
    how = {**SIZES, **LAUNCHES[ranks][name]}
    expected = expected_losses(how["layers"], how.get("optimizer", "adamw"), how["lr"])
    for rank, outcomes in enumerate(runs[ranks].results):
        outcome = outcomes[name]
        assert (outcome.rank, outcome.world_size) == (rank, ranks)
        assert outcome.wrapper == ("FSDPLlamaStage" if how["dp"] > 1 and how.get("shard_data", True) else "LlamaStage")
        assert outcome.losses == pytest.approx(expected, rel=TOLERANCE)
    assert expected[0] - expected[-1] > 0.05  # it learns


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_who_holds_what(ranks, name, runs):
    how = {**SIZES, **LAUNCHES[ranks][name]}
    grid = Grid(**{axis: how[axis] for axis in ("dp", "pp", "tp")})
    outcomes = [results[name] for results in runs[ranks].results]
    total = outcomes[0].extra["total_elements"]
    for rank, outcome in enumerate(outcomes):
        at = grid.coordinates(rank)
        extra = outcome.extra
        assert extra["coordinates"] == {axis: at[axis] for axis in ("pp", "dp", "tp")}
        assert extra["axes"] == {axis: grid.group(rank, axis) for axis in ("pp", "dp", "tp")}
        assert extra["stage_layers"] == list(split_layers(how["layers"], how["pp"])[at["pp"]])
        cut = how["tp"] * (how["dp"] if how.get("shard_data", True) else 1)
        assert extra["shapes"] == [[32, 32], [32 // cut, 32]]
        assert ("Shard" in extra["placements"]) == (cut > 1)
        assert outcome.memory["gradients"] == 4 * extra["local_elements"]
        if "optimizer" not in how:  # Adam: two moments of all that is held, counters of steps, and nothing else
            moments = outcome.memory["optimizer_state"]
            assert 8 * extra["local_elements"] <= moments < 8 * extra["local_elements"] + 8 * 30
    if how["layers"] == 2:
        copies = 1 if how.get("shard_data", True) else how["dp"]
        assert total == WHOLE
        assert sum(o.extra["local_elements"] for o in outcomes) == copies * (WHOLE + (how["tp"] - 1) * NORMS)
    else:
        assert sum(o.extra["local_elements"] for o in outcomes) == how["dp"] * total


@pytest.mark.parametrize("rank", [0, 7])
def test_each_axis_carries_its_own_traffic(rank, runs):
    grid = Grid(dp=2, pp=2, tp=2)
    tp, pp, dp = (tuple(grid.group(rank, axis)) for axis in ("tp", "pp", "dp"))
    log = last_step(runs[8], rank)
    states = 2 * 16 * 32 * 4  # a micro-batch of 2 sequences x 16 tokens x 32 wide, fp32
    # two micro-batches, each: 4 all-reduces in the stage's one block, 1 at the embedding or before the output layer
    assert log[("all_reduce", states, tp)] == 2 * 5
    assert log[("send", states, pp)] == log[("recv", states, pp)] == 2  # activations one way, gradients the other
    kinds = {(kind, group) for kind, _, group in log}
    assert ("all_gather", dp) in kinds and ("reduce_scatter", dp) in kinds
    gathered = sum(size * times for (kind, size, group), times in log.items() if (kind, group) == ("all_gather", dp))
    assert gathered == 4 * runs[8].results[rank]["all"].extra["local_elements"]  # once a step, its own shard
    assert {group for _, _, group in log} == {tp, pp, dp}


def refuse(cases):
    return refusals({name: lambda how=how: three_d.train(**{**SIZES, **how}) for name, how in cases.items()})


def test_misfits_get_a_sentence(private_tmp):
    fits = dict(dp=1, pp=2, tp=1)
    cases = {
        "ranks": (dict(dp=2, pp=2, tp=2), "The grid pp=2 x dp=2 x tp=2 takes 8 ranks and there are 2"),
        "none": (dict(dp=0), "dp=0: give a whole number"),
        "layers": (fits | dict(layers=1), "layers=1 are fewer than the 2 stages"),
        "batch": (fits | dict(global_batch=9), "global_batch=9 does not divide into 1 ranks x 2 micro-batches"),
        "data": (dict(dp=2, pp=1, tp=1, global_batch=6, num_microbatches=2), "6 does not divide into 2 ranks x 2"),
        "micro": (fits | dict(num_microbatches=0), "gradient_accumulation_steps=0|num_microbatches=0"),
        "schedule": (fits | dict(schedule="1b1f"), "schedule='1b1f'"),
        "hidden": (fits | dict(hidden=30), "hidden=30 does not split into heads=4"),
    }
    told = launch(refuse, {name: how for name, (how, _) in cases.items()}, ranks=2, quiet=True).results[1]
    for name, (_, words) in cases.items():
        assert any(word in told[name] for word in words.split("|")), (name, told[name])
    with pytest.raises(RankFailed, match="2 kv heads do not divide over 4 tensor-parallel ranks"):
        launch(three_d.train, dp=1, pp=1, tp=4, ranks=4, quiet=True)


def test_it_can_be_started_from_the_shell():
    told = parse(three_d.train, ["--pp=4", "--no-shard-data"])
    assert (told["pp"], told["shard_data"], told["schedule"]) == (4, False, "1f1b")
