"""How many lines of Python each room of the house has, and how many it may have. `make lines` prints the table.

A change that makes a room smaller lowers its number here; one that must raise it says why beside it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLACK = 100  # lines that a room may lie below its number before the number has to follow

# room: (lines that it may have today, lines that it should have one day)
ROOMS = {
    "course_lib/launch": (
        3177,
        2300,
    ),  # how a rank ends, also as its notebook ends: 105 lines, emulated GPUs came from training; a command's processes
    "course_lib/observe": (
        2188,
        1150,
    ),  # a step's units, memory snapshots, an all-to-all's formula, a rank's pages and copies on the host; when pipeline stages run came from training
    "course_lib/collectives": (392, 392),
    "course_lib/memory": (
        3878,
        2300,
    ),  # DeepSpeed's bf16 master copies; each moment of FSDP2's step; 19 architectures, mixtures of experts and latent attention among them; a machine's own memory, evaluation, caches, compiled blocks; gradients that FSDP2 sums in fp32, or reduces in each micro-batch
    "course_lib/parallel": (505, 523),  # when a bucket travels, by arithmetic
    "course_lib/models": (759, 400),  # the Llama of any widths and the batches of answers came from training
    "course_lib/training": (1087, 1086),  # tensor parallelism refuses what its kv heads cannot be split into
    "course_lib/checkpoints": (461, 400),
    "course_lib/notebook": (
        1636,
        600,
    ),  # every cell says that it runs, the map is a page of cards, buckets, stages, all-reduces and saves have sliders, and a recorded step a player
    "course_lib/figures": (
        1545,
        950,
    ),  # a figure becomes a compact SVG; gigabytes; packed rows, time lost by the interval
    "course_lib/on_cpu": (151, 500),  # NF4 came from training, and keeps bitsandbytes quiet
    "course_lib": (618, 300),  # a lesson's opening picture in Colab; how experts are shared out
    "course_tools/planning": (
        3396,
        2500,
    ),  # a ZeRO plan's script brings its JSON; a machine's own memory, what a layer of experts costs and where they lie; a script for torchrun, copies, 8-bit states and a batch of its own
    "course_tools/axolotl": (
        3175,
        2000,
    ),  # a notebook needs no remark that it waits; on SIGTERM all ranks save the same step, and workers stay; axes that do not fill the ranks, evaluation
    "course_tools/clusters": (629, 600),  # Slurm's signal reaches the ranks
    "course_tools/conversion": (837, 700),
    "course_tools/monitoring": (516, 450),  # a chat on this machine, which was in a notebook's cell
    "course_tools/doctor": (585, 450),
    "course_tools": (151, 150),  # where to go on, and the notebook there
    "course_checks/harness": (1157, 700),  # clauses and hints; what labs share came from labs 3 to 6
    "course_checks": (
        7898,
        3850,
    ),  # lab 7's notebook prints what the check counts; labs 4 to 6 run on ranks; a norm before clipping; a default group in lab 8
    "classroom": (
        1449,
        1200,
    ),  # tracks, what is handed in by issue, learners' paths, and the page of what combines with what
    "tests/planted": (1501, 1300),
    "tests": (
        15872,
        9700,
    ),  # an emulated step beside arithmetic; drawings, the map and a status line, also in a browser; traces in pieces; a pace, unequal shares; lines from two files of a rank; a deadline; a command's processes, workers under SIGTERM; a saving plan's price beside a simulation; all that goes with each other trains on ranks; tracks and issues of a class; every architecture and every moment beside real storages; published step times, and what an expert would answer
    "benchmarks": (
        2531,
        1000,
    ),  # 8-bit optimizers came from training; a thousand are what a GPU is asked, a hundred each instrument beside a second one; published peaks; published step times and trainings, which were in the planner
    "site": (469, 450),
}


def room_of(path: str) -> str | None:
    """The room with the longest name that this file lies in."""
    rooms = [room for room in ROOMS if path.startswith(f"{room}/")]
    return max(rooms, key=len, default=None)


def tracked(root: Path = ROOT) -> list[Path]:
    """The files in git; in a copy without git, or where git refuses, every file but what a run leaves behind."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):
        listed = []
    files = [root / name for name in listed if name and (root / name).is_file()]
    if files:
        return files
    left_behind = r"\.venv|build|\.git|__pycache__|.*\.egg-info|\.\w+_cache|\.ipynb_checkpoints|lightning_logs"
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(re.fullmatch(left_behind, part) for part in path.relative_to(root).parts)
    ]


def count() -> dict[str, int]:
    """Lines of the Python files, by room."""
    lines = dict.fromkeys(ROOMS, 0)
    for path in tracked():
        if path.suffix == ".py" and (room := room_of(path.relative_to(ROOT).as_posix())):
            lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def main() -> None:
    lines = count()
    print(f"{'room':24}{'lines':>8}{'allowed':>9}{'aim':>8}")
    for room, (allowed, aim) in ROOMS.items():
        print(f"{room:24}{lines[room]:8,}{allowed:9,}{aim:8,}")
    allowed, aim = (sum(pair[k] for pair in ROOMS.values()) for k in (0, 1))
    print(f"{'all':24}{sum(lines.values()):8,}{allowed:9,}{aim:8,}")


if __name__ == "__main__":
    main()
