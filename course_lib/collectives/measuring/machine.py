"""How the GPUs of this machine are joined, in the words of the driver."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from course_lib.stamp import stamp

NO_CUDA = (
    "There is no CUDA device here, so there is no topology of GPUs to read: the ranks of this machine talk over memory."
)


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


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
