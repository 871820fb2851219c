"""What was measured on a GPU, for whoever reads the course without one.

A cell that a GPU's owner runs live shows on other machines what a run recorded, and says so:

    rows = live() if torch.cuda.is_available() else recorded("memory", "step")

`make gpu OUT=recordings` writes the recordings; nothing else does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "recordings"


def recorded(part: str, kind: str, *, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The rows of one kind of a part's recording, below a printed line that says where and when they were measured.

    Without a recording, or without such rows in it, the list is empty and nothing is printed.
    """
    path = folder / f"{part}.json"
    recording = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    rows = [row for row in recording["rows"] if row["kind"] == kind]
    if rows:
        stamp = recording["stamp"]
        print(f"Recorded on {stamp['device']}, driver {stamp['driver']}, PyTorch {stamp['torch']}, {stamp['date']}.")
    return rows
