"""A run that is interrupted and resumed, also on other numbers of ranks, against one that was not: equal bit for bit."""

from __future__ import annotations

import os
import resource
import shutil
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import checkpoints
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe.heartbeat import read_beats
from course_lib.observe.tracking import read as read_metrics
from course_lib.training.resumable import program as resumable
from course_lib.training.resumable.comparison import compare_resume, read_record
from course_lib.training.resumable.faults import FORGET, SPOILED_LOSS, spoiled
from course_lib.training.resumable.gradient_sums import sent_bytes, shards_of
from course_lib.training.resumable.journal import Journal, read, steps_that_count
from course_lib.training.resumable.state import warm_up_and_cosine

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = dict(global_batch=4, seq_len=16, layers=1, hidden=32)
HOW = dict(**SIZES, steps=8, save_every=2, warmup=2, lr=3e-3)
SPIKY = dict(**SIZES, steps=24, save_every=5, warmup=2, lr=1e-2, dropout=0.0, spoil_step=12)
CUT = 5  # one update more than is saved: it has to be done again


def on_every_rank(make) -> None:
    if dist.get_rank() == 0:
        make()
    dist.barrier()


def refused(**changes) -> str:
    try:
        resumable.train(**{**HOW, **changes})
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def four_ranks(root: str) -> dict:
    return {"chain": resumable.train(**HOW, checkpoint_dir=f"{root}/chain", stop_at=3)}


def two_ranks(root: str) -> dict:
    found = {"undisturbed": resumable.train(**HOW, checkpoint_dir=f"{root}/undisturbed")}
    found["chain"] = resumable.train(**HOW, checkpoint_dir=f"{root}/chain", stop_at=CUT)
    resumable.train(**HOW, checkpoint_dir=f"{root}/cut", stop_at=CUT)
    for lost in FORGET:
        on_every_rank(lambda lost=lost: shutil.copytree(f"{root}/cut", f"{root}/forgot-{lost}"))
        found[lost] = resumable.train(**HOW, checkpoint_dir=f"{root}/forgot-{lost}", forget=lost)
    found["all-reduce"] = resumable.train(**HOW, exact=False)
    found["skip"] = resumable.train(**SPIKY, on_spike="skip")
    watched = dict(
        heartbeat=f"{root}/beats", heartbeat_every=1.0, tracker=f"{root}/tracked", checkpoint_dir=f"{root}/watched"
    )
    found["watched"] = resumable.train(**HOW, **watched)
    found["full disk"] = full_disk(f"{root}/full")
    return found


def full_disk(folder: str) -> list:
    """Rank 0's files may not grow from here on, its journal included, until the last run."""
    resumable.train(**HOW, checkpoint_dir=folder, stop_at=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        size = os.path.getsize(f"{folder}/journal.jsonl") + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    full = resumable.train(**HOW, checkpoint_dir=folder, stop_at=7)
    kept = str(checkpoints.latest(folder))
    said = refused(checkpoint_dir=folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    return [full, os.path.basename(kept), said, resumable.train(**HOW, checkpoint_dir=folder)]


def one_rank(root: str) -> dict:
    found = {"chain": resumable.train(**HOW, checkpoint_dir=f"{root}/chain")}
    found["done"] = resumable.train(**HOW, checkpoint_dir=f"{root}/chain")
    found["no dropout"] = resumable.train(**{**HOW, "dropout": 0.0, "max_grad_norm": 1.0})
    for how in ("none", "skip", "rollback"):
        resumable.train(**SPIKY, on_spike=how, checkpoint_dir=f"{root}/{how}", stop_at=14)
        found[how] = resumable.train(**SPIKY, on_spike=how, checkpoint_dir=f"{root}/{how}")
    found["early rollback"] = resumable.train(**HOW, on_spike="rollback", checkpoint_dir=f"{root}/early")
    chain = dict(checkpoint_dir=f"{root}/chain")
    found["refused"] = {
        "diverged": refused(lr=1e30, on_spike="skip"),
        "rolled back for ever": refused(lr=1e30, on_spike="rollback", checkpoint_dir=f"{root}/diverged"),
        "seed": refused(seed=1, **chain),
        "not resumed": refused(resume=False, **chain),
        "model": refused(hidden=64, **chain),
        **{f"{name}={value}": refused(**{name: value}) for name, value, _ in WRONG},
    }
    return found


WRONG = [
    ("steps", 0, "steps=0: give a whole number"),
    ("save_every", 0, "save_every=0: give a whole number"),
    ("lr", -1.0, "lr=-1.0: give a learning rate"),
    ("lr", float("nan"), "lr=nan: give a learning rate"),
    ("dropout", 1.0, "dropout=1.0: give a share"),
    ("max_grad_norm", -1.0, "max_grad_norm=-1.0: give a number"),
    ("virtual_ranks", 3, "global_batch=4 does not divide into 3 equal shards"),
    ("on_spike", "panic", "on_spike='panic': choose one of 'none', 'skip', 'rollback'"),
    ("on_spike", "rollback", "on_spike='rollback' goes back to a checkpoint"),
    ("forget", "all", "forget='all': choose one of"),
]


def three_ranks() -> dict:
    return {
        "undisturbed": resumable.train(**HOW),
        "wrong": refused(virtual_ranks=2),
    }


@pytest.fixture(scope="module")
def root(private_tmp, tmp_path_factory):
    return str(tmp_path_factory.mktemp("resumable"))


@pytest.fixture(scope="module")
def runs(root):
    """By number of ranks, in the order in which they hand the folder "chain" on to each other."""
    found = {}
    for ranks, function in ((4, four_ranks), (2, two_ranks), (1, one_rank)):
        found[ranks] = launch(function, root, ranks=ranks, quiet=True, timeout=250)
    found[3] = launch(three_ranks, ranks=3, quiet=True, timeout=120)
    return found


def of(runs, ranks, name):
    """A run's outcome, the same on every rank."""
    first, *others = [result[name] for result in runs[ranks].results]
    assert all((one.losses, one.extra["fingerprint"]) == (first.losses, first.extra["fingerprint"]) for one in others)
    return first


def plain_loop(positions, *, clip=0.0, spoil=-1, saved_at=None, **how):
    """Losses of one process on whole batches, without dropout: a loop that knows nothing of shards, ranks or resumes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tiny_llama(layers=how["layers"], hidden=how["hidden"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=how["lr"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(how["warmup"], how["steps"]))
    losses = []
    for position in positions:
        batch = sample_batch(position, global_batch=how["global_batch"], seq_len=how["seq_len"])
        batch = spoiled(batch, 0) if position == spoil else batch
        loss = model(input_ids=batch, labels=batch).loss * (SPOILED_LOSS if position == spoil else 1)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return losses


def test_it_trains(runs):
    assert of(runs, 1, "no dropout").losses == pytest.approx(plain_loop(range(8), clip=1.0, **HOW), rel=1e-5)


def test_any_number_of_ranks_gives_the_same_bits(runs):
    two, three = of(runs, 2, "undisturbed"), of(runs, 3, "undisturbed")  # three ranks have 2, 1 and 1 of 4 shards
    assert two.losses == three.losses and two.extra["fingerprint"] == three.extra["fingerprint"]
    assert (two.wrapper, two.world_size, len(two.losses)) == ("LlamaForCausalLM", 2, 8)


def test_resumed_with_four_then_two_then_one_rank_it_is_equal_bit_for_bit(runs, root):
    whole, last = of(runs, 2, "undisturbed"), of(runs, 1, "chain")
    first = [of(runs, ranks, "chain").extra["first_step"] for ranks in (4, 2, 1)]
    assert first == [0, 2, 4]
    assert of(runs, 4, "chain").losses == whole.losses[:3] and of(runs, 2, "chain").losses == whole.losses[:5]
    assert last.losses == whole.losses and last.extra["fingerprint"] == whole.extra["fingerprint"]
    assert compare_resume(f"{root}/undisturbed", f"{root}/chain") == []
    sizes = [event["config"]["world_size"] for event in read(f"{root}/chain") if event["event"] == "start"]
    assert sizes == [4, 2, 1, 1]
    done = of(runs, 1, "done")  # nothing was left to do
    assert (done.losses, done.extra["first_step"], done.median_step) == (whole.losses, 8, 0.0)


def test_an_all_reduce_is_cheaper_and_nearly_equal(runs):
    exact, nearly = of(runs, 2, "undisturbed"), of(runs, 2, "all-reduce")
    assert nearly.losses == pytest.approx(exact.losses, rel=1e-5)
    assert nearly.extra["fingerprint"] != exact.extra["fingerprint"]
    numbers = sum(p.numel() for p in tiny_llama(layers=1, hidden=32).parameters()) + 1
    for outcome, exactly in ((exact, True), (nearly, False)):
        if outcome.wire_bytes is not None:
            told = sent_bytes(numbers, 2, 4, exact=exactly)
            assert told <= outcome.wire_bytes < told * 1.03  # gloo's headers
    assert exact.wire_bytes is None or exact.wire_bytes > 1.4 * nearly.wire_bytes


CAUSES = {
    "rng": "the random numbers were not restored at step 4: their streams stood at 4 and go on from 0",
    "data": "the data's position was not restored at step 4: it stood at batch 4 and goes on from 0",
    "scheduler": "the learning-rate schedule was not restored at step 4: it had counted 4 updates and counts from 0",
    "dropout": "dropout was 0.1 and is 0.0 since the resume at step 4: the losses part there (",
    "optimizer": "the optimizer's state did not come back at step 4: it began anew, without any of 36 tensors",
}


@pytest.mark.parametrize("lost", FORGET)
def test_what_a_resume_forgets_changes_the_losses_and_is_named(lost, runs, root):
    whole, resumed = of(runs, 2, "undisturbed"), of(runs, 2, lost)
    found = compare_resume(f"{root}/undisturbed", f"{root}/forgot-{lost}")
    assert resumed.losses[:4] == whole.losses[:4] and resumed.extra["first_step"] == 4
    if not lost:
        assert resumed.losses == whole.losses and found == []
        return
    parts = next(i for i in range(8) if resumed.losses[i] != whole.losses[i])
    assert parts == (5 if lost in ("scheduler", "optimizer") else 4)  # these two first act on the update
    assert len(found) == 1 and found[0].startswith(CAUSES[lost])
    assert f"the losses part {'at step 5' if parts == 5 else 'there'} (" in found[0]


def test_a_spike_is_skipped_or_rolled_back_before_it_does_harm(runs, root):
    spoilt, skipped, rolled = (of(runs, 1, how) for how in ("none", "skip", "rollback"))
    without = [*range(12), *range(13, 25)]
    assert skipped.losses == pytest.approx(plain_loop(without, **SPIKY), rel=1e-5)
    # back to the checkpoint of update 10, and on with batch 13: batches 10, 11 and 12 are left out
    assert rolled.losses == pytest.approx(plain_loop([*range(10), *range(13, 27)], **SPIKY), rel=1e-5)
    assert spoilt.losses == pytest.approx(plain_loop(range(24), spoil=12, **SPIKY), rel=1e-4)
    assert spoilt.losses[12] > 100
    harm = [
        bad - good for bad, good in zip(spoilt.losses[19:], skipped.losses[18:], strict=False)
    ]  # on the same batches
    assert len(harm) == 5 and min(harm) > 0.1
    assert [one.extra["left_out"] for one in (spoilt, skipped, rolled)] == [0, 1, 3]
    for how in ("none", "skip", "rollback"):  # the update before which it comes is at 12, before the cut at 14
        spikes = [event for event in read(f"{root}/{how}") if event["event"] == "spike"]
        assert {(one["position"], one["kind"], one["action"]) for one in spikes} == {(12, "spike", how)}
    # the cut after the spike and the resume changed nothing, nor did a second rank
    assert of(runs, 2, "skip").losses == skipped.losses


def test_a_save_before_the_first_update_changes_nothing(runs):
    assert of(runs, 1, "early rollback").losses == of(runs, 2, "undisturbed").losses


def test_it_can_be_watched_and_is_the_same_run(runs, root):
    watched = of(runs, 2, "watched")
    assert watched.losses == of(runs, 2, "undisturbed").losses
    beats = read_beats(f"{root}/beats")
    assert {rank: (beat.step, beat.ended) for rank, beat in beats.items()} == {0: (8, "done"), 1: (8, "done")}
    charts = read_metrics(f"{root}/tracked")
    for rank in range(2):
        told = {name: [value for _, value, _ in series] for name, series in charts[rank].items()}
        assert told["loss"] == pytest.approx(watched.losses)
        assert len(told["tokens_per_second"]) == len(told["memory_bytes"]) == len(told["learning_rate"]) == 8
    own = [[value for _, value, _ in charts[rank]["own_loss"]] for rank in range(2)]
    assert [(a + b) / 2 for a, b in zip(*own, strict=True)] == pytest.approx(watched.losses) and own[0] != own[1]


def test_a_full_disk_is_told_and_training_goes_on_to_its_last_save(runs):
    full, kept, said, later = runs[2].results[0]["full disk"]
    whole = of(runs, 2, "undisturbed")
    assert (full.losses, full.extra["failed_saves"], kept) == (whole.losses[:7], 2, "step-00000002")
    assert said.startswith("CheckpointError: step 8 was not saved in ") and "are free there" in said
    assert runs[2].results[1]["full disk"][2] == said
    assert later.losses == whole.losses and later.extra["fingerprint"] == whole.extra["fingerprint"]
    log = runs[2].logs[0]
    assert "step 4 was not saved in " in log and "Training goes on." in log
    assert "journal.jsonl: " in log and "the journal follows when there is room" in log


def test_wrong_input_is_one_sentence(runs):
    refused = runs[1].results[0]["refused"]
    for name, value, sentence in WRONG:
        assert refused[f"{name}={value}"].startswith(f"ValueError: {sentence}")
    assert refused["seed"].startswith("ValueError: seed=1: the checkpoint was trained with 0")
    assert "is there already: resume from it" in refused["not resumed"]
    assert "is of another model" in refused["model"]
    told = "RuntimeError: 4 spikes without progress between them, the last at step "
    assert refused["diverged"].startswith(told) and "is nan" in refused["diverged"]
    assert refused["rolled back for ever"].startswith(told)
    assert runs[3].results[2]["wrong"].startswith("ValueError: virtual_ranks=2 leaves 3 ranks without work")


def test_shards_are_neighbours_and_all_there():
    for world_size in (1, 2, 3, 4, 6):
        assert [v for rank in range(world_size) for v in shards_of(rank, world_size, 6)] == list(range(6))


def test_a_journal_that_was_cut_short_goes_on(tmp_path):
    journal = Journal(str(tmp_path), 0)
    journal.write("start", step=0)
    journal.write("step", step=0, loss=2.0)
    journal.write("step", step=1, loss=1.0)
    journal.close()
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 2, "lo')
    journal = Journal(str(tmp_path), 0, read(tmp_path))
    journal.write("start", step=1)
    journal.write("step", step=1, loss=0.5)
    journal.close()
    assert read(tmp_path) == journal.events and len(journal.events) == 5
    assert {step: event["loss"] for step, event in steps_that_count(journal.events).items()} == {0: 2.0, 1: 0.5}


def test_a_comparison_says_what_it_cannot_compare(runs, root, tmp_path):
    undisturbed = read(f"{root}/undisturbed")
    with pytest.raises(ValueError, match="was never resumed"):
        compare_resume(f"{root}/undisturbed", undisturbed)
    with pytest.raises(ValueError, match="has no record of a run"):
        read_record(tmp_path)
    resumed = read(f"{root}/forgot-rng")
    unsaved = [event for event in undisturbed if event["event"] != "saved"]
    assert compare_resume(unsaved, resumed)[0].startswith("step 4 was done with other random numbers (4 and 0): ")
    found = compare_resume(of(runs, 1, "no dropout"), resumed)  # an Outcome with its events; two changes at once
    assert [sentence.split(" was ")[0] for sentence in found[:2]] == ["dropout", "max_grad_norm"]


def test_a_comparison_without_a_cause_says_so(root, runs):
    whole, resumed = read(f"{root}/undisturbed"), read(f"{root}/forgot-")
    other = [
        {**event, "loss": event["loss"] + 1e-9} if event.get("step") == 6 and "loss" in event else event
        for event in resumed
    ]
    assert "look for what no record holds" in compare_resume(whole, other)[0]
    threads = [{**e, "config": {**e["config"], "threads": 2}} if e["event"] == "start" else e for e in other]
    assert compare_resume(whole, threads)[0].startswith("threads was 1 and is 2, whose kernels may round differently")
    broken = [
        {**e, "state": {k: v[::-1] if "norm" in k and " / " not in k else v for k, v in e["state"].items()}}
        if e["event"] == "start"
        else e
        for e in resumed
    ]
    assert compare_resume(whole, broken)[0].startswith("3 of 12 tensors of the model came back changed at step 4, ")
