"""Ask the machine how many GPUs it has, and whether a folder is on a local disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

COUNT_VARIABLE = "BEYOND_ONE_GPU_GPUS"
MOUNTS = "/proc/self/mountinfo"
# Locks there are missing, slow to come free, or known to one machine of several.
NETWORK = ("nfs", "cifs", "smb", "fuse.", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "afs")


def count_gpus() -> int:
    """The GPUs of this machine: what BEYOND_ONE_GPU_GPUS says, else what `nvidia-smi -L` lists."""
    value = os.environ.get(COUNT_VARIABLE, "")
    if value:
        if not value.isdecimal() or not 1 <= int(value) <= 64:
            raise ValueError(f"{COUNT_VARIABLE}={value}: give the number of GPUs, 1 to 64.")
        return int(value)
    if shutil.which("nvidia-smi") is not None:
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(
                f"nvidia-smi does not answer ({error}): set {COUNT_VARIABLE}=4, or mend the driver."
            ) from None
        found = len(re.findall(r"^GPU \d+:", listing.stdout, re.MULTILINE))
        if listing.returncode == 0 and found:
            return found
    raise ValueError(
        f"nvidia-smi lists no GPU on this machine, so there is nothing to lend; {COUNT_VARIABLE}=4 pretends."
    )


def network_file_system(folder: str) -> str:
    """The kind of network file system that ``folder`` lies on (``"nfs4"``); "" for a local one, or where none can tell."""
    device = os.stat(folder).st_dev
    try:
        with open(MOUNTS) as file:
            mounts = file.read()
    except OSError:  # macOS
        return ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"] and after.startswith(NETWORK):
            return after.split()[0]
    return ""
