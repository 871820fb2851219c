"""Twenty kills: a training run on real ranks is ended by SIGKILL again and again, at random moments, and resumed.

Every second kill takes one rank, the others take all; a few come while the ranks start, load or save. After each, the
newest checkpoint is read through to its last byte, and the next launch goes on from it. At the end the losses and every
tensor are held against those of a run that nobody disturbed, bit for bit.

    python benchmarks/failures.py [--kills N] [--ranks N] [--seed N]
"""

from __future__ import annotations

import argparse
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

HOW: dict[str, Any] = dict(global_batch=8, seq_len=64, layers=2, hidden=64, save_every=5, virtual_ranks=4, warmup=10)


class Striker(threading.Thread):
    """Ends one rank, or all, after ``steps`` new steps and a moment more; notes when the run was at work again."""

    def __init__(self, folder: Path, rng: random.Random, everybody: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.everybody = folder, everybody
        self.steps, self.moment, self.choice = rng.randrange(10), rng.uniform(0, 0.1), rng.random()
        if not self.steps:
            self.moment = rng.uniform(0, 1.5)  # it may not have come to its first step
        self.begun, self.back, self.struck = time.monotonic(), None, threading.Event()
        self.lines = len(events(folder, "step"))

    def run(self) -> None:
        while self.steps and (done := len(events(self.folder, "step")) - self.lines) < self.steps:
            if done and self.back is None:
                self.back = time.monotonic() - self.begun
            time.sleep(0.005)
        if self.steps and self.back is None:
            self.back = time.monotonic() - self.begun
        time.sleep(self.moment)
        while not (found := ranks_running()):
            time.sleep(0.005)
        for process in found if self.everybody else [found[int(self.choice * len(found))]]:
            try:
                process.kill()
                self.struck.set()
            except psutil.NoSuchProcess:
                continue


def ranks_running() -> list[psutil.Process]:
    servers = {
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in servers]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    from course_lib.training.resumable.journal import read

    return [event for event in read(folder) if event["event"] == kind]


def kill_once(folder: Path, number: int, rng: random.Random, ranks: int, steps: int) -> dict[str, Any]:
    """One launch that is ended by SIGKILL; what was done, what is whole, and how soon it had been at work."""
    from course_lib import checkpoints
    from course_lib.launch import RankFailed, launch
    from course_lib.training.resumable import program as resumable
    from course_lib.training.resumable.journal import read, steps_that_count

    lives = len(events(folder, "start"))
    striker = Striker(folder, rng, everybody=number % 2 == 1)
    striker.start()
    try:
        launch(resumable.train, ranks=ranks, quiet=True, timeout=300, steps=steps, checkpoint_dir=str(folder), **HOW)
    except RankFailed:
        assert striker.struck.is_set()
    else:
        raise RuntimeError(f"The run was over before kill {number + 1}: give it more steps.")
    finally:
        striker.join(5)
    newest = checkpoints.latest(folder, tell=lambda _: None)
    whole = 0 if newest is None else checkpoints.verify(newest).step  # every byte of it is read
    done = max(steps_that_count(read(folder)), default=-1) + 1
    started = len(events(folder, "start")) > lives  # else it had done nothing yet that could be lost
    return {
        "who": "all ranks" if striker.everybody else "one rank",
        "done": done,
        "whole": whole,
        "lost": done - whole if started else 0,
        "broken": sum(bool(one.problem) and ".part-" not in one.path.name for one in checkpoints.survey(folder)),
        "saving": folder.exists() and any(".part-" in path.name for path in folder.iterdir()),
        "back": striker.back,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from course_lib.launch import launch
    from course_lib.training.resumable import program as resumable

    steps, rng = 10 * options.kills, random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, kills = Path(name, "run"), []
        undisturbed = launch(resumable.train, ranks=options.ranks, quiet=True, timeout=900, steps=steps, **HOW).results[
            0
        ]
        print(f"{steps} steps on {options.ranks} ranks, a checkpoint every {HOW['save_every']}\n")
        print("kill  who        steps done  newest whole  lost  while saving  at work again after")
        for number in range(options.kills):
            kill = kill_once(folder, number, rng, options.ranks, steps)
            kills.append(kill)
            back = "before its first step" if kill["back"] is None else f"{kill['back']:.2f} s"
            print(
                f"{number + 1:4}  {kill['who']:9}  {kill['done']:10}  {kill['whole']:12}  {kill['lost']:4}  "
                f"{'yes' if kill['saving'] else '':12}  {back}",
                flush=True,
            )
        resumed = launch(
            resumable.train, ranks=1, quiet=True, timeout=900, steps=steps, checkpoint_dir=str(folder), **HOW
        )
        last = resumed.results[0]
        starts = [event["step"] for event in events(folder, "start")]
    same = last.losses == undisturbed.losses and last.extra["fingerprint"] == undisturbed.extra["fingerprint"]
    lost, seconds = [kill["lost"] for kill in kills], [kill["back"] for kill in kills if kill["back"] is not None]
    broken = sum(kill["broken"] for kill in kills)
    print(f"\nlost steps: median {median(lost):g}, most {max(lost)} of {HOW['save_every']} between two checkpoints")
    print(f"seconds from launch to the first new step: median {median(seconds):.2f}, most {max(seconds):.2f}")
    print(f"killed while saving: {sum(kill['saving'] for kill in kills)}; checkpoints that were broken: {broken}")
    print(f"resumes that loaded a checkpoint: {sum(step > 0 for step in starts)} of {len(starts)} starts")
    print(
        f"losses and tensors after the last resume, on 1 rank, against the undisturbed run: {'equal' if same else 'NOT EQUAL'}"
    )
    return 0 if same and not broken and max(lost) <= HOW["save_every"] else 1


if __name__ == "__main__":
    sys.exit(main())
