"""The watchdog on real ranks: no false alarm in a healthy run, and how soon a hang is told.

1. A healthy run of the tiny Llama on 2 DDP ranks, --seconds long, with one step of 6 times the median in its middle.
   No alarm may come. Beside it, what a rule with a fixed limit of 3 median steps would have cried.
2. --hangs planted hangs on random ranks, steps and phases of one run, each of which goes on after a while: the time from the
   beginning of the hang to the alarm, in heartbeats (median, worst), and whether the right rank and phase were named.
3. What a beat and a metric cost the training loop: `Heartbeat.beat`, TensorBoard's files, W&B's offline files.

    python benchmarks/watchdog.py [--seconds 300] [--hangs 10] [--every 1.0]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

SLOW, PAUSE = 6.0, 3.0  # medians of the slow step; heartbeats that a planted hang lasts
PHASES = ("data", "forward", "backward", "optimizer")


def train(
    folder: str, *, every: float, seconds: float = 0.0, hangs: dict[int, tuple[int, str]] | None = None
) -> dict[str, Any]:
    """A rank's loop. ``seconds``: for how long, with a slow step in the middle. ``hangs``: step -> (rank, phase)."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.models import tiny_llama
    from course_lib.models.data import sample_batch
    from course_lib.observe.heartbeat import Heartbeat

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(tiny_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, durations, planted, slow_step = time.monotonic(), [], {}, None
    due: dict[str, float] = {}

    def hang_if_planted(phase: str) -> None:
        if phase in due:
            planted[step] = time.time()
            time.sleep(due.pop(phase))  # the planted hang

    next(model.parameters()).register_hook(lambda _: hang_if_planted("backward"))
    with Heartbeat(folder, rank=rank, every=every, start_may_take=120) as heartbeat:
        step, last = 0, max(hangs) + 10 if hangs else None
        while True:
            step_began = time.monotonic()
            if hangs and hangs.get(step, (None, ""))[0] == rank:
                due[hangs[step][1]] = PAUSE * heartbeat.every
            heartbeat.beat(step, "data")
            hang_if_planted("data")
            batch = sample_batch(step, global_batch=8, seq_len=64, rank=rank, world_size=world_size, seed=0)
            # every rank agrees on what rank 0's clock says
            clock = torch.tensor([step_began - began])
            dist.broadcast(clock, 0)
            if seconds and slow_step is None and clock.item() > seconds / 2:
                slow_step = step
                if rank == 1:
                    time.sleep((SLOW - 1) * statistics.median(durations))
            heartbeat.beat(phase="forward")
            hang_if_planted("forward")
            loss = model(input_ids=batch, labels=batch).loss
            heartbeat.beat(phase="backward")
            loss.backward()
            heartbeat.beat(phase="optimizer")
            hang_if_planted("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            durations.append(time.monotonic() - step_began)
            step += 1
            if step == last or (seconds and clock.item() > seconds):
                break
        gap, promised = heartbeat.longest_gap(), heartbeat.every
    return {"durations": durations, "planted": planted, "slow_step": slow_step, "gap": gap, "every": promised}


def healthy(seconds: float, every: float) -> bool:
    from course_lib.launch import launch
    from course_tools.monitoring import Watchdog

    with tempfile.TemporaryDirectory() as folder, Watchdog(folder, ranks=2) as watchdog:
        run = launch(train, folder, every=every, seconds=seconds, ranks=2, timeout=seconds + 120, quiet=True)
    found = run.results[1]
    median, slow = statistics.median(found["durations"]), found["durations"][found["slow_step"]]
    cries = sum(duration > 3 * median for duration in found["durations"][1:])
    print(
        f"healthy, {sum(found['durations']):.0f} s, {len(found['durations'])} steps of {median * 1e3:.0f} ms, the slow one "
        f"{slow / median:.1f} medians, heartbeat {found['every']:.2f} s, longest silence of the loop {found['gap']:.2f} s: "
        f"{len(watchdog.alarms)} alarms (a limit of 3 median steps: {cries})"
    )
    return not watchdog.alarms


def planted(hangs: int, every: float) -> bool:
    from course_lib.launch import launch
    from course_tools.monitoring import Watchdog

    dice, steps, step = random.Random(0), {}, 20
    for _ in range(hangs):
        steps[step] = (dice.randrange(2), dice.choice(PHASES))
        step += dice.randrange(15, 30)
    told: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        with Watchdog(folder, ranks=2, tell=lambda _: told.append(time.time())) as watchdog:
            watchdog_told = watchdog.alarms
            run = launch(train, folder, every=every, hangs=steps, ranks=2, timeout=hangs * 20 * every + 120, quiet=True)
    begun = {step: at for result in run.results for step, at in result["planted"].items()}
    # alarms and recoveries take turns, so every second sentence is an alarm
    delays, right = [], 0
    for alarm, at in zip(watchdog_told, told[::2], strict=False):
        rank, phase = steps.get(alarm.step, (None, ""))
        delays.append((at - begun.get(alarm.step, at)) / alarm.every)
        right += (alarm.rank, alarm.phase) == (rank, phase)
        if not (alarm.rank, alarm.phase) == (rank, phase):
            print(f"  planted on rank {rank}, {phase}: {alarm.sentence}")
    if not delays:
        print("no alarm at all")
        return False
    print(
        f"{hangs} hangs: {len(delays)} alarms, {right} with the right rank and phase, {len(watchdog.recoveries)} recoveries; "
        f"told after {statistics.median(delays):.2f} heartbeats (median), {max(delays):.2f} (worst); bound 2"
    )
    return len(delays) == right == len(watchdog.recoveries) == hangs and max(delays) <= 2


def costs(steps: int = 50) -> None:
    from course_lib.observe.heartbeat import Heartbeat
    from course_lib.observe.tracking import Tracker

    with tempfile.TemporaryDirectory() as folder, Heartbeat(folder, rank=0, every=1.0) as heartbeat:
        began = time.perf_counter()
        for step in range(20_000):
            heartbeat.beat(step // 4, "forward", loss=1.0)
        print(f"a beat: {(time.perf_counter() - began) / 20_000 * 1e6:.1f} microseconds")
    for to in ("tensorboard", "wandb"):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            tracker = Tracker(folder, to=to, rank=0, world_size=1)
            opened = time.perf_counter()
            for step in range(steps):
                tracker.log(
                    step, loss=1.0, tokens_per_second=1.0, memory_bytes=1.0, gradient_norm=1.0, heartbeat_gap=1.0
                )
            logged = time.perf_counter()
            tracker.close()
            closed = time.perf_counter()
            print(
                f"{to}: opened in {opened - began:.2f} s, {(logged - opened) / steps * 1e3:.3f} ms for 5 metrics of a "
                f"step, closed in {closed - logged:.2f} s {tracker.problem}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of the healthy run")
    parser.add_argument("--hangs", type=int, default=10)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two heartbeats")
    given = parser.parse_args()
    print(f"2 CPU ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    costs()
    good = healthy(given.seconds, given.every) if given.seconds else True
    good = (planted(given.hangs, given.every) if given.hangs else True) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
