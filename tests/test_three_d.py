"""Three axes at once against one rank on the whole batch: losses, clipped norms, who holds what, who talks to whom."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from parity import Runs, assert_same_training, off_by, one_rank
from refusals import assert_refused

from course_lib.launch import RankFailed, launch
from course_lib.models import tiny_llama
from course_lib.training import three_d

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=4, global_batch=8, seq_len=16)
LAUNCHES = {
    4: {
        "dp pp": dict(dp=2, pp=2, tp=1, optimizer="sgd"),  # Adam does not see a factor in all gradients
        "dp tp": dict(dp=2, pp=1, tp=2),
        "pp tp": dict(dp=1, pp=2, tp=2, num_microbatches=4),
    },
    8: {"all": dict(dp=2, pp=2, tp=2)},
}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(three_d.train, LAUNCHES, SIZES)


def test_ranks_train_and_clip_as_one_does(runs):
    for _, name, how, outcomes in runs.every():
        losses, norms = one_rank(tiny_llama(), **SIZES, optimizer=how.get("optimizer", "adamw"), max_grad_norm=1.0)
        assert min(norms) > 1  # every step is clipped
        assert_same_training(outcomes, losses, name)
        assert all(off_by(outcome.extra["norms"], norms) < 1e-5 for outcome in outcomes), name
        assert {o.wrapper for o in outcomes} == {"FSDPLlamaStage"}, name


def test_who_holds_what(runs):
    model = tiny_llama(device="meta")
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    whole = sum(p.numel() for p in model.parameters())
    for ranks, name, how, outcomes in runs.every():
        held = sum(outcome.extra["local_elements"] for outcome in outcomes)
        assert held == matrices + how["tp"] * (whole - matrices), name  # the rest is whole on the ranks of a tp group
        assert max(outcome.extra["local_elements"] for outcome in outcomes) < 1.15 * held / ranks, name


def test_each_axis_carries_its_own_traffic(runs):
    grid = torch.arange(8).view(2, 2, 2)  # pp, dp, tp
    states = 2 * 16 * 128 * 4  # bytes of a micro-batch of 2 sequences x 16 tokens x 128 wide, fp32
    for rank in (0, 7):
        (i, j, k), *_ = (grid == rank).nonzero().tolist()
        tp, pp, dp = (tuple(group.tolist()) for group in (grid[i, j], grid[:, j, k], grid[i, :, k]))
        calls = [(c.kind, c.bytes, c.group) for c in runs.last_step(8, "all", rank)]
        assert calls.count(("all_reduce", states, tp)) == 2 * 2 * 4  # micro-batches, the stage's blocks, f and g
        # activations one way, gradients the other
        assert calls.count(("send", states, pp)) == calls.count(("recv", states, pp)) == 2
        gathered = sum(size for kind, size, group in calls if (kind, group) == ("all_gather", dp))
        assert gathered == 4 * runs.outcomes(8, "all")[rank].extra["local_elements"]  # once a step, its own shard
        assert ("reduce_scatter", dp) in {(kind, group) for kind, _, group in calls}


def refuse():
    one = dict(pp=1, tp=1)
    wrong = {"global_batch=9": one | dict(global_batch=9), "global_batch=6": one | dict(global_batch=6)}
    assert_refused([(lambda how=how: three_d.train(**SIZES | how), ValueError, word) for word, how in wrong.items()])


def test_unequal_shares_are_refused(private_tmp):
    launch(refuse, ranks=2, quiet=True)


def library_clip(parameters, mesh, max_norm):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def test_the_library_s_clipping_raises_on_mixed_meshes(private_tmp):
    with pytest.raises(RankFailed) as failed:
        launch(three_d.train, pp=1, clip=library_clip, **SIZES, ranks=4, quiet=True, timeout=120)
    assert failed.value.cause_type == "RuntimeError" and "mesh" in failed.value.cause_message
