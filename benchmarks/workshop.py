"""A class of 16 on one box with 4 GPUs: are the leases fair, exclusive and returned, and do 16 launches meet anywhere?

1. --learners processes that each lease 1 or 2 GPUs --rounds times; --kills of them are killed while they hold. Counted: grants,
   double holdings (each GPU also has a flag file that only one process can make), who was overtaken, the longest wait, and
   the seconds until a killed holder's GPU is free again.
2. As many notebooks that each launch 2 CPU ranks at once, twice, with leases and then without: runs that came back right,
   sockets that listen for anybody but this machine, and what is left of processes and files.

    python benchmarks/workshop.py [--learners 16] [--rounds 10] [--kills 5] [--gpus 4] [--no-launch]
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from course_lib.launch.leases import Pool

ROOT = Path(__file__).resolve().parents[1]
LEARNER = """
import json, os, random, sys, time
from course_lib.launch.leases import Pool
name, folder, flags, rounds, for_ever = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
dice, pool, log = random.Random(name), Pool(folder), os.open(f"{flags}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
double = 0
for number in range(rounds):
    n, asked = dice.choice((1, 2)), time.monotonic()
    with pool.lease(n, name=name, tell=lambda _: None) as lease:
        had, mine, made = time.monotonic(), lease.gpus, []
        for gpu in mine:
            try:
                os.close(os.open(f"{flags}/{gpu}", os.O_CREAT | os.O_EXCL))
                made.append(gpu)
            except FileExistsError:
                double += 1
        if number == for_ever:
            os.write(log, (json.dumps([name, mine, asked, had, None, os.getpid(), double]) + "\\n").encode())
            time.sleep(3600)
        time.sleep(dice.uniform(0.02, 0.2))
        for gpu in made:
            os.unlink(f"{flags}/{gpu}")
        gave = time.monotonic()
    os.write(log, (json.dumps([name, mine, asked, had, gave, os.getpid(), double]) + "\\n").encode())
    double = 0
"""
NOTEBOOK = """
import json, sys, time
from course_lib.launch import launch

def step():
    import psutil, torch, torch.distributed as dist
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    found = psutil.Process().net_connections()
    return total.item(), [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]

if __name__ == "__main__":
    runs = [launch(step, ranks=2, threads=1, timeout=300, quiet=True) for _ in range(2)]
    print(json.dumps([run.results for run in runs]), flush=True)
"""


def read_log(flags: str) -> list[list]:
    path = Path(flags, "log")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def leasing(learners: int, rounds: int, kills: int, gpus: int) -> bool:
    names = [f"learner {k}" for k in range(learners)]
    dice = random.Random(0)
    doomed = {name: dice.randrange(rounds) for name in dice.sample(names, kills)}
    returns: list[float] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as flags:
        leases = Pool(f"{folder}/leases", gpus=gpus)
        leases.make()
        began = time.monotonic()
        running = {
            name: subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-c",
                    LEARNER,
                    name,
                    leases.folder,
                    flags,
                    str(rounds),
                    str(doomed.get(name, -1)),
                ],
                cwd=ROOT,
            )
            for name in names
        }
        killed: set[str] = set()
        while any(process.poll() is None for process in running.values()):
            for name, mine, _, _, gave, pid, _ in read_log(flags):
                if gave is None and name not in killed:
                    killed.add(name)
                    for gpu in mine:
                        os.unlink(f"{flags}/{gpu}")
                    running[name].kill()
                    at = time.monotonic()
                    while pid in {holder.pid for holder in leases.holders()}:
                        time.sleep(0.001)
                    returns.append(time.monotonic() - at)
            time.sleep(0.01)
        seconds = time.monotonic() - began
        log = read_log(flags)
        left = leases.holders() + leases.waiting()
    held: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for _, mine, _, had, gave, _, _ in log:
        for gpu in mine:
            held[gpu].append((had, gave or had))
    double = sum(line[6] for line in log)
    for intervals in held.values():
        intervals.sort()
        double += sum(a[1] > b[0] for a, b in zip(intervals, intervals[1:], strict=False))
    overtaken = max(sum(b[2] > a[2] + 0.5 and b[3] < a[3] for b in log) for a in log)
    waits = [line[3] - line[2] for line in log]
    expected = sum(doomed.get(name, rounds - 1) + 1 for name in names)
    print(
        f"{learners} learners, {gpus} GPUs, {seconds:.1f} s: {len(log)} grants of {expected}, {double} double holdings, "
        f"{overtaken} times overtaken by who asked 0.5 s later (the worst off)\n"
        f"wait: {statistics.median(waits):.2f} s (median), {max(waits):.2f} s (longest)"
    )
    if returns:
        print(
            f"{len(returns)} holders killed; their GPUs free again after {statistics.median(returns) * 1e3:.1f} ms (median), "
            f"{max(returns) * 1e3:.1f} ms (worst); bound 1000 ms"
        )
    print(f"left in the pool: {len(left)}")
    return len(log) == expected and not (double or overtaken or left) and max(returns, default=0) < 1


def launching(learners: int, gpus: int, shared: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="b1g-") as folder:
        script = Path(folder, "notebook.py")
        script.write_text(NOTEBOOK)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        environment.pop("BEYOND_ONE_GPU_LEASES", None)
        if shared:
            Pool(f"{folder}/leases", gpus=gpus).make()
            environment |= {"BEYOND_ONE_GPU_LEASES": f"{folder}/leases", "BEYOND_ONE_GPU_GPUS": str(gpus)}
        began = time.monotonic()
        command = [sys.executable, str(script)]
        notebooks = [
            subprocess.Popen(command, env=environment | {"BEYOND_ONE_GPU_NAME": f"learner {k}"},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for k in range(learners)
        ]  # fmt: skip
        wrong, open_to_others = 0, 0
        for notebook in notebooks:
            said, complaint = notebook.communicate()
            lines = [line for line in said.splitlines() if line.startswith("[[")]
            runs = json.loads(lines[0]) if lines else []
            if notebook.returncode or len(runs) != 2 or any(total != 3.0 for run in runs for total, _ in run):
                wrong += 1
                print(f"  {complaint.strip()[-500:]}")
            open_to_others += sum(
                ip not in ("127.0.0.1", "::1") for run in runs for _, listening in run for ip in listening
            )
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 10  # a server ends when its notebook's pipe has closed
        while (processes := psutil.Process().children(recursive=True) + _of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        files = glob.glob(f"{folder}/beyond-one-gpu-*") + glob.glob(f"{folder}/pymp-*")
    print(
        f"{learners} notebooks launch 2 CPU ranks twice, {'with' if shared else 'without'} leases, {seconds:.1f} s: {wrong} went "
        f"wrong (collisions of ports or files), {open_to_others} sockets open to others, {len(processes)} processes and "
        f"{len(files)} files left"
    )
    return not (wrong or open_to_others or processes or files)


def _of(folder: str) -> list[psutil.Process]:
    """Processes whose TMPDIR is this folder, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--no-launch", action="store_true", help="only the leases")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    good = leasing(given.learners, given.rounds, given.kills, given.gpus)
    if not given.no_launch:
        good = all([launching(given.learners, given.gpus, shared) for shared in (True, False)]) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
