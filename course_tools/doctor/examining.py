"""Examine this machine, several things at a time, in under 15 seconds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from course_lib.units import GIB
from course_tools.doctor import gpus, machine, packages
from course_tools.doctor.findings import PROBLEM, Finding
from course_tools.doctor.probe import probe

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
AT_ONCE = 3  # more would only wait for each other on two cores


def examine() -> Iterator[Finding]:
    """Yield the findings, most important first, each as soon as it is known.

    Nothing is left behind: no process, no file. If Python or PyTorch cannot run the course, findings that would only
    repeat that are left out.
    """
    first = machine.python_version()
    yield first
    if first.level == PROBLEM:
        yield from _machine()
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        torch = pool.submit(probe, packages.TORCH)
        slow = [
            pool.submit(one)
            for one in (packages.all_reduce, packages.zero, packages.quantization, *_installed(), machine.hub)
        ]
        yield from _machine()
        answer = torch.result()
        yield packages.torch_works(answer)
        if answer.failed:
            for one in slow:
                one.cancel()
            return
        yield gpus.cards(answer, gpus.driver())
        for finding in (gpus.sixteen_bit(answer), gpus.topology(answer, gpus.driver(("topo", "-m")))):
            if finding is not None:
                yield finding
        for one in slow:
            yield one.result()
        yield packages.build_locks()


def _installed() -> list[Callable[[], Finding]]:
    """Return checks of packages that only have to be installed."""
    wanted = (
        ("axolotl", "Lesson 7"),
        ("accelerate", "Lesson 4"),
    )
    return [
        lambda package=package, lessons=lessons: packages.installed(package, lessons) for package, lessons in wanted
    ]


def _machine() -> Iterator[Finding]:
    """Examine the machine without its packages."""
    yield machine.cores()
    yield machine.memory()
    yield machine.compiler()
    yield machine.disk(
        ROOT,
        "course's disk",
        needs=GIB,
        advice="Free some space: lessons write into runs/ beside the notebooks, which may be deleted.",
    )
    yield machine.disk(
        tempfile.gettempdir(), "temporary disk", needs=GIB, advice="Free some space, or set TMPDIR to another disk."
    )
    yield machine.writable(
        ROOT,
        "course's folder",
        means="Lessons write into runs/ beside them and stop with an error.",
        mend="Copy the course to a folder of yours.",
    )
    yield machine.writable(
        os.environ.get("BEYOND_ONE_GPU_HOME") or _user_folder("data"),
        "progress",
        means="All lessons run, and what you pass is forgotten when the notebook closes.",
        mend="Set BEYOND_ONE_GPU_HOME to a folder that you can write.",
    )
    yield machine.writable(
        os.environ.get("BEYOND_ONE_GPU_CACHE") or _user_folder("cache"),
        "cache",
        means="SmolLM2, which lessons 2, 6 and 8 use, cannot be kept.",
        mend="Set BEYOND_ONE_GPU_CACHE to a folder that you can write.",
    )
    yield machine.shared_memory()


def _user_folder(kind: str) -> str:
    """Return where platformdirs puts the learner's data or cache; the home folder if it is not installed."""
    try:
        import platformdirs
    except ImportError:
        return os.path.expanduser("~")
    return {"data": platformdirs.user_data_dir, "cache": platformdirs.user_cache_dir}[kind]("beyond-one-gpu")
