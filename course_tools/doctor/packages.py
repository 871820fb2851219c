"""The packages that the lessons need, each imported in a process of its own, and two real ranks."""

from __future__ import annotations

import glob
import os
import re

from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding
from course_tools.doctor.probe import Answer, probe

TORCH = """
import json, torch
cards = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        cards.append({"name": p.name, "memory": p.total_memory, "capability": [p.major, p.minor]})
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
    "cards": cards, "nccl": torch.distributed.is_nccl_available(), "gloo": torch.distributed.is_gloo_available()}))
"""
QUANTIZED = """
import json, torch, bitsandbytes as bnb
from bitsandbytes import functional as F
weight = torch.randn(64, 64)
packed, state = F.quantize_4bit(weight, quant_type="nf4")
off = (F.dequantize_4bit(packed, state) - weight).abs().max().item()
print(json.dumps({"version": bnb.__version__, "off": off}))
"""
DEEPSPEED = """
import json, deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
print(json.dumps({"version": deepspeed.__version__, "buildable": bool(CPUAdamBuilder().is_compatible(verbose=False))}))
"""
VERSION = """
import json, importlib.metadata
print(json.dumps({"version": importlib.metadata.version(%r)}))
"""
ALL_REDUCE = """
import json
from course_lib.launch import launch
def add():
    import torch, torch.distributed as dist
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    x = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(x)
    return x[0].item(), dist.get_backend()
run = launch(add, ranks=2, quiet=True, timeout=%g)
print(json.dumps({"sums": [r[0] for r in run.results], "backend": run.results[0][1]}))
"""
RANKS_SECONDS = 40.0
SETUP = "Type make setup (or make lab), in the environment that you start Jupyter from."


def torch_works(answer: Answer) -> Finding:
    """Judge the answer to TORCH."""
    if answer.failed:
        return answer.finding("PyTorch", "No lesson runs.", _torch_mend(answer.failed))
    build = f"CUDA {answer.values['cuda']}" if answer.values["cuda"] else "CPU build"
    return Finding(OK, "PyTorch", f"{answer.values['version']}, {build}")


def _torch_mend(failed: str) -> str:
    if "No module named" in failed:
        return SETUP
    if re.search(r"lib(cuda|cudnn|cublas|nccl|nv)|CUDA", failed):
        return (
            "CUDA is half installed: a library that this PyTorch was built for is missing. pip install --force-reinstall "
            "torch brings its own, or take the CPU build that site/install.md names."
        )
    return "pip install --force-reinstall torch; if that does not help, search for the message above."


def quantization() -> Finding:
    """Quantize a small matrix with bitsandbytes."""
    answer = probe(QUANTIZED)
    if answer.failed:
        return answer.finding("bitsandbytes", "QLoRA and 8-bit optimizers (lessons 2, 6, 7, 8) will not run.", SETUP)
    return Finding(OK, "bitsandbytes", f"{answer.values['version']}, NF4 tried")


def zero() -> Finding:
    """Import DeepSpeed, without building anything."""
    answer = probe(DEEPSPEED, DS_ACCELERATOR="cpu")
    if answer.failed:
        return answer.finding("DeepSpeed", "Lesson 5, and the ZeRO parts of 7 and 8, will not run.", SETUP)
    kernels = "can build its kernels" if answer.values["buildable"] else "builds no kernels here"
    return Finding(OK, "DeepSpeed", f"{answer.values['version']}, {kernels}; the course needs none of them")


def installed(package: str, lessons: str) -> Finding:
    """Check that a package is installed; importing it is left to the lesson that needs it."""
    answer = probe(VERSION % package)
    if answer.failed:
        return Finding(PROBLEM, package, "is not installed", f"{lessons} will not run.", SETUP)
    return Finding(OK, package, answer.values["version"])


def build_locks(folder: str | None = None) -> Finding:
    """Look for locks of builds that were killed: every later build of the same kernel would wait for them for ever."""
    cache = folder or os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    left = sorted(glob.glob(os.path.join(glob.escape(cache), "**", "lock"), recursive=True))
    if left:
        return Finding(
            NOTE,
            "build locks",
            f"{len(left)} in torch's extensions cache",
            "If no build is running now, a killed one left them, and the next use of that kernel hangs without a word (DeepSpeed "
            "with its own kernels, lesson 5).",
            "If nothing is being built: rm " + " ".join(map(_short, left)),
        )
    return Finding(OK, "build locks", "none left behind")


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def all_reduce() -> Finding:
    """Launch two ranks and add a number of each, over what this machine would use."""
    return sums_are_right(probe(ALL_REDUCE % (RANKS_SECONDS - 5), seconds=RANKS_SECONDS))


def sums_are_right(answer: Answer) -> Finding:
    """Judge the answer to ALL_REDUCE."""
    mend = (
        "A firewall or a security program may keep processes of this machine from talking over the loopback interface; "
        "in a container, allow it."
    )
    if answer.failed:
        return answer.finding("two ranks", "No lesson from 3 on runs.", mend)
    if answer.values["sums"] != [3.0, 3.0]:
        says = f"1 + 2 gave {answer.values['sums']}"
        return Finding(PROBLEM, "two ranks", says, "No lesson from 3 on can be trusted.", mend)
    return Finding(OK, "two ranks", f"an all-reduce over {answer.values['backend']} adds up")
