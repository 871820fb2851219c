"""Three axes at once against one rank on the whole batch: losses, who holds what, and who talks to whom about what."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
from parity import Runs, assert_same_training, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.parallel.grid import Grid
from course_lib.training import three_d
from course_lib.training.pipeline.stage import split_layers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=4, global_batch=8, seq_len=16, layers=2, hidden=32, lr=3e-2)
SGD = dict(optimizer="sgd", lr=0.5)  # Adam does not see a factor in all gradients; plain large steps show it
WHOLE, NORMS = 90_272, 5 * 32  # numbers of the model, and of its norms, which every rank of a tp group holds
LAUNCHES = {
    4: {
        "dp pp": dict(dp=2, pp=2, tp=1) | SGD,
        "dp tp": dict(dp=2, pp=1, tp=2),
        "pp tp": dict(dp=1, pp=2, tp=2, schedule="gpipe", num_microbatches=4),
        "copies": dict(dp=2, pp=2, tp=1, shard_data=False, layers=3) | SGD,  # 3 layers on 2 stages: 2 and 1
    },
    8: {"all": dict(dp=2, pp=2, tp=2)},
}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(three_d.train, LAUNCHES, SIZES)


@cache
def expected_losses(layers, optimizer="adamw", lr=3e-2):
    net = tiny_llama(seed=0, layers=layers, hidden=32)
    return one_rank(net, steps=4, global_batch=8, seq_len=16, optimizer=optimizer, lr=lr)[0]


def test_ranks_train_as_one_does(runs):
    for _, name, how, outcomes in runs.every():
        losses = expected_losses(how["layers"], how.get("optimizer", "adamw"), how["lr"])
        assert_same_training(outcomes, losses, name)
        assert losses[0] - losses[-1] > 0.05  # it learns
        sharded = how["dp"] > 1 and how.get("shard_data", True)
        assert {o.wrapper for o in outcomes} == {"FSDPLlamaStage" if sharded else "LlamaStage"}, name


def test_who_holds_what(runs):
    for _, name, how, outcomes in runs.every():
        grid = Grid(**{axis: how[axis] for axis in ("dp", "pp", "tp")})
        shards = how["dp"] if how.get("shard_data", True) else 1
        for rank, outcome in enumerate(outcomes):
            place, extra, cut = grid.coordinates(rank), outcome.extra, how["tp"] * shards
            assert extra["coordinates"] == {axis: place[axis] for axis in ("pp", "dp", "tp")}, name
            assert extra["axes"] == {axis: grid.group(rank, axis) for axis in ("pp", "dp", "tp")}, name
            assert extra["stage_layers"] == list(split_layers(how["layers"], how["pp"])[place["pp"]]), name
            assert extra["shapes"] == [[32, 32], [32 // cut, 32]] and ("Shard" in extra["placements"]) == (cut > 1), (
                name
            )
            assert outcome.memory["gradients"] == 4 * extra["local_elements"], name
            if "optimizer" not in how:  # Adam: two moments of all that is held, counters of steps, and nothing else
                assert 0 <= outcome.memory["optimizer_state"] - 8 * extra["local_elements"] < 8 * 30, name
        copies = how["dp"] // shards
        held = copies * (outcomes[0].extra["total_elements"] + (how["tp"] - 1) * NORMS)
        assert sum(o.extra["local_elements"] for o in outcomes) == held, name
        assert how["layers"] != 2 or outcomes[0].extra["total_elements"] == WHOLE, name


def test_each_axis_carries_its_own_traffic(runs):
    grid = Grid(dp=2, pp=2, tp=2)
    states = 2 * 16 * 32 * 4  # bytes of a micro-batch of 2 sequences x 16 tokens x 32 wide, fp32
    for rank in (0, 7):
        tp, pp, dp = (tuple(grid.group(rank, axis)) for axis in ("tp", "pp", "dp"))
        calls = [(c.kind, c.bytes, c.group) for c in runs.last_step(8, "all", rank)]
        # two micro-batches, each: 4 all-reduces in the stage's one block, 1 at the embedding or before the output layer
        assert calls.count(("all_reduce", states, tp)) == 2 * 5
        # activations one way, gradients the other
        assert calls.count(("send", states, pp)) == calls.count(("recv", states, pp)) == 2
        gathered = sum(size for kind, size, group in calls if (kind, group) == ("all_gather", dp))
        assert gathered == 4 * runs.outcomes(8, "all")[rank].extra["local_elements"]  # once a step, its own shard
        assert ("reduce_scatter", dp) in {(kind, group) for kind, _, group in calls}
        assert {group for _, _, group in calls} == {tp, pp, dp}


def refuse():
    fits = dict(dp=1, pp=2, tp=1)
    wrong = [
        ("8 ranks", dict(dp=2, pp=2, tp=2)),
        ("dp=0", dict(dp=0, pp=2, tp=1)),
        ("layers=1", fits | dict(layers=1)),
        ("global_batch=9", fits | dict(global_batch=9)),
        ("global_batch=6", dict(dp=2, pp=1, tp=1, global_batch=6, num_microbatches=2)),
        ("=0", fits | dict(num_microbatches=0)),
        ("schedule='1b1f'", fits | dict(schedule="1b1f")),
        ("hidden=30", fits | dict(hidden=30)),
    ]
    assert_refused([(lambda how=how: three_d.train(**SIZES | how), ValueError, word) for word, how in wrong])


def test_what_does_not_fit_the_ranks_is_refused(private_tmp):
    launch(refuse, ranks=2, quiet=True)
