"""A run that is interrupted and resumed, also on other numbers of ranks, against one that was not: equal bit for bit."""

from __future__ import annotations

import shutil
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.launch.threads import one_thread
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.training.resumable import program as resumable
from course_lib.training.resumable.comparison import compare_resume, read_record
from course_lib.training.resumable.journal import read
from course_lib.training.resumable.state import warm_up_and_cosine

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = dict(global_batch=4, seq_len=16, layers=1, hidden=32)
HOW = dict(**SIZES, steps=8, save_every=2, warmup=2, lr=3e-3)
SPIKY = dict(**SIZES, steps=24, save_every=5, warmup=2, lr=1e-2, dropout=0.0, spoil_step=12)
CAUSES = {
    "dropout": "dropout",
    "rng": "random numbers",
    "data": "data's position",
    "scheduler": "schedule",
    "optimizer": "optimizer's state",
}
CUT = 5  # one update more than is saved: it has to be done again


def three_ranks(root: str) -> dict:
    return {
        "undisturbed": resumable.train(**HOW),  # three ranks have 2, 1 and 1 of 4 shards
        "chain": resumable.train(**HOW, checkpoint_dir=f"{root}/chain", stop_at=3),
    }


def two_ranks(root: str) -> dict:
    results = {"undisturbed": resumable.train(**HOW, checkpoint_dir=f"{root}/undisturbed")}
    results["chain"] = resumable.train(**HOW, checkpoint_dir=f"{root}/chain", stop_at=CUT)
    resumable.train(**HOW, checkpoint_dir=f"{root}/cut", stop_at=CUT)
    for lost in ("", *CAUSES):
        if dist.get_rank() == 0:
            shutil.copytree(f"{root}/cut", f"{root}/forgot-{lost}")
        dist.barrier()
        results[lost] = resumable.train(**HOW, checkpoint_dir=f"{root}/forgot-{lost}", forget=lost)
    results["skip"] = resumable.train(**SPIKY, on_spike="skip")
    return results


def one_rank(root: str) -> dict:
    results = {"chain": resumable.train(**HOW, checkpoint_dir=f"{root}/chain")}
    results["done"] = resumable.train(**HOW, checkpoint_dir=f"{root}/chain")
    results["no dropout"] = resumable.train(**{**HOW, "dropout": 0.0, "max_grad_norm": 1.0})
    for how in ("skip", "rollback"):
        resumable.train(**SPIKY, on_spike=how, checkpoint_dir=f"{root}/{how}", stop_at=14)
        results[how] = resumable.train(**SPIKY, on_spike=how, checkpoint_dir=f"{root}/{how}")

    def call(**changes):
        return partial(resumable.train, **{**HOW, **changes})

    chain = f"{root}/chain"
    assert_refused(
        [
            (call(steps=0), ValueError, "steps=0"),
            (call(lr=-1.0), ValueError, "lr=-1.0"),
            (call(dropout=1.0), ValueError, "dropout=1.0"),
            (call(virtual_ranks=3), ValueError, "global_batch=4"),
            (call(on_spike="panic"), ValueError, "'panic'"),
            (call(on_spike="rollback"), ValueError, "checkpoint_dir"),
            (call(forget="all"), ValueError, "forget='all'"),
            (call(checkpoint_dir=chain, seed=1), ValueError, "seed=1"),
            (call(checkpoint_dir=chain, resume=False), ValueError, chain),
            (call(checkpoint_dir=chain, hidden=64), ValueError, "another model"),
            (call(lr=1e30, on_spike="skip"), RuntimeError, "4 spikes"),
            (call(lr=1e30, on_spike="rollback", checkpoint_dir=f"{root}/diverged"), RuntimeError, "4 spikes"),
        ]
    )
    return results


@pytest.fixture(scope="module")
def root(private_tmp, tmp_path_factory):
    return str(tmp_path_factory.mktemp("resumable"))


@pytest.fixture(scope="module")
def runs(root):
    """By number of ranks, in the order in which they hand the folder "chain" on to each other."""
    functions = {3: three_ranks, 2: two_ranks, 1: one_rank}
    return {n: launch(function, root, ranks=n, quiet=True, timeout=250) for n, function in functions.items()}


def outcome_of(runs, ranks, name):
    """A run's outcome, the same on every rank."""
    first, *others = [result[name] for result in runs[ranks].results]
    for other in others:
        assert (other.losses, other.extra["fingerprint"]) == (first.losses, first.extra["fingerprint"])
    return first


def plain_loop(positions, *, clip=0.0, **how):
    """Losses of one process on whole batches, without dropout: a loop that knows nothing of shards, ranks or resumes."""
    losses = []
    with one_thread():
        model = tiny_llama(layers=how["layers"], hidden=how["hidden"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=how["lr"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(how["warmup"], how["steps"]))
        for position in positions:
            batch = sample_batch(position, global_batch=how["global_batch"], seq_len=how["seq_len"])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return losses


def test_it_trains_like_a_plain_loop_and_refuses_what_cannot_be(runs):
    losses = outcome_of(runs, 1, "no dropout").losses
    assert losses == pytest.approx(plain_loop(range(8), clip=1.0, **HOW), rel=1e-5)


def test_resumed_with_three_then_two_then_one_rank_it_is_equal_bit_for_bit(runs, root):
    whole, last, done = outcome_of(runs, 2, "undisturbed"), outcome_of(runs, 1, "chain"), outcome_of(runs, 1, "done")
    assert [outcome_of(runs, ranks, "chain").extra["first_step"] for ranks in (3, 2, 1)] == [0, 2, 4]
    assert outcome_of(runs, 3, "chain").losses == whole.losses[:3]
    assert outcome_of(runs, 2, "chain").losses == whole.losses[:5]
    for outcome in (outcome_of(runs, 3, "undisturbed"), last):
        assert outcome.losses == whole.losses and outcome.extra["fingerprint"] == whole.extra["fingerprint"]
    assert (done.losses, done.extra["first_step"]) == (whole.losses, 8)  # nothing was left to do
    assert compare_resume(f"{root}/undisturbed", f"{root}/chain") == []
    sizes = [event["config"]["world_size"] for event in read(f"{root}/chain") if event["event"] == "start"]
    assert sizes[:3] == [3, 2, 1]


def test_a_spike_is_skipped_or_rolled_back_before_it_does_harm(runs, root):
    skipped, rolled = (outcome_of(runs, 1, how) for how in ("skip", "rollback"))
    assert skipped.losses == pytest.approx(plain_loop([*range(12), *range(13, 25)], **SPIKY), rel=1e-5)
    # back to the checkpoint of update 10, and on with batch 13: batches 10, 11 and 12 are left out
    assert rolled.losses == pytest.approx(plain_loop([*range(10), *range(13, 27)], **SPIKY), rel=1e-5)
    assert [outcome.extra["left_out"] for outcome in (skipped, rolled)] == [1, 3]
    for how in ("skip", "rollback"):  # the update before which it comes is at 12, before the cut at 14
        spikes = [event for event in read(f"{root}/{how}") if event["event"] == "spike"]
        assert {(spike["position"], spike["kind"], spike["action"]) for spike in spikes} == {(12, "spike", how)}
    # the cut after the spike and the resume changed nothing, nor did a second rank
    assert outcome_of(runs, 2, "skip").losses == skipped.losses


def test_a_comparison_names_what_it_can_and_says_what_it_cannot(runs, root, tmp_path):
    whole, resumed = read(f"{root}/undisturbed"), read(f"{root}/forgot-")
    assert_refused(
        [
            (lambda: compare_resume(whole, whole), ValueError, "never resumed"),
            (lambda: read_record(tmp_path), ValueError, "no record"),
        ]
    )
    differences = compare_resume(outcome_of(runs, 1, "no dropout"), resumed)  # an Outcome; two changes at once
    assert [sentence.split(" was ")[0] for sentence in differences[:2]] == ["dropout", "max_grad_norm"]

    assert compare_resume(whole, resumed) == []
    for lost, cause in CAUSES.items():
        [difference] = compare_resume(whole, read(f"{root}/forgot-{lost}"))
        assert cause in difference, lost
    start = [event for event in resumed if event["event"] == "start"][-1]
    norms = {name: "other" for name in start["state"] if "norm" in name and " / " not in name}
    broken = [{**event, "state": start["state"] | norms} if event is start else event for event in resumed]
    assert "3 of 12 tensors" in compare_resume(whole, broken)[0]
