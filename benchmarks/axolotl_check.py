"""How long a YAML waits for the course's own rules as a command, and for Axolotl's own validation, in the same run.

    python benchmarks/axolotl_check.py [--repeats 5]

Each is a process of its own, as a user would start it: from the shell to the answer, medians of several, alternating.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

CHECK = "import sys; from course_tools.axolotl.command import main; sys.exit(main(['good.yml', '--gpus', '4x24GiB', '--quick']))"
AXOLOTL = """
import yaml
from axolotl.utils.config import validate_config
from axolotl.utils.dict import DictDefault
capabilities = {"bf16": True, "fp8": False, "tf32": True, "n_gpu": 4, "n_node": 1, "compute_capability": "sm_80"}
with open("good.yml", encoding="utf-8") as file:
    validate_config(DictDefault(yaml.safe_load(file)), capabilities=capabilities, env_capabilities={"torch_version": "2.13.0"})
"""
QUIET = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT)}


def seconds(script: str, folder: Path) -> float:
    """From starting Python to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=os.environ | QUIET, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Print the medians and what was measured on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    from axolotl_yaml import make_folder

    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(Path(place) / "run")
        ours, theirs = [], []
        for repeat in range(repeats + 1):
            for script, times in ((CHECK, ours), (AXOLOTL, theirs)):
                taken = seconds(script, folder)
                if repeat:  # the first of each reads its files from the disk
                    times.append(taken)
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("axolotl", "torch"))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {versions}"
    )
    for name, times in (("beyond check --quick", ours), ("Axolotl's validate_config", theirs)):
        print(
            f"{name:28} median {statistics.median(times):6.2f} s   {min(times):.2f} to {max(times):.2f} s of {repeats}"
        )
    print(f"ratio of the medians {statistics.median(theirs) / statistics.median(ours):.0f}")


if __name__ == "__main__":
    main()
