"""The GPUs: what PyTorch sees of them, what the driver says, and how they are connected."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from course_lib.units import GIB
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Answer, Finding


def driver(arguments: tuple[str, ...] = ("-L",)) -> str | None:
    """Return what nvidia-smi prints; None if it is not installed, or finds no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cards(torch: Answer, ask: Callable[[tuple[str, ...]], str | None] = driver) -> Finding:
    """Compare the GPUs that PyTorch sees with those that the driver lists."""
    seen: list[dict[str, Any]] = torch.values["cards"]
    says = ", ".join(f"{c['name']} ({c['memory'] / GIB:.1f} GiB, compute {c['major']}.{c['minor']})" for c in seen)
    if any(card["major"] < 8 for card in seen):
        means = "Below compute 8.0 they do not compute in bf16: lessons take fp16; in a YAML: fp16: true (lesson 7)."
        return Finding(NOTE, "GPUs", says, means)
    if seen:
        return Finding(OK, "GPUs", says)
    number = len(re.findall(r"^GPU \d+:", ask(("-L",)) or "", re.MULTILINE))
    if not number:
        return Finding(OK, "GPUs", "none: the ranks are CPU processes over gloo, which every lesson is written for")
    means, cuda = "Every lesson runs on CPU ranks only.", torch.values["cuda"]
    if not cuda:
        mend = "Install PyTorch's CUDA build: https://pytorch.org/get-started/locally"
        return Finding(PROBLEM, "GPUs", f"the driver has {number}, and this PyTorch is a CPU build", means, mend)
    newest = re.search(r"CUDA Version: ([\d.]+)", ask(()) or "")
    says = f"the driver ({newest[0] if newest else 'nvidia-smi'}) has {number}, PyTorch with CUDA {cuda} sees none"
    mend = "Is the driver's CUDA older? Renew the driver, or take an older build. Else: echo $CUDA_VISIBLE_DEVICES"
    return Finding(PROBLEM, "GPUs", says, means, mend)


def links(torch: Answer, ask: Callable[[tuple[str, ...]], str | None] = driver) -> Finding | None:
    """Say how the cards are connected, from ``nvidia-smi topo -m``; None for fewer than two cards."""
    if len(torch.values["cards"]) < 2:
        return None
    rows = re.findall(r"^GPU.*", ask(("topo", "-m")) or "", re.MULTILINE)
    kinds = sorted(set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", "\n".join(rows))))
    if not kinds:
        return Finding(NOTE, "links", "nvidia-smi does not tell how the cards are connected")
    if all(kind.startswith("NV") for kind in kinds):
        return Finding(OK, "links", "all cards are connected by NVLink")
    way = "the processors" if {"NODE", "SYS"} & set(kinds) else "PCIe"
    means = "Lesson 3 measures what that costs; tensor parallelism (lesson 8) feels it most."
    return Finding(NOTE, "links", f"some cards are connected by {way} only ({', '.join(kinds)})", means)
