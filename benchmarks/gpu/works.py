"""Does the course work here at all: the doctor, `launch` over NCCL, a kernel that has used CUDA, the tests marked gpu."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.running import Part, Piece, Row, Skip, python
from course_lib.launch import launch, rank_device
from course_tools.doctor.examining import examine


def pieces(part: Part) -> Iterator[Piece]:
    yield "doctor", lambda: doctor(part)
    yield "launch", lambda: launched(part)
    yield "launch after CUDA, in a script", lambda: after_cuda(part)
    yield "tests marked gpu", lambda: tests(part)
    yield "launch after CUDA, in a notebook", lambda: notebook(part)


def doctor(part: Part) -> Iterable[Row]:
    """What `beyond doctor` finds; in a small run only its first finding."""
    for finding in islice(examine(), 1 if part.small else None):
        yield "finding", finding.about, asdict(finding)


def on_a_rank() -> dict[str, Any]:
    """A rank's device, and the sum of a small all-reduce there."""
    ones = torch.ones(1 << 20, device=rank_device())
    dist.all_reduce(ones)
    return {"device": str(ones.device), "sum": ones[0].item()}


def launched(part: Part) -> Iterable[Row]:
    """One rank over NCCL; and one rank more than there are GPUs, which all run on the CPU."""
    for ranks in (1, torch.cuda.device_count() + 1) if part.on_gpu else (1,):
        run = launch(on_a_rank, ranks=ranks, quiet=True, timeout=part.seconds_left)
        assert {result["sum"] for result in run.results} == {float(ranks)}, run.results
        (call,) = [call for call in run.collectives if call.rank == 0]
        yield "launch", f"{ranks} ranks", run.results[0] | {
            "summary": run.stamp["summary"], "seconds": run.seconds, "bytes": call.bytes, "call_seconds": call.seconds,
        }  # fmt: skip


CELLS = (
    "import torch\ntorch.ones(8, device='cuda' if torch.cuda.is_available() else 'cpu').sum().item()",
    "from benchmarks.gpu.works import on_a_rank\nfrom course_lib.launch import launch\n"
    "run = launch(on_a_rank, ranks=1, quiet=True, timeout=100)",
    "print('ran:', run.stamp['summary'], 'after CUDA' if torch.cuda.is_initialized() else '')",
)


def after_cuda(part: Part) -> Iterable[Row]:
    """A script that has used CUDA and then launches: its ranks must not be forked from it."""
    importlib.import_module("cloudpickle")  # else skipped
    yield from _said(*python(part, "-c", "\n".join(CELLS)), "a script")


def notebook(part: Part) -> Iterable[Row]:
    """The same in a Jupyter kernel."""
    importlib.import_module("cloudpickle")
    from benchmarks.gpu.lessons import cells_of, execute, text_of

    done, errors = execute(cells_of(CELLS), os.curdir, part)
    yield from _said(text_of(done), "; ".join(errors), "a notebook")


def _said(output: str, errors: str, where: str) -> Iterable[Row]:
    found = re.findall(r"^ran: (.*)$", output, re.MULTILINE)
    if not found:
        raise RuntimeError(errors.strip()[-500:] or "nothing was printed")
    yield "after CUDA", where, {"summary": found[0]}


def tests(part: Part) -> Iterable[Row]:
    """pytest's verdict on each test that needs a GPU."""
    importlib.import_module("pytest")  # else skipped
    if not part.on_gpu:
        raise Skip("these tests need a GPU")
    # without the project's own options, which name plugins that may not be here
    said = python(part, "-m", "pytest", "-o", "addopts=", "--noconftest", "-v", "--tb=line", "tests/test_gpu.py")[0]
    verdicts = re.findall(r"^\S+::(\S+) (PASSED|SKIPPED|FAILED|ERROR)\b", said, re.MULTILINE)
    for name, verdict in verdicts:
        yield {"PASSED": "test", "SKIPPED": "skipped"}.get(verdict, "failed"), name, {"why": verdict.lower()}
    if not verdicts or "FAILED" in said:
        raise RuntimeError(said[-1500:])
