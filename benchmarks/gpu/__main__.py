"""Run the parts, each in a process of its own, so that the card is clean and a part that dies takes nothing with it.

python -m benchmarks.gpu [PART ...] [--small] [--only WORDS] [--minutes 15] [--out build/gpu]
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.running import LIMIT, PARTS, RECORDINGS, ROOT, Part
from course_tools.command_line import ArgumentParser, reports_errors

GRACE = 45.0  # seconds beyond its limit after which a part is ended


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Returns 0; 1 where a piece failed or a part died; 2 for bad input."""
    parser = ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"1 to {len(PARTS)}, or {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="everything on a CPU with tiny settings: no result")
    parser.add_argument("--only", default="", help="only the pieces with these words in their name")
    parser.add_argument(
        "--out", default=str(ROOT / "build" / "gpu"), help="folder; recordings/ keeps what a GPU measured"
    )
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="for all parts together; what has no time is skipped"
    )
    parser.add_argument("--here", action="store_true", help="in this process")
    asked = parser.parse_args(argv)
    names = [list(PARTS)[int(part) - 1] if part in map(str, range(1, len(PARTS) + 1)) else part for part in asked.parts]
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(
            f"There is no part {unknown[0]!r}: give a number from 1 to {len(PARTS)}, or {', '.join(PARTS)}."
        )
    if not asked.small and (why := no_gpu()):
        raise ValueError(f"{why} `make gpu SMALL=1` runs everything on a CPU, with tiny settings.")
    if asked.small and Path(asked.out).resolve() == RECORDINGS:
        raise ValueError("Only what a GPU measured is kept in recordings/: leave OUT away.")
    if asked.here:
        return in_this_process(names[0], asked)
    ends = time.monotonic() + 60 * asked.minutes
    return max([in_its_own_process(name, asked, ends) for name in names or PARTS])


def no_gpu() -> str:
    """Why PyTorch has no GPU here, as one sentence; "" where it has one."""
    if torch.cuda.is_available():  # asked without a context, whose memory part 2 would measure
        return ""
    try:
        torch.cuda.init()
    except Exception as error:  # its class depends on what is missing: the build, the driver, the card
        return f"PyTorch has no GPU here ({' '.join(str(error).split())[:200].rstrip('.')})."
    return ""


def in_its_own_process(name: str, asked: Namespace, ends: float) -> int:
    limit, (title, minutes) = min(LIMIT, ends - time.monotonic() - GRACE / 2), PARTS[name]
    print(f"\n{list(PARTS).index(name) + 1} {name}: {title}", flush=True)
    if limit < GRACE / 2:
        print(f"  skipped, for the {asked.minutes:g} minutes are up: make gpu PART={name}", flush=True)
        return 0
    print(f"  about {'10 seconds' if asked.small else f'{minutes} minutes'}", flush=True)
    more = ["--here", "--only", asked.only, "--out", asked.out, "--minutes", str(limit / 60)] + [
        "--small"
    ] * asked.small
    one_card = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    command = [sys.executable, "-m", "benchmarks.gpu", name, *more]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | one_card, start_new_session=True)
    try:
        code = process.wait(limit + GRACE)
    except subprocess.TimeoutExpired:
        code = None
    finally:  # Ctrl-C, too, leaves nothing behind: no kernel, no test, no rank that holds memory on the card
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code is None or code < 0:
        how = f"took more than {limit + GRACE:.0f} s" if code is None else f"was ended by {signal.Signals(-code).name}"
        print(f"  {name} {how}; what it had measured is kept.", flush=True)
        return 1
    return code


def in_this_process(name: str, asked: Namespace) -> int:
    if asked.small:
        torch.set_num_threads(1)
    device = torch.device("cpu" if asked.small else "cuda")
    command, limit = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]), 60 * asked.minutes
    part = Part(name, device, small=asked.small, folder=Path(asked.out), command=command, limit=limit)
    failed = part.run(asked.only)
    if name == "memory":
        from benchmarks.gpu.memory import table

        print("\n".join(table(part.rows.values())), flush=True)
    print(f"  written to {part.path}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
