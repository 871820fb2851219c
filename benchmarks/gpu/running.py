"""A part of the programme: pieces that each write what they find, and skip with a sentence what is not there.

A part's results are one JSON file, written anew with each of them: {"stamp": …, "rows": [{"kind", "name", …}]}. A part that
is repeated on the same card, driver and PyTorch replaces the rows of the same name and keeps the others. Such a file of a
GPU's run, in `recordings/`, is a recording: `course_lib.notebook.recordings` reads it.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from course_lib.files import write_atomically
from course_lib.stamp import stamp
from course_tools.doctor.gpus import driver

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "recordings"
Row = tuple[str, str, dict[str, Any]]  # kind, name, values
Piece = tuple[str, Callable[[], Iterable[Row]]]

# name -> (title, minutes on an H100 with everything installed: an estimate, until a run has said)
PARTS = {
    "works": ("the doctor, launch over NCCL, a kernel that has used CUDA, the tests marked gpu", 2),
    "memory": ("training steps beside `estimate`: allocated, reserved, context", 3),
    "speed": ("tokens/s, TFLOP/s and MFU beside the Trainer and a matrix product", 3),
    "lessons": ("lessons 1 and 2 in bf16, and in fp16 on 15 GiB", 3),
    "sharded": ("FSDP2 and tensor parallelism on one rank, a trace, FP8, a planted hang's dump", 3),
}
LIMIT = 180.0  # seconds of a part; what has not begun by then is skipped


class Skip(Exception):
    """A piece that cannot run here; the message says why, in one sentence."""


class Part:
    """One run of a part.

    Attributes:
        device: the GPU, or the CPU in a small run. small: tiny settings, whose numbers mean nothing.
        folder: for results. rows: by (kind, name), earlier runs' included.
    """

    def __init__(
        self, name: str, device: torch.device, *, small: bool, folder: Path, command: str, limit: float = LIMIT
    ) -> None:
        self.name, self.device, self.small, self.folder = name, device, small, folder
        self.on_gpu = device.type == "cuda"
        self.ends = time.monotonic() + limit
        self.path = folder / f"{name}.json"
        self.stamp = full_stamp(self.on_gpu) | {"small": small, "command": command}
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        if self.path.is_file():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            if all(before["stamp"].get(key) == self.stamp[key] for key in ("device", "driver", "torch", "small")):
                self.rows = {(row["kind"], row["name"]): row for row in before["rows"]}

    @property
    def seconds_left(self) -> float:
        return max(1.0, self.ends - time.monotonic())

    def run(self, only: str = "") -> int:
        """Run the pieces with these words in their name; returns how many failed."""
        failed = ran = 0
        for name, piece in importlib.import_module(f"benchmarks.gpu.{self.name}").pieces(self):
            if only in name:
                ran += 1
                began = time.monotonic()
                kinds = [self._write(*row) for row in self._rows_of(name, piece)]
                failed += kinds.count("failed")
                print(f"           ({time.monotonic() - began:.1f} s)", flush=True)
        if not ran:
            raise ValueError(f"No piece of {self.name} has {only!r} in its name.")
        return failed

    def _rows_of(self, name: str, piece: Callable[[], Iterable[Row]]) -> Iterable[Row]:
        if time.monotonic() > self.ends:
            yield "skipped", name, {"why": f"the part's time was up: repeat it with ONLY='{name}'"}
            return
        try:
            yield from piece()
        except Skip as reason:
            yield "skipped", name, {"why": str(reason)}
        except ImportError as error:
            ours = (error.name or "").startswith(("course_", "benchmarks"))
            yield "failed" if ours else "skipped", name, {"why": str(error)}  # "No module named 'peft'"
        except torch.OutOfMemoryError as error:
            yield "skipped", name, {"why": f"too little memory on this card: {str(error).split('.')[0]}"}
        except Exception as error:  # whatever breaks on a machine that nobody has seen; the other pieces go on
            where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
            yield "failed", name, {"why": why, "where": where}

    def _write(self, kind: str, name: str, values: dict[str, Any]) -> str:
        for old in (kind, "skipped", "failed"):
            self.rows.pop((old, name), None)
        self.rows[kind, name] = {"kind": kind, "name": name} | values
        content = {"stamp": self.stamp, "rows": list(self.rows.values())}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(_plain(content), indent=1, allow_nan=False) + "\n")
        shown = ", ".join(str(v) if k == "why" else f"{k} {_short(v)}" for k, v in values.items())
        print(f"  {kind:8} {name}: {shown[:300]}", flush=True)
        return kind


def full_stamp(on_gpu: bool) -> dict[str, Any]:
    """`stamp`, with what a GPU's numbers depend on besides."""
    versions = {}
    for package in ("transformers", "accelerate", "peft", "bitsandbytes"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass  # what needs it is skipped, with a sentence
    driver_version = (driver(("--query-gpu=driver_version", "--format=csv,noheader")) or "none").split("\n")[0]
    found = stamp(device=torch.cuda.get_device_name() if on_gpu else None)
    card = torch.cuda.get_device_properties(0).total_memory if on_gpu else 0
    return found | {
        "gpu": on_gpu,
        "driver": driver_version,
        "cuda": torch.version.cuda,
        "card": card,
        "packages": versions,
    }


def _plain(value: Any) -> Any:
    """For JSON: tuples as lists, infinities and what it does not know as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value)
    return value if known else str(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict | list | tuple):
        return f"[{len(value)}]"
    return f"{value:,}" if type(value) is int else str(value)


def python(part: Part, *arguments: str) -> tuple[str, str]:
    """What another Python prints, on stdout and stderr, until it ends or the part has no more time."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        return process.communicate(timeout=part.seconds_left)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        return output, f"{errors}\nended, for the part's time was up"
