"""Lab 7, exercise 1: checkpoints that survive SIGKILL at any moment, a power failure and a full disk."""

from __future__ import annotations

import gc
import operator
import os
import random
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from course_checks.harness import Contract, NotYet, fresh, fresh_seed, plain, returned, run_ranks
from course_checks.lab07.common import lab

KILLED, POWERLESS, FULL = "SIGKILL after change", "power failure after change", "disk full at byte"
LONGEST = 30  # seconds that a save may take before it counts as one that never ends
KEPT = 3.5  # checkpoints' worth of bytes that may stay: three, and a zip file grows with the digits of its step
HINTS = {
    "the name was on the disk before its bytes: flush and fsync before you rename": ("torn", POWERLESS),
    "it met a torn file: write under another name, and rename when the file is complete": ("torn", ""),
    "what is in several files is complete when all of them are, and no file sooner": ("state", "after change"),
    "remove an older one only when the new one is complete and has its name": ("lost", ""),
    "remove what killed saves left half written": ("bytes", "after change"),
    "remove older checkpoints": ("bytes", ""),
    "let the error out: who trains must know which checkpoint is the last": ("new", FULL),
    "flush and fsync before save() returns": ("new", POWERLESS),
    "compare the steps as numbers: as text, '9' comes after '10'": ("older", ""),
}  # each with the clause that does not hold, and the accident
Content = tuple[int, int, int]  # of a file: inode, bytes, time of its last change in ns
_content = operator.attrgetter("st_ino", "st_size", "st_mtime_ns")
_safe: set[Content] = set()  # what a power failure does not hurt


@dataclass
class _Run:
    """A run whose state has one shape, and its checkpoints in one folder."""

    checkpoints: Callable[..., Any]
    folder: str
    shape: tuple[int, int]
    seed: int
    one: int = 0  # bytes of one checkpoint
    newest: int | None = None  # the step that load() gave last
    about: str = ""  # the accident

    def state(self, step: int) -> dict[str, Any]:
        seed = self.seed + step
        adam = {"exp_avg": fresh(self.shape, seed, 1), "step": torch.tensor(step, dtype=torch.float64)}
        model = {"w": fresh(self.shape, seed), "b": fresh(self.shape[1:], seed, 2, dtype=torch.bfloat16)}
        optimizer = {"state": {0: adam, "0": {}}, "lr": step / 7, "fused": step % 2 == 0}
        return {"model": model, "optimizer": optimizer, "tokens": 2**53 + step}

    def holds(self, holds: bool, sentence: str, clause: str = "") -> None:
        hints = {hint: lambda f, c=c, a=a: f["clause"] == c and a in self.about for hint, (c, a) in HINTS.items()}
        Contract(hints, about=self.about).holds(holds, sentence, clause)

    def found(self) -> int | None:
        """The step that load() gives in a fresh object, its state compared with what was saved."""
        try:
            value = self.checkpoints(self.folder).load()
        except Exception as error:
            if not self.about:
                raise
            self.holds(False, f"load() raised {type(error).__name__} ({str(error)[:100]})", "torn")
        if value is None:
            return None
        step, state = returned(value, tuple, "what load() gives")
        step = returned(step, int, "the step that load() gives")
        told = f"load() gives step {step} with a state that is not the one saved with it"
        self.holds(_same(state, self.state(step)), told, "state")
        return step

    def judge(self, step: int, done: bool = True) -> None:
        """load() gives the step that was saved, or the one before if save() was not done."""
        found, sizes = self.found(), [size for _, size, _ in _files(self.folder).values()]
        told = f"save() of step {step} {'returned' if done else 'was cut short'}, and load() gives step {found}"
        told += "" if done else f"; it gave step {self.newest} before"
        clause = "lost" if not done else "new" if self.about or found is None else "older"
        self.holds(found == step or (found == self.newest and not done), told, clause)
        self.newest, self.one = found, self.one or sum(sizes)
        told = f"the folder holds {sum(sizes):,} bytes in {len(sizes)} files, and a checkpoint has {self.one:,}"
        self.holds(0 < sum(sizes) <= KEPT * self.one or not done, told, "bytes" if sizes else "")

    def survives(self, step: int, accident: str, at: int) -> bool:
        """Whether save() returned all the same."""
        self.about, state = f"{accident} {at}", self.state(step)
        done = _in_a_child(lambda: self.checkpoints(self.folder).save(step, state), self.folder, accident, at)
        self.judge(step, done)
        return done


@lab.exercise("A save that SIGKILL cannot hurt", importance=5, difficulty=4, minutes=30)
def survives(checkpoints: Callable[..., Any]) -> str:
    """Undisturbed first; then each save in a child that is killed, loses power or finds the disk full."""
    draw = random.Random(seed := fresh_seed())
    shapes = ((draw.randint(2, 5), draw.randint(3, 6)), (draw.randint(70, 90), draw.randint(90, 120)))
    with tempfile.TemporaryDirectory(prefix="lab07-") as root:
        runs = [_Run(checkpoints, f"{root}/{shape[0]}", shape, seed) for shape in shapes]
        for run in runs:  # the smaller state fits into a file's buffer
            for _ in range(2):  # no folder; an empty one
                run.holds(run.found() is None, "load() should return None where nothing is saved")
                os.makedirs(run.folder, exist_ok=True)
            kept = checkpoints(run.folder)
            for step in (draw.randint(3, 9), draw.randint(10, 19), *range(draw.randint(100, 109), 118)):
                kept.save(step, state := run.state(step))
                run.holds(_same(state, run.state(step)), "save() changes the state, with which training goes on")
                run.judge(step)
        return run_ranks(_accidents, runs, ranks=1, timeout=180.0).results[0]


def _accidents(runs: list[_Run]) -> str:
    """In a rank, whose process may be forked."""
    _note_syncs()
    ends = 0
    for run, accident in ((run, accident) for run in runs for accident in (KILLED, POWERLESS)):
        one, step = replace(run, folder=f"{run.folder}-{accident}", newest=None), 8
        for new in (1, 1, 0):  # from an empty folder; with older checkpoints; the newest step once more
            at = 1
            while not one.survives(step, accident, at):
                ends += 1
                at += 1 + at // 40  # each change; some, of a save with very many
                step += new * (at % 2)  # each twice: a run that resumed comes to the same step again
        for share in (0.5, 0.01):
            one.survives(step + 1, FULL, int(share * run.one))
    sizes = " and ".join(f"{run.one:,}" for run in runs)
    return f"checkpoints of {sizes} bytes; {ends} saves killed, half by a power failure; the disk was full {2 * len(runs)} times"


def _in_a_child(save: Callable[[], Any], folder: str, accident: str, at: int) -> bool:
    """Whether `save` returned, in a fork of this process."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        _child(save, folder, accident, at, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # what save() started
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        raise NotYet(f"{accident} {at}: your save() had not returned after {LONGEST} seconds")
    if told not in ("", "returned") and accident != FULL:
        raise NotYet(f"{accident} {at}: your save() raised {told}")
    return told == "returned"


def _child(save: Callable[[], Any], folder: str, accident: str, at: int, pipe: int) -> NoReturn:
    """Killed after change `at` (from 1) of a name, size or time in the folder; FULL: no file grows beyond `at` bytes."""
    os.setsid()
    signal.alarm(LONGEST)
    changes, seen, told = 0, _files(folder), "returned"
    _safe.update(seen.values())

    def die() -> NoReturn:
        for path, content in _files(folder).items():
            if accident == POWERLESS and content not in _safe:
                os.truncate(path, content[1] // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(_frame: Any, event: str, _function: Any) -> None:  # before and after each C function, inside torch too
        nonlocal changes, seen
        if event.startswith("c_") and (now := _files(folder)) != seen:
            changes, seen = changes + 1, now
            if changes == at and accident != FULL:
                die()

    try:
        if accident == FULL:
            resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
        threading.setprofile(watch)
        sys.setprofile(watch)
        save()
    except BaseException as error:  # whatever it is, the parent judges it
        told = f"{type(error).__name__}: {str(error)[:300]}"
    sys.setprofile(None)
    os.write(pipe, told.encode())
    die()


def _files(folder: str) -> dict[str, Content]:
    """What each file in a folder holds, hidden ones and those in sub-folders too."""
    found: dict[str, Content] = {}
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if entry.is_dir(follow_symlinks=False):
            found |= _files(entry.path)
        elif entry.is_file(follow_symlinks=False):
            found[entry.path] = _content(entry.stat())
    return found


def _note_syncs() -> None:
    """From now on this process, which soon ends, notes what os.fsync and os.fdatasync make safe."""

    def noting(file: Any, real: Callable[..., Any] = os.fsync) -> None:
        real(file)
        _safe.add(_content(os.fstat(file if isinstance(file, int) else file.fileno())))

    syncs = (os.fsync, getattr(os, "fdatasync", os.fsync))
    gc.unfreeze()  # a rank's modules are frozen, and would not be found
    for names in gc.get_referrers(*syncs):  # every module's and every notebook's name for it
        if isinstance(names, dict):
            names |= {name: noting for name, value in names.items() if value is syncs[0] or value is syncs[1]}
    gc.freeze()


def _same(one: Any, saved: Any) -> bool:
    if isinstance(saved, dict):
        return isinstance(one, dict) and one.keys() == saved.keys() and all(_same(one[k], saved[k]) for k in saved)
    if isinstance(saved, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == saved.dtype and torch.equal(one, saved)
    return type(plain(one)) is type(saved) and plain(one) == saved
