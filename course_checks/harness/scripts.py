"""A capstone: a learner's script that starts as the script for one GPU, and what it logs."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_checks.harness.comparing import NotYet, nothing
from course_checks.harness.ranks import run_ranks
from course_lib.launch import RankFailed

Lines = list[dict[str, Any]]  # what was seen on a rank, a line per optimizer step


def start(original: Path, path: str) -> Path:
    """Copy the script for one GPU to `path`, unless a file is there; open it in JupyterLab and edit it."""
    file = Path(path).resolve()
    if not file.exists():
        shutil.copyfile(original, file)
    return file


def script_of(path: Any) -> Path:
    """The learner's script. Raises NotYet where there is none."""
    if path is None:
        raise nothing("the path of your script")
    script = Path(str(path)).resolve()
    if not script.is_file():
        raise NotYet(f"there is no file {script.name}: return the path of your script")
    return script


def run_as_main(script: str, *arguments: str) -> None:
    """Run a script in this process as `python script arguments` would; leaving it by sys.exit(0) is no failure."""
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


def watched(
    watch: Callable[..., None], script: Path, folder: str, *arguments: Any, ranks: int
) -> tuple[list[Lines], NotYet | RankFailed | None]:
    """Run `watch(script, folder, notes, *arguments)`, which writes {notes}/rank{rank}.jsonl, on ranks.

    Returns what each rank wrote, and the failure that ended the run, which may have been planned.
    """
    Path(folder).mkdir(exist_ok=True)
    failed: NotYet | RankFailed | None = None
    with tempfile.TemporaryDirectory() as notes:
        try:
            run_ranks(watch, str(script), folder, notes, *arguments, ranks=ranks, timeout=45.0)
        except (NotYet, RankFailed) as error:
            failed = error
        files = [Path(notes, f"rank{rank}.jsonl") for rank in range(ranks)]
        return [[*map(json.loads, f.read_text().splitlines())] if f.exists() else [] for f in files], failed


def logged_losses(folder: str, *, saved_at: int, steps: int) -> list[float]:
    """What losses.jsonl says of steps 1 to `steps`; a step after `saved_at` may come twice, from before and after a crash."""
    log = Path(folder, "losses.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    times = Counter(line["step"] for line in lines)
    once = all(count == 1 if step <= saved_at else count <= 2 for step, count in times.items())
    if not once or sorted(times) != [*range(1, steps + 1)]:
        raise NotYet(f"losses.jsonl has these steps, and how often: {dict(times)}. One rank writes one line per step")
    losses = {line["step"]: line["loss"] for line in lines}
    return [losses[step] for step in sorted(losses)]
