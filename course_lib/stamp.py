"""Where and when a number was measured. Only the standard library is imported, so a bare machine can say it, too."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def stamp(*, ranks: int = 1, backend: str | None = None, device: str | None = None) -> dict[str, str | int]:
    """Where and when a number was measured: device, ranks, backend, torch, python, date (UTC).

    `device` is taken as it is; None names the GPU for "nccl", the CPU for "gloo", and without a backend the GPU if
    there is one that torch can use. It asks the driver's own records, so it never initialises CUDA.
    """
    torch_version = "none"
    if "torch" in sys.modules:
        torch_version = str(sys.modules["torch"].__version__)
    else:
        try:
            torch_version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            pass  # a machine that only does the arithmetic: the stamp says "none"
    if device is None:
        gpus = [] if backend == "gloo" or torch_version.endswith("+cpu") else _gpu_names()
        device = ", ".join(dict.fromkeys(gpus)) or _cpu_name()
    return {
        "device": device,
        "ranks": ranks,
        "backend": backend or "none",
        "torch": torch_version,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _gpu_names() -> list[str]:
    """The visible NVIDIA GPUs by the driver's own lists; none where CUDA_VISIBLE_DEVICES hides them all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name()]
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return []
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for card in cards for line in card.read_text().splitlines()]
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    if not names and shutil.which("nvidia-smi"):  # in WSL2 and some containers /proc has no such list
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
            names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError):
            return []  # a driver that does not answer is no GPU that torch could use
    return names


def _cpu_name() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {cores} cores"
