"""How the GPUs of this machine are joined, in the words of the driver."""

from __future__ import annotations

import shutil
import subprocess


def topology() -> str:
    """``nvidia-smi topo -m``: for each pair of GPUs NV4 (that many NVLinks), PIX, PXB, PHB, NODE or SYS (by PCIe).

    One sentence where there is no CUDA, or nothing to ask.
    """
    if not _gpus():
        return "There is no CUDA device here, so there is no topology of GPUs to read: the ranks of this machine talk over memory."
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi is not on the PATH here, so the driver cannot be asked for the topology."
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not tell the topology here ({error})."
    return done.stdout.rstrip()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
