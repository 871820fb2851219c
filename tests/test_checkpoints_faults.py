"""A save that ends in the middle: killed at any moment, or on a full disk. The older checkpoint is whole and found."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import checkpoints
from course_lib.checkpoints import CheckpointError, sharded_state
from course_lib.checkpoints.errors import reason
from course_lib.launch import RankFailed, launch
from course_lib.models import tiny_llama

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHAPE = dict(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64)
KINDS = ["fsdp", *(["zero2"] if importlib.util.find_spec("deepspeed") else [])]
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}  # and files that are opened to be written


def target_of(kind: str) -> dict:
    torch.set_num_threads(1)
    model = tiny_llama(**SHAPE)
    if kind == "zero2":
        from course_lib.training.sharded.zero_config import zero_config
        from course_lib.training.sharded.zero_engine import initialize

        return dict(engine=initialize(model, zero_config(2, ranks=dist.get_world_size(), global_batch=6)))
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return dict(model=model, optimizer=torch.optim.AdamW(model.parameters()))


def after_changes(number: int, then) -> None:
    """Call ``then`` just before this process changes something on the disk for the ``number``-th time."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            seen += 1
            if seen == number:
                then()

    sys.addaudithook(hook)


def killed_before_every_change(root: str, again: bool) -> list:
    """Save step 2 beside step 1 in a process that is killed before its 1st, 2nd, 3rd … change of the disk.

    ``again``: step 2 is there already and is replaced. Returns what each kill left: what ``latest`` found and whether
    every byte of it is right.
    """
    dist.destroy_process_group()  # forked processes must not inherit its threads
    target = target_of("fsdp")
    checkpoints.save(f"{root}/before", 1, **target)
    if again:
        checkpoints.save(f"{root}/before", 2, extra={"turn": "old"}, **target)
    left = []
    for number in range(1, 200):
        shutil.rmtree(f"{root}/now", ignore_errors=True)
        shutil.copytree(f"{root}/before", f"{root}/now")
        child = os.fork()
        if not child:
            try:
                after_changes(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
                checkpoints.save(f"{root}/now", 2, extra={"turn": "new"}, keep=1, **target)
            finally:
                os._exit(0)
        ended = os.waitpid(child, 0)[1]
        said: list[str] = []
        found = checkpoints.latest(f"{root}/now", tell=said.append)
        told = checkpoints.verify(found)
        parts = [name for name in os.listdir(f"{root}/now") if ".part-" in name]
        left.append((told.step, told.extra.get("turn"), bool(said), len(parts)))
        if os.WIFEXITED(ended):
            break
    checkpoints.save(f"{root}/now", 3, keep=1, **target)
    extra = checkpoints.load(f"{root}/now", **target)
    return [left, sorted(os.listdir(f"{root}/now")), extra]


@pytest.fixture(scope="module")
def kills(private_tmp, tmp_path_factory):
    return {
        again: launch(
            killed_before_every_change, str(tmp_path_factory.mktemp("kills")), again, ranks=1, quiet=True, timeout=200
        ).results[0]
        for again in (False, True)
    }


@pytest.mark.parametrize("again", [False, True])
def test_killed_before_any_change_of_the_disk_a_whole_checkpoint_is_found(again, kills):
    left, names, extra = kills[again]
    steps = [(step, turn) for step, turn, _, _ in left]
    old, new = (2, "old") if again else (1, None), (2, "new")
    assert len(left) > 10 and set(steps) == {old, new}
    assert steps == sorted(steps, key=[old, new].index)  # once it is there, it stays
    unfinished = [parts for _, _, _, parts in left]
    assert max(unfinished) >= 1 and unfinished[-1] == 0  # the window was hit
    assert names == [".lock", "step-00000003"] and extra == {"step": 3}  # the next save clears what was left


def test_what_was_skipped_is_named(kills):
    assert any(said for step, _, said, _ in kills[False][0] if step == 1)


def save_until_killed(root: str, kind: str, victim: int, seed: int) -> None:
    target = target_of(kind)
    checkpoints.save(root, 1, **target)

    def end() -> None:
        time.sleep(random.Random(seed).uniform(0.02, 0.5))
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        threading.Thread(target=end, daemon=True).start()
    for step in range(2, 10_000):
        checkpoints.save(root, step, **target)


def load_all(root: str) -> dict[str, int]:
    """The step of each folder's newest whole checkpoint, loaded at another number of ranks."""
    targets = {kind: target_of(kind) for kind in KINDS}
    names = sorted(os.listdir(root))
    return {name: checkpoints.load(f"{root}/{name}", **targets[name.split("-")[0]])["step"] for name in names}


def test_ranks_killed_while_saving_leave_one_that_loads(private_tmp, tmp_path):
    newest = {}
    for seed in range(5):
        folder = tmp_path / f"{KINDS[seed % 4 // 3 * (len(KINDS) - 1)]}-{seed}"
        with pytest.raises(RankFailed, match="SIGKILL|killed|signal"):
            kind = folder.name.split("-")[0]
            launch(save_until_killed, str(folder), kind, seed % 2, seed, ranks=2, quiet=True, timeout=60)
        told = checkpoints.verify(checkpoints.latest(folder, tell=lambda _: None))
        assert told.world_size == 2 and told.step >= 1
        newest[folder.name] = told.step
    assert launch(load_all, str(tmp_path), ranks=1, quiet=True, timeout=120).results == [newest]


def on_a_full_disk(root: str) -> list[str]:
    """Rank 1's files may not grow beyond 20 kB, which the system tells just as it tells a full disk."""
    said = []
    for kind in KINDS:
        target, folder = target_of(kind), f"{root}/{kind}"
        checkpoints.save(folder, 1, **target)
        saves = [checkpoints.save]
        if kind == "fsdp":
            saves.append(lambda *args, **kwargs: checkpoints.save_async(*args, **kwargs).result())
        for save in saves:
            if dist.get_rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            try:
                save(folder, 2, **target)
                said.append("saved")
            except CheckpointError as error:
                time.sleep(0.2 * dist.get_rank())  # rank 0 is in the next save by now
                said.append(f"{sorted(os.listdir(folder))}: {error}")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert checkpoints.load(folder, **target) == {"step": 1}
        checkpoints.save(folder, 2, **target)  # there is room again
    return said


def test_a_full_disk_keeps_the_older_one_and_tells_every_rank(private_tmp, tmp_path):
    first, second = launch(on_a_full_disk, str(tmp_path), ranks=2, quiet=True, timeout=120).results
    assert first == second and len(first) == len(KINDS) + 1
    for sentence in first:
        assert sentence.startswith("['.lock', 'step-00000001']: step 2 was not saved in ")
        assert f"rank 1: {os.strerror(errno.EFBIG)} (" in sentence and "GB are free there" in sentence


def without_room_for_the_random_numbers(root: str) -> tuple[str, int, list[str]]:
    """Rank 1 fails before anything is written in the background. Returns (error, writers that began, what is left)."""
    target, begun, prepare = target_of("fsdp"), [], sharded_state.Writer.prepare_local_plan

    def prepare_late(writer, plan):
        begun.append(writer)
        time.sleep(0.2)
        return prepare(writer, plan)

    sharded_state.Writer.prepare_local_plan = prepare_late
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save_async(root, 1, **target).result()
    time.sleep(0.4)
    return str(caught.value), len(begun), os.listdir(root)


def test_no_thread_writes_after_a_rank_has_failed(private_tmp, tmp_path):
    first, second = launch(without_room_for_the_random_numbers, str(tmp_path), ranks=2, quiet=True, timeout=60).results
    assert first == second and first[1:] == (0, [".lock"])
    assert f"rank 1: {os.strerror(errno.EFBIG)} (" in first[0]


def test_a_full_disk_has_its_own_words(tmp_path):
    hidden = RuntimeError("unexpected pos 704 vs 598")
    hidden.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert reason(hidden, tmp_path / "not there yet").startswith("the disk is full (")
    assert reason(RuntimeError("two\nlines"), tmp_path).startswith("lines (")
