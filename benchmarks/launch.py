"""How long a learner waits for ranks: ``launch`` against what they would use instead, all in one run.

Every figure is the median of ROUNDS, in seconds of wall clock from the call to the result of the first all-reduce on
the last of 4 CPU ranks (gloo). Rounds of the launchers alternate, so that a noisy minute hits all of them.

    python benchmarks/launch.py
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROUNDS, RANKS = 5, 4

ALL_REDUCE = """
import os, sys, time
import torch, torch.distributed as dist

def first_all_reduce(rank=None, port=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str({ranks}), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        ours = True
    else:
        ours = False
    x = torch.ones(1024)
    dist.all_reduce(x)
    done = time.time()
    if ours:
        dist.destroy_process_group()
    return done
"""
SPAWN = (
    ALL_REDUCE
    + """
def on_rank(rank, port, path):
    with open(f"{{path}}.{{rank}}", "w") as file:
        file.write(repr(first_all_reduce(rank, port)))

if __name__ == "__main__":
    import torch.multiprocessing as mp
    import warnings
    warnings.filterwarnings("ignore")
    began = time.time()
    mp.spawn(on_rank, (int(sys.argv[1]), sys.argv[2]), {ranks})
    print(max(float(open(f"{{sys.argv[2]}}.{{r}}").read()) for r in range({ranks})) - began)
"""
)
TORCHRUN = ALL_REDUCE + """print("done", repr(first_all_reduce()), flush=True)\n"""
AFTER_CUDA = """
import torch
from accelerate import notebook_launcher
torch.zeros(1, device="cuda")  # what an earlier cell has done
notebook_launcher(print, ("a rank",), num_processes=2)
"""
FRESH = """
import time
began = time.time()
from course_lib.launch import launch
def first_all_reduce():
    import time, torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1024))
    return time.time()
print("done", max(launch(first_all_reduce, ranks={ranks}).results) - began)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def script(folder: str, name: str, text: str) -> str:
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write(text.format(ranks=RANKS))
    return path


def output_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def warm_launch() -> float:
    from course_lib.launch import launch

    def first_all_reduce() -> float:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1024))
        return time.time()

    began = time.time()
    return max(launch(first_all_reduce, ranks=RANKS, quiet=True).results) - began


def forked_by_accelerate(folder: str) -> float:
    from accelerate import notebook_launcher

    def first_all_reduce() -> None:
        import torch
        import torch.distributed as dist
        from accelerate import PartialState

        PartialState(cpu=True)
        dist.all_reduce(torch.ones(1024))
        with open(f"{folder}/accelerate.{dist.get_rank()}", "w") as file:
            file.write(repr(time.time()))

    os.environ["OMP_NUM_THREADS"] = "1"  # as accelerate does by itself, with a warning
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    began = time.time()
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(first_all_reduce, num_processes=RANKS, use_port=str(free_port()))
    for number, handler in handlers.items():  # it leaves its own behind
        signal.signal(number, handler)
    told = []
    for rank in range(RANKS):
        with open(f"{folder}/accelerate.{rank}") as file:
            told.append(float(file.read()))
    return max(told) - began


def spawned(folder: str, path: str) -> float:
    return float(output_of([sys.executable, path, str(free_port()), f"{folder}/spawn"]).split()[-1])


def torchrun(path: str) -> float:
    began = time.time()
    told = output_of([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", path])
    return max(float(line.split()[1]) for line in told.splitlines() if line.startswith("done")) - began


def after_cuda() -> str:
    """What becomes of a launcher that forks, in a process with a CUDA context."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU here, so not shown"
    ran = subprocess.run([sys.executable, "-c", AFTER_CUDA], capture_output=True, text=True, timeout=300)
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else "ran"


def exception_report() -> float:
    """Seconds from a rank's raise to the report, while the others wait in an all-reduce."""
    from course_lib.launch import RankFailed, launch

    def fails() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError(repr(time.time()))
        dist.all_reduce(torch.ones(3))

    try:
        launch(fails, ranks=RANKS, quiet=True)
    except RankFailed as error:
        return time.time() - float(error.cause_message)
    raise RuntimeError("the rank that raises was not reported")


def hang_report() -> float:
    """Seconds beyond its timeout until the hang report stands, all ranks' joining included."""
    from course_lib.launch import RanksHung, launch

    def hangs() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(3))

    began = time.time()
    try:
        launch(hangs, ranks=RANKS, timeout=1.0, quiet=True)
    except RanksHung:
        return time.time() - began - 1.0
    raise RuntimeError("the hang was not reported")


def main() -> int:
    import torch

    from course_lib.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        spawn_path = script(folder, "spawned.py", SPAWN)
        torchrun_path = script(folder, "torchrun.py", TORCHRUN)
        fresh_path = script(folder, "fresh.py", FRESH)
        launch(float, ranks=1, quiet=True)  # warm
        racers: dict[str, Callable[[], float]] = {
            "launch, warm": warm_launch,
            "accelerate.notebook_launcher (fork)": lambda: forked_by_accelerate(folder),
            "torch.multiprocessing.spawn": lambda: spawned(folder, spawn_path),
            "torchrun": lambda: torchrun(torchrun_path),
            "launch, first call of a fresh process, imports included": lambda: float(
                output_of([sys.executable, fresh_path]).split()[-1]
            ),
            "exception report, after the raise": exception_report,
            "hang report, after its timeout": hang_report,
        }
        times: dict[str, list[float]] = {name: [] for name in racers}
        for _ in range(ROUNDS):
            for name, race in racers.items():
                times[name].append(race())
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["launch, warm"]
    print(f"{RANKS} CPU ranks, gloo, torch {torch.__version__}, {os.cpu_count()} cores; medians of {ROUNDS}")
    print(f"{'':58}{'seconds':>9}{'fastest':>9}{'slowest':>9}{'to launch':>11}")
    for name, value in medians.items():
        ratio = f"{value / base:10.1f}x" if "call" not in name and "report" not in name else ""
        print(f"{name:58}{value:9.2f}{min(times[name]):9.2f}{max(times[name]):9.2f}{ratio:>11}")
    print(f"notebook_launcher once the notebook has touched CUDA: {after_cuda()}")
    goals = {
        "spawn at least 10 times slower": medians["torch.multiprocessing.spawn"] >= 10 * base,
        "torchrun at least 10 times slower": medians["torchrun"] >= 10 * base,
        "within 0.5 s of notebook_launcher": base <= medians["accelerate.notebook_launcher (fork)"] + 0.5,
        "first call under 6 s": medians["launch, first call of a fresh process, imports included"] < 6,
        "exception report within 2 s": medians["exception report, after the raise"] < 2,
        "hang report within 2 s": medians["hang report, after its timeout"] < 2,
    }
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
