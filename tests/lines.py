"""How many lines of Python each room of the house has, and how many it may have. `make lines` prints the table.

A change that makes a room smaller lowers its number here; one that must raise it says why beside it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLACK = 100  # lines that a room may lie below its number before the number has to follow

# room: (lines that it may have today, lines that it should have one day)
ROOMS = {
    "course_lib/launch": (2902, 2300),
    "course_lib/observe": (2228, 1150),
    "course_lib/collectives": (1299, 650),
    "course_lib/memory": (2937, 2300),
    "course_lib/parallel": (691, 550),
    "course_lib/models": (737, 400),
    "course_lib/training": (6139, 1200),
    "course_lib/checkpoints": (1211, 400),
    "course_lib/notebook": (1247, 600),
    "course_lib/figures": (2027, 950),
    "course_lib": (506, 300),
    "course_tools/planning": (3739, 2500),
    "course_tools/axolotl": (3130, 2000),
    "course_tools/clusters": (1133, 600),
    "course_tools/conversion": (1026, 700),
    "course_tools/monitoring": (756, 450),
    "course_tools/doctor": (719, 450),
    "course_tools": (154, 150),
    "course_checks/harness": (1029, 700),
    "course_checks": (10740, 3850),
    "classroom": (1643, 1200),
    "tests/planted": (3587, 1300),
    "tests": (13193, 9700),
    "benchmarks": (1429, 1000),
    "site": (506, 450),
}


def room_of(path: str) -> str | None:
    """The room with the longest name that this file lies in."""
    rooms = [room for room in ROOMS if path.startswith(f"{room}/")]
    return max(rooms, key=len, default=None)


def count() -> dict[str, int]:
    """Lines of the Python files in git, by room."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
    lines = dict.fromkeys(ROOMS, 0)
    for path in listed.splitlines():
        if (room := room_of(path)) and (ROOT / path).is_file():
            lines[room] += len((ROOT / path).read_text(encoding="utf-8").splitlines())
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
