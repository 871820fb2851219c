"""The GPUs: what PyTorch sees of them, what the driver says, and how they are connected."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

from course_lib.units import GIB
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding
from course_tools.doctor.probe import Answer

NVLINK, NEAR, FAR = re.compile(r"NV\d+"), ("PIX", "PXB", "PHB"), ("NODE", "SYS")


def driver(arguments: tuple[str, ...] = ("-L",)) -> str | None:
    """Return what nvidia-smi prints; None if it is not installed, or finds no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cards(torch: Answer, listed: str | None) -> Finding:
    """Compare what PyTorch sees with what the driver lists (the output of nvidia-smi -L, or None)."""
    seen: list[dict[str, Any]] = torch.values.get("cards", [])
    in_driver = len(re.findall(r"^GPU \d+:", listed or "", re.MULTILINE))
    if seen:
        names = ", ".join(f"{card['name']} ({card['memory'] / GIB:.1f} GiB)" for card in seen)
        return Finding(OK, "GPUs", names)
    if in_driver and not torch.values.get("cuda"):
        return Finding(
            PROBLEM,
            "GPUs",
            f"the driver has {in_driver}, and this PyTorch is a CPU build",
            "Every lesson runs on CPU ranks only.",
            "Install PyTorch's CUDA build: https://pytorch.org/get-started/locally",
        )
    if in_driver:
        return Finding(
            PROBLEM,
            "GPUs",
            f"the driver has {in_driver}, and PyTorch with CUDA {torch.values['cuda']} sees none",
            "Every lesson runs on CPU ranks only: the driver is too old for that CUDA, CUDA_VISIBLE_DEVICES hides the cards, "
            "or CUDA is half installed.",
            "Look at: echo $CUDA_VISIBLE_DEVICES; nvidia-smi (its CUDA version must not be below PyTorch's)",
        )
    return Finding(OK, "GPUs", "none: the ranks are CPU processes over gloo, which every lesson is written for")


def sixteen_bit(torch: Answer) -> Finding | None:
    """Check that the cards compute in bf16; None without cards."""
    old = [card["name"] for card in torch.values.get("cards", []) if tuple(card["capability"]) < (8, 0)]
    if not torch.values.get("cards"):
        return None
    if old:
        return Finding(
            NOTE,
            "bf16",
            f"{', '.join(sorted(set(old)))} do{'es' if len(set(old)) == 1 else ''} not compute in bf16",
            "The lessons take fp16 there; in a YAML of yours write fp16: true (lesson 7).",
        )
    return Finding(OK, "bf16", "the cards compute in it")


def topology(torch: Answer, matrix: str | None) -> Finding | None:
    """Say how the cards are connected, from `nvidia-smi topo -m`; None for fewer than two cards."""
    if len(torch.values.get("cards", [])) < 2:
        return None
    rows = "\n".join(line for line in (matrix or "").splitlines() if line.startswith("GPU"))
    words = set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", rows))
    if not words:
        return Finding(NOTE, "links", "nvidia-smi does not tell how the cards are connected")
    slowest = "SYS" if words & set(FAR) else "PCIe" if words & set(NEAR) else "NVLink"
    if slowest == "NVLink":
        return Finding(OK, "links", "all cards are connected by NVLink")
    return Finding(
        NOTE,
        "links",
        f"some cards are connected by {'the processors' if slowest == 'SYS' else 'PCIe'} only ({', '.join(sorted(words))})",
        "Lesson 3 measures what that costs; tensor parallelism (lesson 8) feels it most.",
    )
