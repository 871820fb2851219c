"""The GPUs: what PyTorch sees of them, what the driver says, and how they are joined."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

from course_tools.doctor.asking import Answer
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

GIB = 2**30
NVLINK, NEAR, FAR = re.compile(r"NV\d+"), ("PIX", "PXB", "PHB"), ("NODE", "SYS")


def driver(arguments: tuple[str, ...] = ("-L",)) -> str | None:
    """What nvidia-smi prints; None where there is none, or it finds no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        asked = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None


def cards(torch: Answer, listed: str | None) -> Finding:
    """What PyTorch sees, held against what the driver lists (the output of nvidia-smi -L, or None)."""
    seen: list[dict[str, Any]] = torch.told.get("cards", [])
    there = len(re.findall(r"^GPU \d+:", listed or "", re.MULTILINE))
    if seen:
        names = ", ".join(f"{card['name']} ({card['memory'] / GIB:.1f} GiB)" for card in seen)
        return Finding(OK, "GPUs", names)
    if there and not torch.told.get("cuda"):
        return Finding(
            PROBLEM, "GPUs", f"the driver has {there}, and this PyTorch is a CPU build", "Every lesson runs on CPU ranks only.",
            "Install PyTorch's CUDA build: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    if there:
        return Finding(
            PROBLEM, "GPUs", f"the driver has {there}, and PyTorch with CUDA {torch.told['cuda']} sees none",
            "Every lesson runs on CPU ranks only: the driver is too old for that CUDA, CUDA_VISIBLE_DEVICES hides the cards, "
            "or CUDA is half installed.",
            "Look at: echo $CUDA_VISIBLE_DEVICES; nvidia-smi (its CUDA version must not be below PyTorch's)",
        )  # fmt: skip
    return Finding(OK, "GPUs", "none: the ranks are CPU processes over gloo, which every lesson is written for")


def sixteen_bit(torch: Answer) -> Finding | None:
    """bf16 or fp16; None without cards."""
    old = [card["name"] for card in torch.told.get("cards", []) if tuple(card["capability"]) < (8, 0)]
    if not torch.told.get("cards"):
        return None
    if old:
        return Finding(
            NOTE, "bf16", f"{', '.join(sorted(set(old)))} do{'es' if len(set(old)) == 1 else ''} not compute in bf16",
            "The lessons take fp16 there; in a YAML of yours write fp16: true (lesson 7).",
        )  # fmt: skip
    return Finding(OK, "bf16", "the cards compute in it")


def topology(torch: Answer, matrix: str | None) -> Finding | None:
    """How the cards are joined, from `nvidia-smi topo -m`; None below two cards."""
    if len(torch.told.get("cards", [])) < 2:
        return None
    words = set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", "\n".join(
        line for line in (matrix or "").splitlines() if line.startswith("GPU"))))  # fmt: skip
    if not words:
        return Finding(NOTE, "links", "nvidia-smi does not tell how the cards are joined")
    slowest = "SYS" if words & set(FAR) else "PCIe" if words & set(NEAR) else "NVLink"
    if slowest == "NVLink":
        return Finding(OK, "links", "all cards are joined by NVLink")
    return Finding(
        NOTE, "links", f"some cards are joined by {'the processors' if slowest == 'SYS' else 'PCIe'} only ({', '.join(sorted(words))})",
        "Lesson 3 measures what that costs; tensor parallelism (lesson 8) feels it most.",
    )  # fmt: skip
