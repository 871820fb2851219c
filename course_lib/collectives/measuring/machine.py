"""How the GPUs of this machine are joined, in the words of the driver and of NCCL."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from course_lib.launch import launch
from course_lib.notebook.ledger import stamp

NO_CUDA = (
    "There is no CUDA device here, so there is no topology of GPUs to read: the ranks of this machine talk over memory."
)
_SAYS = ("NCCL version", "Using network", "Channel", "Connected all", "via P2P", "via SHM", "via NET", "NVLS", "Trees")


@dataclass(frozen=True)
class Report:
    """Text as the machine gave it (one sentence where it has nothing to say), and its stamp."""

    text: str
    stamp: dict[str, str | int]

    def __str__(self) -> str:
        return self.text


def topology() -> Report:
    """``nvidia-smi topo -m``: for each pair of GPUs NV4 (that many NVLinks), PIX, PXB, PHB, NODE or SYS (by PCIe).

    Without CUDA one sentence that says so.
    """
    if not _gpus():
        return Report(NO_CUDA, stamp())
    if not shutil.which("nvidia-smi"):
        return Report("nvidia-smi is not on the PATH here, so the driver cannot be asked for the topology.", stamp())
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Report(f"nvidia-smi does not tell the topology here ({error}).", stamp())
    return Report(done.stdout.rstrip(), stamp())


def nccl_report(*, ranks: int | None = None) -> Report:
    """What NCCL itself says of its version, rings, trees and ways between GPUs, on its first all-reduce.

    Args:
        ranks: GPUs that take part; ``None`` for all. Without CUDA one sentence that says so.

    Raises:
        ValueError: more ranks than GPUs, fewer than 1.
    """
    gpus = _gpus()
    if not gpus:
        return Report(
            "There is no CUDA device here, so NCCL does not run: the collectives of this machine are gloo's.", stamp()
        )
    ranks = gpus if ranks is None else ranks
    with tempfile.TemporaryDirectory() as folder:
        launch(_talk, f"{folder}/nccl.%p", ranks=ranks, backend="nccl", quiet=True, timeout=120)
        lines: list[str] = []
        for path in sorted(glob.glob(f"{folder}/nccl.*")):
            with open(path, errors="replace") as file:
                lines += [line.rstrip() for line in file if any(word in line for word in _SAYS)]
    told = list(dict.fromkeys(line.split("NCCL INFO ")[-1] for line in lines))  # every rank says much of it
    return Report("\n".join(told) or "NCCL ran and reported nothing.", stamp(ranks=ranks, backend="nccl"))


def _talk(path: str) -> None:
    """In a rank: NCCL reads these when it makes its first communicator."""
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH,NET", NCCL_DEBUG_FILE=path)
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(2**20, device="cuda"))
    torch.cuda.synchronize()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
