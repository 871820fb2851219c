"""Checkpoints: whole or not there, loaded at other numbers of ranks, and what is damaged or does not fit is refused."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from refusals import assert_refused

from course_lib.checkpoints import CheckpointError, latest, load, save
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP says so where there are no ranks

SAVED_AT, END = 3, 6

# Another number of ranks adds the gradients' slices up in another order: up to 2e-7 was seen after three steps. Moments
# that are not loaded move the second loss by 1e-3, a step counter that starts again by 1e-2.
TOLERANCE = 1e-6


def sharded(seed: int = 0, dropout: float = 0.0) -> dict:
    """The tiny Llama under fully_shard, AdamW and a scheduler whose rate differs at each step."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    model = tiny_llama(seed=seed, layers=2, hidden=64)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, END)
    return dict(model=model, optimizer=optimizer, scheduler=scheduler)


def train(first: int, last: int, *, model, optimizer, scheduler) -> list[float]:
    losses = []
    for step in range(first, last):
        place = dict(rank=dist.get_rank(), world_size=dist.get_world_size())
        batch = sample_batch(step, global_batch=12, seq_len=32, **place)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over the bytes of the whole weights."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def resumed(folder: str, dropout: float) -> dict:
    run = sharded(seed=9, dropout=dropout)  # other weights, and other random numbers
    extra = load(folder, **run)
    return dict(extra=extra, weights=digest(run["model"]), losses=train(extra["step"], END, **run))


def three_ranks(folder: str) -> dict:
    """Save on the way and train to the end; then from the checkpoint to the end, with dropout and without."""
    run = sharded(dropout=0.1)
    torch.manual_seed(dist.get_rank())  # dropout differs from rank to rank
    losses = train(0, SAVED_AT, **run)
    path = save(folder, SAVED_AT, extra={"next": [SAVED_AT, "sentence"]}, **run)
    weights = digest(run["model"])
    losses += train(SAVED_AT, END, **run)
    return dict(path=path, weights=weights, losses=losses, again=resumed(folder, 0.1), calm=resumed(folder, 0.0))


def two_ranks(folder: str, damaged: str) -> dict:
    run = sharded(seed=9)
    before = digest(run["model"])
    with pytest.raises(CheckpointError) as refused:
        load(damaged, **run)
    return dict(resumed(folder, 0.0), refused=str(refused.value), untouched=digest(run["model"]) == before)


def test_saved_at_3_ranks_it_goes_on_bit_for_bit_at_3_and_holds_the_same_at_2_and_without_ranks(private_tmp, tmp_path):
    folder, damaged = tmp_path / "run", tmp_path / "damaged"
    first, *others = launch(three_ranks, str(folder), ranks=3, quiet=True, timeout=240).results
    assert sorted(os.listdir(folder)) == [".lock", "step-00000003"]
    assert first["losses"][0] > first["losses"][-1] + 0.1  # it learns something
    for result in (first, *others):
        assert result["path"] == folder / "step-00000003"
        assert result["again"]["losses"] == result["losses"][SAVED_AT:]
        assert result["again"]["extra"] == {"next": [3, "sentence"], "step": 3}

    shutil.copytree(folder, damaged)
    flip(damaged / "step-00000003" / "__2_0.distcp")  # one of the two ranks reads it
    results = launch(two_ranks, str(folder), str(damaged), ranks=2, quiet=True, timeout=240).results
    for result in results:
        assert result["weights"] == first["weights"]
        assert result["losses"] == pytest.approx(first["calm"]["losses"], rel=TOLERANCE)
        assert "__2_0.distcp" in result["refused"] == results[0]["refused"] and result["untouched"]

    model = tiny_llama(seed=9, layers=2, hidden=64)
    load(folder, model=model)
    assert digest(model) == first["weights"]


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}  # and files that are opened to be written


def killed_before_change(number: int) -> None:
    """SIGKILL to this process just before it changes something on the disk for the ``number``-th time."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_before_every_change(root: str, replace: bool) -> list:
    """Save step 2 beside step 1 in a process that is killed before its 1st, 2nd, 3rd … change of the disk.

    ``replace``: step 2 is there already. Returns what each kill left: the step that is loaded, the turn in which it was
    saved, how many unfinished folders there are, and the folder's names after another save.
    """
    dist.destroy_process_group()  # forked processes must not inherit its threads
    torch.set_num_threads(1)
    model = tiny_llama(layers=1, hidden=32)
    target = dict(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    save(f"{root}/before", 1, **target)
    if replace:
        save(f"{root}/before", 2, extra={"turn": "old"}, **target)
    left = []
    for number in range(1, 200):
        shutil.rmtree(f"{root}/now", ignore_errors=True)
        shutil.copytree(f"{root}/before", f"{root}/now")
        child = os.fork()
        if not child:
            try:
                killed_before_change(number)
                save(f"{root}/now", 2, extra={"turn": "new"}, keep=1, **target)
            finally:
                os._exit(0)
        ended = os.waitpid(child, 0)[1]
        extra = load(f"{root}/now", **target)  # every byte of it
        parts = [name for name in os.listdir(f"{root}/now") if ".part-" in name]
        save(f"{root}/now", 3, keep=1, **target)
        left.append(((extra["step"], extra.get("turn")), len(parts), sorted(os.listdir(f"{root}/now"))))
        if os.WIFEXITED(ended):
            break
    return left


@pytest.mark.parametrize("replace", [False, True])
def test_killed_before_any_change_of_the_disk_a_whole_checkpoint_is_found(replace, private_tmp, tmp_path):
    run = launch(killed_before_every_change, str(tmp_path), replace, ranks=1, quiet=True, timeout=200)
    found, unfinished, names = zip(*run.results[0], strict=True)
    old, new = (2, "old") if replace else (1, None), (2, "new")
    assert len(found) > 10 and set(found) == {old, new}
    assert list(found) == sorted(found, key=[old, new].index)  # once it is there, it stays
    assert max(unfinished) == 1 and unfinished[-1] == 0  # the window was hit
    assert all(each == [".lock", "step-00000003"] for each in names)  # the next save clears what was left


class NoRoom:
    """While this lasts, the files of one rank cannot grow: the system tells that just as it tells a full disk."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *error) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        dist.barrier()


def on_a_full_disk(root: str) -> dict:
    """What a save finds there."""
    run = sharded()
    save(root, 1, **run)
    # Room for the rank's own file, and not for its shards: at this size torch hides the OSError behind its own error.
    with NoRoom(rank=1, size=32_000), pytest.raises(CheckpointError) as refused:
        save(root, 2, **run)
    left = sorted(os.listdir(root))
    save(root, 2, **run)  # there is room again
    return dict(error=str(refused.value), left=left)


@pytest.mark.system
def test_a_full_disk_keeps_the_older_checkpoint_and_tells_every_rank(private_tmp, tmp_path):
    first, second = launch(on_a_full_disk, str(tmp_path), ranks=2, quiet=True, timeout=200).results
    assert f"rank 1: {os.strerror(errno.EFBIG)}" in first["error"] == second["error"]
    assert first["left"] == second["left"] == [".lock", "step-00000001"]


# From here on without ranks, with a model that is not sharded.


def small(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.BatchNorm1d(3))


def trained() -> dict:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(5, 4) * torch.arange(5)[:, None]).square().sum().backward()
    optimizer.step()
    return dict(model=model, optimizer=optimizer)


@pytest.fixture
def folder(tmp_path):
    """Steps 1 and 2 of a plain model."""
    for step in (1, 2):
        save(tmp_path / "run", step, **trained(), extra={"at": step})
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_buffers_optimizer_scheduler_and_random_numbers_come_back(tmp_path):
    model, optimizer = trained().values()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3])
    path = save(tmp_path, 7, model=model, optimizer=optimizer, scheduler=scheduler)
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
    again = small()
    adamw = torch.optim.AdamW(again.parameters(), lr=9.0)
    steps = torch.optim.lr_scheduler.MultiStepLR(adamw, milestones=[5])
    load(path, model=again, optimizer=adamw, scheduler=steps)
    assert drawn == [torch.rand(1).item(), random.random(), np.random.rand()]
    for here, there in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(here, there)
    for here, there in zip(again.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[there].items():
            assert torch.equal(adamw.state[here][key], value)
    assert adamw.param_groups[0]["lr"] == 0.1 and steps.milestones == scheduler.milestones


def test_an_optimizer_that_has_not_stepped_yet_is_saved_at_step_0(tmp_path):
    model, again = small(), small()
    optimizer, adamw = (torch.optim.AdamW(each.parameters()) for each in (model, again))
    save(tmp_path, 0, model=model, optimizer=optimizer)
    load(tmp_path, model=again, optimizer=adamw)
    assert [[moments["step"].item() for moments in each.state.values()] for each in (optimizer, adamw)] == [[0] * 4] * 2
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), small().parameters(), strict=True))


def test_the_newest_whole_ones_are_kept_and_found_and_damaged_ones_are_named(folder, capsys):
    shutil.copytree(folder / "step-00000002", folder / "step-00000004.part-0123abcd")
    shutil.copytree(folder / "step-00000002", folder / "step-00000003")
    (folder / "step-00000003" / "__0_0.distcp").write_bytes(b"short")
    (folder / "step-notes").mkdir()
    assert latest(folder) == folder / "step-00000002" and latest(folder / "step-notes") is None
    assert "step-00000003/__0_0.distcp" in capsys.readouterr().out
    save(folder, 4, **trained(), keep=3)
    # nothing unfinished is left, and no whole one was removed for the sake of the broken one
    assert names(folder) == [*(f"step-0000000{step}" for step in (1, 2, 3, 4)), "step-notes"]
    save(folder, 2, **trained(), keep=1)  # a run that went back
    assert names(folder) == [*(f"step-0000000{step}" for step in (2, 3, 4)), "step-notes"]


def test_what_is_damaged_is_refused_and_the_model_and_the_older_one_stay(folder, tmp_path):
    damages = [
        (lambda newest: flip(newest / "__0_0.distcp"), "__0_0.distcp"),
        (lambda newest: os.truncate(newest / "__0_0.distcp", 100), "__0_0.distcp"),
        (lambda newest: (newest / "rank-00000.pt").unlink(), "rank-00000.pt"),
        (lambda newest: flip(newest / "manifest"), "manifest"),
        (lambda newest: (newest / "manifest").unlink(), "step-00000002"),
    ]
    for number, (damage, fragment) in enumerate(damages):
        copy, model = tmp_path / f"copy-{number}", small()
        shutil.copytree(folder, copy)
        damage(copy / "step-00000002")
        before = digest(model)
        assert_refused([(partial(load, copy / "step-00000002", model=model), CheckpointError, fragment)])
        assert digest(model) == before
        # sizes do not show a flipped bit: it is told, so that nobody goes on from an older one unawares
        assert load(copy if number else copy / "step-00000001", model=model)["at"] == 1


class Evil:
    """A pickle that makes a folder when it is opened blindly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_is_unpickled_blindly(tmp_path):
    parts, mkdir = trained(), f"{os.mkdir.__module__}.mkdir"
    parts["optimizer"].param_groups[0]["lr"] = Evil(tmp_path / "owned")
    path = save(tmp_path / "rate", 1, **parts)
    scheduler = type("Scheduler", (), {"state_dict": lambda self: {"when": Evil(tmp_path / "owned")}})()
    assert_refused(
        [
            (partial(load, path, **parts), CheckpointError, mkdir),
            (partial(save, tmp_path / "when", 1, **trained(), scheduler=scheduler), CheckpointError, mkdir),
        ]
    )
    assert not (tmp_path / "owned").exists() and names(tmp_path / "when") == []


def test_another_model_is_refused_by_its_first_difference_and_so_is_a_second_save_at_once(folder, tmp_path):
    deeper = torch.nn.Sequential(*small(), torch.nn.Linear(3, 1))
    assert_refused(
        [
            (partial(load, folder, model=small(width=5)), CheckpointError, "[3, 5]"),
            (partial(load, folder, model=small()[:1]), CheckpointError, "'1.weight'"),
            (partial(load, folder, model=small().double()), CheckpointError, "float64"),
            (partial(load, folder, model=deeper), CheckpointError, "'2.weight'"),
            (partial(load, tmp_path / "nowhere", model=small()), CheckpointError, "nowhere"),
        ]
    )
    with FileLock(folder / ".lock"):
        assert_refused([(partial(save, folder, 3, **trained()), CheckpointError, str(folder))])
    assert names(folder) == ["step-00000001", "step-00000002"]
