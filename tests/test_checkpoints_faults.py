"""A save that ends in the middle: killed at any moment, or on a full disk. The older checkpoint is whole and found."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import checkpoints
from course_lib.checkpoints import CheckpointError
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.training.resumable import program as resumable

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHAPE = dict(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64)
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}  # and files that are opened to be written


def sharded() -> dict:
    """A model and its optimizer; sharded where there are ranks."""
    torch.set_num_threads(1)
    model = tiny_llama(**SHAPE)
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return dict(model=model, optimizer=torch.optim.AdamW(model.parameters()))


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

    ``replace``: step 2 is there already. Returns what each kill left: the step that ``latest`` found, the turn in which
    it was saved, whether something was named as unfinished, and how many unfinished folders there are.
    """
    dist.destroy_process_group()  # forked processes must not inherit its threads
    target = sharded()
    checkpoints.save(f"{root}/before", 1, **target)
    if replace:
        checkpoints.save(f"{root}/before", 2, extra={"turn": "old"}, **target)
    left = []
    for number in range(1, 200):
        shutil.rmtree(f"{root}/now", ignore_errors=True)
        shutil.copytree(f"{root}/before", f"{root}/now")
        child = os.fork()
        if not child:
            try:
                killed_before_change(number)
                checkpoints.save(f"{root}/now", 2, extra={"turn": "new"}, keep=1, **target)
            finally:
                os._exit(0)
        ended = os.waitpid(child, 0)[1]
        named: list[str] = []
        manifest = checkpoints.verify(checkpoints.latest(f"{root}/now", tell=named.append))  # every byte of it
        parts = [name for name in os.listdir(f"{root}/now") if ".part-" in name]
        left.append((manifest.step, manifest.extra.get("turn"), bool(named), len(parts)))
        if os.WIFEXITED(ended):
            break
    checkpoints.save(f"{root}/now", 3, keep=1, **target)
    return [left, sorted(os.listdir(f"{root}/now")), checkpoints.load(f"{root}/now", **target)]


@pytest.mark.parametrize("replace", [False, True])
def test_killed_before_any_change_of_the_disk_a_whole_checkpoint_is_found(replace, private_tmp, tmp_path):
    run = launch(killed_before_every_change, str(tmp_path), replace, ranks=1, quiet=True, timeout=200)
    left, names, extra = run.results[0]
    found = [(step, turn) for step, turn, _, _ in left]
    old, new = (2, "old") if replace else (1, None), (2, "new")
    assert len(left) > 10 and set(found) == {old, new}
    assert found == sorted(found, key=[old, new].index)  # once it is there, it stays
    unfinished = [parts for _, _, _, parts in left]
    assert max(unfinished) >= 1 and unfinished[-1] == 0  # the window was hit
    assert replace or any(named for step, _, named, _ in left if step == 1)
    assert names == [".lock", "step-00000003"] and extra == {"step": 3}  # the next save clears what was left


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
    """What a save in the background and a whole training find there."""
    target = sharded()
    checkpoints.save(root, 1, **target)
    with NoRoom(rank=1, size=20_000):
        try:
            checkpoints.save_async(root, 2, **target).result()
        except CheckpointError as refused:
            error = str(refused)
    assert sorted(os.listdir(root)) == [".lock", "step-00000001"]
    dist.barrier()
    checkpoints.save(root, 2, **target)  # there is room again

    options = dict(steps=8, save_every=2, global_batch=4, seq_len=16, layers=1, hidden=32, warmup=2, lr=3e-3)
    folder = f"{root}/training"
    whole = resumable.train(**options)
    resumable.train(**options, checkpoint_dir=folder, stop_at=3)
    with NoRoom(rank=0, size=os.path.getsize(f"{folder}/journal.jsonl") + 100):  # nor for the journal
        full = resumable.train(**options, checkpoint_dir=folder, stop_at=7)
        kept = os.path.basename(checkpoints.latest(folder))
    later = resumable.train(**options, checkpoint_dir=folder)
    return dict(error=error, whole=whole, full=full, kept=kept, later=later)


@pytest.mark.system
def test_a_full_disk_keeps_the_older_checkpoint_tells_every_rank_and_training_goes_on(private_tmp, tmp_path):
    first, second = launch(on_a_full_disk, str(tmp_path), ranks=2, quiet=True, timeout=200).results
    assert f"rank 1: {os.strerror(errno.EFBIG)}" in first["error"] == second["error"]
    whole, full, later = (first[name] for name in ("whole", "full", "later"))
    assert full.losses == whole.losses[:7] and full.extra["failed_saves"] == 2 and first["kept"] == "step-00000002"
    assert later.losses == whole.losses and later.extra["fingerprint"] == whole.extra["fingerprint"]
