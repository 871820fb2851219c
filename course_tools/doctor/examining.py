"""The doctor's list: Python, the machine, PyTorch and its GPUs, then what is tried in processes of their own."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from course_tools.doctor import findings, gpus, limits
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Answer, Finding, probe

SETUP = "Type make setup (or make lab), in the environment that you start Jupyter from."

TORCH = """
import json, torch
seen = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
seen = [torch.cuda.get_device_properties(i) for i in seen]
cards = [{"name": c.name, "memory": c.total_memory, "major": c.major, "minor": c.minor} for c in seen]
backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, cards=cards, backends=backends)))
"""
ALL_REDUCE = """
import json
from course_lib.launch import launch, rank_device
def add():
    import torch, torch.distributed as dist
    x = torch.full((1000,), dist.get_rank() + 1.0, device=rank_device())
    dist.all_reduce(x)
    return x[0].item(), dist.get_backend()
results = [result for ranks in (2, 1) for result in launch(add, ranks=ranks, quiet=True, timeout=%g).results]
print(json.dumps({"sums": [r[0] for r in results], "backends": sorted({r[1] for r in results})}))
"""
KERNEL = """
import ipykernel, json
from jupyter_client.kernelspec import KernelSpecManager
print(json.dumps({"python": KernelSpecManager().get_kernel_spec("python3").argv[0]}))
"""
DEEPSPEED = "import deepspeed, json; print(json.dumps({'version': deepspeed.__version__}))"
BITSANDBYTES = """
import bitsandbytes, json, torch
packed, state = bitsandbytes.functional.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
bitsandbytes.functional.dequantize_4bit(packed, state)
print(json.dumps({"version": bitsandbytes.__version__}))
"""


def python(version: Sequence[int] = sys.version_info[:3]) -> Finding:
    """Check that the course runs on this Python."""
    says = f"Python {'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if not (3, 11) <= tuple(version[:2]) <= (3, 13):
        means = "No lesson runs: the course needs Python 3.11, 3.12 or 3.13."
        return Finding(PROBLEM, "Python", says, means, "Install one of them, then: make lab PYTHON=python3.12")
    if tuple(version[:2]) != (3, 11):
        return Finding(NOTE, "Python", says, "The tests were run with 3.11; nothing known speaks against this one.")
    return Finding(OK, "Python", says)


def packages(installed: Callable[[str], str] = metadata.version) -> Finding:
    """Compare the packages that lessons and labs use with their pins."""
    # of the lists, what comes before the site's and the tests' own packages
    pins = (limits.ROOT / "requirements.txt").read_text(encoding="utf-8").split("\n# The course as a site")[0]
    pins += (limits.ROOT / "requirements-no-deps.txt").read_text(encoding="utf-8").split("\n# Megatron-core")[0]
    missing, other, wanted = [], [], re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE)
    for name, pin in wanted:
        try:
            version = installed(name)
            if version.split("+")[0] != pin:  # torch's builds: 2.13.0+cpu
                other.append(f"{name} {version} (not {pin})")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        means = "Lessons that import them stop: lesson 4 Accelerate, lesson 5 DeepSpeed, lesson 7 Axolotl's."
        return Finding(PROBLEM, "packages", f"{len(missing)} missing: {', '.join(missing[:5])}", means, SETUP)
    if other:
        means = "The tests were run with the pinned versions; pyproject.toml has the ranges that should work."
        return Finding(NOTE, "packages", f"{len(other)} differ: {', '.join(other[:5])}", means, SETUP)
    return Finding(OK, "packages", f"all {len(wanted)} are the pinned versions")


def pytorch(answer: Answer) -> Finding:
    """Judge the answer to TORCH."""
    if not answer.failed:
        build = f"CUDA {answer.values['cuda']}" if answer.values["cuda"] else "CPU build"
        backends = " and ".join(answer.values["backends"])
        return Finding(OK, "PyTorch", f"{answer.values['version']}, {build}, with {backends}")
    mend = "pip install --force-reinstall torch; if that does not help, search for the message above."
    if "No module named" in answer.failed:
        mend = SETUP
    elif re.search(r"lib(cuda|cudnn|cublas|nccl|nv)|CUDA", answer.failed):
        mend = "A library of CUDA is missing: pip install --force-reinstall torch, or the CPU build (site/install.md)."
    return answer.finding("PyTorch", "No lesson runs.", mend)


def two_ranks(answer: Answer | None = None) -> Finding:
    """Launch two ranks, then one, that add their numbers: over NCCL where each has a GPU, else over gloo."""
    seconds = 3 * findings.SECONDS
    answer = answer or probe(ALL_REDUCE % (seconds / 2 - 2), seconds=seconds)
    mend = "A firewall or a container may keep processes from talking over the loopback interface: allow it."
    if answer.failed:
        return answer.finding("two ranks", "No lesson from 3 on runs.", mend)
    if answer.values["sums"] != [3.0, 3.0, 1.0]:
        says = f"1 + 2, 1 + 2 and 1 gave {answer.values['sums']}"
        return Finding(PROBLEM, "two ranks", says, "No lesson from 3 on can be trusted.", mend)
    return Finding(OK, "two ranks", f"an all-reduce over {' and '.join(answer.values['backends'])} adds up")


def deepspeed(answer: Answer | None = None) -> Finding:
    """Import DeepSpeed, and look for the compiler that its own kernels want."""
    answer = answer or probe(DEEPSPEED, DS_ACCELERATOR="cpu")
    if answer.failed:
        return answer.finding("DeepSpeed", "Lesson 5, and the ZeRO parts of 7 and 8, will not run.", SETUP)
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), "")
    kernels = f"{compiler} could build its kernels" if compiler else "no C++ compiler to build its kernels"
    return Finding(OK, "DeepSpeed", f"{answer.values['version']}; {kernels}, which the course does not need")


def bitsandbytes(answer: Answer | None = None) -> Finding:
    """Quantize a small matrix."""
    answer = answer or probe(BITSANDBYTES)
    if answer.failed:
        return answer.finding("bitsandbytes", "QLoRA and 8-bit optimizers (lessons 2, 6, 7, 8) will not run.", SETUP)
    return Finding(OK, "bitsandbytes", f"{answer.values['version']}, NF4 tried")


def kernel(answer: Answer | None = None) -> Finding:
    """Check that notebooks, which ask for the kernel "python3", run in this environment."""
    answer = answer or probe(KERNEL)
    if answer.failed:
        return answer.finding("kernel", "Notebooks do not run here; scripts do.", SETUP)
    path = answer.values["python"]  # a mere "python" stands for the one that starts Jupyter
    here = os.path.realpath(os.path.dirname(sys.executable))
    if os.path.dirname(path) and os.path.realpath(os.path.dirname(path)) != here:
        mend = f"{sys.executable} -m ipykernel install --sys-prefix"
        return Finding(PROBLEM, "kernel", f"python3 is {path}", "Notebooks do not find this one's packages.", mend)
    return Finding(OK, "kernel", "notebooks run in this environment")


def build_locks(folder: str = "") -> Finding:
    """Look for locks of killed builds, for which every later build of the same kernel would wait for ever."""
    folder = folder or os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    locks = sorted(glob.glob(os.path.join(glob.escape(folder), "**", "lock"), recursive=True))
    if locks:
        means = (
            "If no build is running, a killed one left them, and DeepSpeed's kernels (lesson 5) hang without a word."
        )
        mend = "If nothing is being built: rm " + " ".join(locks)
        return Finding(NOTE, "build locks", f"{len(locks)} in torch's extensions cache", means, mend)
    return Finding(OK, "build locks", "none left behind")


MACHINE = (
    limits.cores,
    limits.threads,
    limits.memory,
    limits.shared_memory,
    limits.disk,
    limits.open_files,
    limits.port,
)
PYTORCH = (pytorch, gpus.cards, gpus.links)  # what PyTorch says of itself
TRIED = (two_ranks, deepspeed, bitsandbytes, kernel, limits.host_name, build_locks)  # may take seconds


def examine() -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known; on a quiet machine in under 15 seconds.

    If Python or PyTorch cannot run the course, what would only repeat that is left out.
    """
    first = python()
    yield first
    yield from map(_guarded, MACHINE)
    if first.level == PROBLEM:
        return
    yield _guarded(packages)
    with ThreadPoolExecutor(3) as pool:  # more would only wait for each other on two cores
        torch = pool.submit(probe, TORCH)
        tried = [pool.submit(_guarded, look) for look in TRIED]
        if torch.result().failed:
            yield pytorch(torch.result())
            for future in tried:
                future.cancel()
            return
        yield from filter(None, (_guarded(look, torch.result()) for look in PYTORCH))
        for future in tried:
            yield future.result()


def _guarded(look: Callable[..., Finding], *arguments: Answer) -> Finding:
    """Look at a machine that nobody has seen: what breaks the look is a finding, too."""
    try:
        return look(*arguments)
    except Exception as error:
        about = look.__name__.replace("_", " ")
        return Finding(PROBLEM, about, f"cannot be looked at: {type(error).__name__}: {error}")
