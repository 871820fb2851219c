"""All ranks' metrics of a run, wherever each rank wrote them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from course_lib.observe.tracking.event_files import read_event_files
from course_lib.observe.tracking.series import Series
from course_lib.observe.tracking.wandb_files import read_wandb_files


def read(folder: str | os.PathLike[str]) -> dict[int, dict[str, Series]]:
    """``{rank: {metric: [(step, value, time), …]}}`` of a folder that `Tracker` wrote to.

    Steps in order, each once; where a resumed run did a step again, its later value. ``time`` is in seconds since 1970.
    Event files and W&B's offline files are both read; what W&B sent online is on its server.

    Raises:
        ValueError: no folder, no rank in it, or ranks that wrote nothing.
    """
    place = Path(folder)
    ranks = {
        int(m[1]): path
        for path in place.glob("rank*")
        if path.is_dir() and (m := re.fullmatch(r"rank(\d+)", path.name))
    }
    if not ranks:
        raise ValueError(f"{place} has no folder of a rank (rank0, rank1, …): give the folder that Tracker was given.")
    found = {}
    for rank, path in sorted(ranks.items()):
        found[rank] = read_event_files(path)
        if any(path.glob("wandb/*run-*")):
            found[rank] |= read_wandb_files(path)
    if not any(found.values()):
        raise ValueError(f"{place} has ranks, and no metric of theirs: did the run log and close its Tracker?")
    return found
