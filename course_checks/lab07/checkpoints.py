"""Lab 7, exercise 5: a checkpoint that survives SIGKILL at any moment, a power failure and a full disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from course_checks.harness import NotYet, plain, run_ranks
from course_checks.lab07.common import TIMEOUT, lab
from course_checks.lab07.killing import KILLED, Deed, in_a_child, noting_what_is_synced, used_bytes

OLDER, NEWER, LATER = 9, 10, 100  # as text "9" comes after "10" and "100"
ELEMENTS = 6000  # of each of three tensors: more than one buffer full
MOST_MOMENTS = 60  # kills in one save; a save that does more than this to files is killed at 60 of its moments
KEPT = 3  # checkpoints' worth of bytes that may stay in the folder


@lab.exercise("A checkpoint that survives SIGKILL", importance=5, difficulty=4, minutes=35)
def survives(save: Callable[..., Any], load: Callable[..., Any]) -> str:
    """A child is killed before each thing that it does to a file; then without power; then the disk is full."""
    with tempfile.TemporaryDirectory(prefix="lab07-") as nowhere:  # a stub is known here, without a launch
        _nothing_there(load, Path(nowhere, "runs"))
    run = run_ranks(_survives, save, load, ranks=1, timeout=TIMEOUT)
    told = run.results[0]
    return (
        f"{told['kills']} children killed, each before another thing that it did to a file, and {told['failures']} power "
        f"failures: {told['newest']} times the newest came back, {told['before']} times the one before, never a torn one; "
        f"a full disk left the older one; at most {told['bytes']:,} bytes in the folder, for checkpoints of {told['one']:,}"
    )


def _nothing_there(load: Callable[..., Any], folder: Path) -> None:
    if load(str(folder)) is not None:
        raise NotYet("load() of a folder that does not exist yet should return None: the run begins")
    folder.mkdir()
    if load(str(folder)) is not None:
        raise NotYet("load() of an empty folder should return None: the run begins")


def made(step: int) -> dict[str, Any]:
    """The state of a run at a step: each value says whose it is."""
    torch.manual_seed(step)
    return {
        "model": {"w": torch.randn(ELEMENTS), "b": torch.full((3,), float(step))},
        "optimizer": {"m": torch.randn(ELEMENTS), "v": torch.rand(ELEMENTS)},
        "rng": torch.get_rng_state(),
        "position": 8 * step,
    }


def _survives(save: Callable[..., Any], load: Callable[..., Any]) -> dict[str, int]:
    root = Path(tempfile.mkdtemp(prefix="lab07-"))
    try:
        one = _plain(save, load, root)
        with noting_what_is_synced():
            told = _killed(save, load, root, one)
        _full_disk(save, load, root, one)
        return told | {"one": one}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _plain(save: Callable[..., Any], load: Callable[..., Any], root: Path) -> int:
    """Saving and loading with nothing in the way; the bytes of one checkpoint."""
    folder = root / "plain"
    one = 0
    for step in (OLDER, NEWER, LATER):
        save(str(folder), step, made(step))
        one = one or used_bytes(folder)
        if not one:
            raise NotYet(f"save() of step {step} wrote no file into its folder")
        found = _loaded(
            load, folder, f"after saves of steps {OLDER}, {NEWER} and {LATER} one after another (now: {step})"
        )
        if found != step:
            raise NotYet(
                f"steps {OLDER}, {NEWER} and {LATER} were saved one after another, and after step {step} load() gives step "
                f"{found}: compare the steps as numbers; as text '9' comes after '100'"
            )
    for step in range(LATER + 1, LATER + 9):
        save(str(folder), step, made(step))
    _not_too_much(folder, one, "eleven saves")
    return one


def _killed(save: Callable[..., Any], load: Callable[..., Any], root: Path, one: int) -> dict[str, int]:
    """Each moment of a save is the last one of its child; what is found then is the newest or the one before."""
    told = {"kills": 0, "failures": 0, "newest": 0, "before": 0, "bytes": 0}
    for power in (False, True):
        folder = root / f"killed-{power}"
        folder.mkdir()
        save(str(folder), OLDER, made(OLDER))
        step = last = OLDER
        events = _moments(save, root)
        for at in [*_spread(events), None]:
            if at is None and not power:
                continue
            step += 1
            deed = in_a_child(lambda: save(str(folder), step, made(step)), folder, kill_at=at, power=power)  # noqa: B023
            how = "without power" if power else "killed"
            moment = f"a save {how} at moment {at} of {events}" if at is not None else "power lost just after a save"
            if deed.code == 0:  # it did less to files this time, and was done before
                last = step
                continue
            if deed.code != KILLED:
                _done(deed)
            found = _loaded(load, folder, moment, power=power)
            if found not in (last, step):
                raise NotYet(_lost(found, last, step, moment))
            told["failures" if power else "kills"] += 1
            told["newest" if found == step else "before"] += 1
            told["bytes"] = max(told["bytes"], used_bytes(folder))
            last = found
        _not_too_much(folder, one, f"{step - OLDER} interrupted saves")
    return told


def _moments(save: Callable[..., Any], root: Path) -> int:
    """How many things a save does to files when an older checkpoint is there."""
    folder = root / "counting"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save(str(folder), OLDER, made(OLDER))
    save(str(folder), NEWER, made(NEWER))
    deed = in_a_child(lambda: save(str(folder), LATER, made(LATER)), folder)
    _done(deed)
    return deed.events


def _spread(events: int) -> list[int]:
    if events <= MOST_MOMENTS:
        return list(range(events))
    return sorted({round(k * (events - 1) / (MOST_MOMENTS - 1)) for k in range(MOST_MOMENTS)})


def _done(deed: Deed) -> None:
    """The child came to its end without an error."""
    if deed.code == 2:
        raise NotImplementedError
    if deed.code:
        raise NotYet(f"your save() raised {deed.said[:300] or f'nothing, and ended with exit code {deed.code}'}")


def _loaded(load: Callable[..., Any], folder: Path, moment: str, *, power: bool = False) -> int | None:
    """The step that load() finds, its state compared with what was saved."""
    try:
        value = load(str(folder))
    except Exception as error:
        torn = "its bytes were not on the disk when its name was: fsync before you rename" if power else ""
        raise NotYet(
            f"{moment}: load() raised {type(error).__name__} ({' '.join(str(error).split())[:120]}). It met a torn file"
            + (f"; {torn}" if power else ". Write under another name, and rename when the file is complete")
        ) from error
    if value is None:
        return None
    value = plain(value)
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], int):
        raise NotYet(f"load() should return (step, state), or None where there is no checkpoint, not {str(value)[:80]}")
    step, state = value
    if not _same(state, made(step)):
        wrong = [key for key in made(step) if not isinstance(state, dict) or not _same(state.get(key), made(step)[key])]
        raise NotYet(
            f"{moment}: load() gives step {step}, and of its state {', '.join(wrong)} is not what was saved with that step: "
            "a checkpoint that is written in several files is there when all of them are, and not one file sooner"
        )
    return step


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in other)
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _lost(found: int | None, last: int, step: int, moment: str) -> str:
    if found is None:
        return (
            f"{moment}: no checkpoint is left, and there was one of step {last} before. Remove an older one only when the new "
            "one is complete and has its name"
        )
    return f"{moment}: load() gives step {found}; it should be {step}, or {last}, which it found before this save"


def _not_too_much(folder: Path, one: int, after: str) -> None:
    if (used := used_bytes(folder)) > (KEPT + 0.5) * one:
        names = sorted(path.name for path in folder.rglob("*") if path.is_file())
        raise NotYet(
            f"after {after} the folder holds {used:,} bytes in {len(names)} files ({', '.join(names[:4])}, …), and one checkpoint "
            f"has {one:,}: remove older checkpoints and what killed saves left half written, so that at most {KEPT} are there"
        )


def _full_disk(save: Callable[..., Any], load: Callable[..., Any], root: Path, one: int) -> None:
    """The kernel refuses to write more than a part of the file: the error comes out, the older checkpoint stays."""
    folder = root / "full"
    folder.mkdir()
    save(str(folder), OLDER, made(OLDER))
    for share in (0.5, 0.01):
        deed = in_a_child(lambda: save(str(folder), NEWER, made(NEWER)), folder, room=int(one * share))
        moment = f"a disk with room for {share:.0%} of a checkpoint"
        found = _loaded(load, folder, moment)
        if found != OLDER:
            raise NotYet(
                _lost(found, OLDER, NEWER, moment) if found is None else f"{moment}: load() gives step {found}"
            )
        if deed.code == 0:
            raise NotYet(
                f"{moment}: save() returned as if all were well. Let the error out: who trains must know that the last "
                f"checkpoint is of step {OLDER}"
            )
    for step in range(NEWER, NEWER + 4):
        save(str(folder), step, made(step))
    if (found := _loaded(load, folder, "room again after a full disk")) != NEWER + 3:
        raise NotYet(f"room again after a full disk: step {NEWER + 3} was saved, and load() gives {found}")
    _not_too_much(folder, one, "a full disk and four saves")
