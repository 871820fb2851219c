"""Run inside each rank: join, call the function, leave the result or the reason where the notebook finds it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from course_lib.files import write_atomically
from course_lib.launch.group import LOOPBACK, exit_now, process_group

if TYPE_CHECKING:
    from course_lib.observe.collectives import Recorder

# What a rank hears when a *peer* died or left: an effect of somebody else's failure, hardly ever the cause.
PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "application timeout caused pair closure",
    "remote process exited",
    "nccl communicator was aborted",
)
# Seconds that a rank which has returned keeps its connections up. A peer that is a little behind still reads from
# them; one that waits in a collective which this rank never joined shall hear of it soon.
LINGER = 0.3
GRACE = 0.5  # seconds that a rank which lost a peer waits before it ends, so that the cause is seen first


@dataclass
class Job:
    """What every rank of one launch needs to know; written once into the private folder."""

    function: bytes  # cloudpickle of (function, args, kwargs)
    ranks: int
    backend: str
    timeout: float
    notebook: int  # process id of who launched
    environment: dict[str, str]
    path: list[str]  # the notebook's sys.path
    start_method: str | None  # of the notebook's multiprocessing; None where it is Python's own choice
    threads: int


@dataclass
class Failure:
    """Why a rank ended without a result."""

    rank: int
    kind: str  # "raised", "result" (it cannot travel back) or "arrival" (the function could not be read)
    type: str
    message: str
    frames: list[tuple[str, int, str]] = field(default_factory=list)  # (file, line, function), outermost first
    lost_peer: bool = False


_in_rank = False
_notebook = 0  # process id of who launched this rank


def inside_a_rank() -> bool:
    """True in a process that :func:`main` runs in."""
    return _in_rank


def main(folder: str) -> None:
    """Entry point that the elastic agent starts in each rank. ``folder``: the launch's private folder."""
    import cloudpickle

    global _in_rank
    _in_rank = True
    rank = int(os.environ["RANK"])
    os.setpgid(0, 0)  # a process group of its own: whatever this rank starts ends with it
    with open(f"{folder}/pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    with open(f"{folder}/job", "rb") as file:
        job: Job = cloudpickle.loads(file.read())
    _die_with(job.notebook, folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the notebook, which then ends the ranks
    stacks = open(f"{folder}/stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    _take_environment(job.environment)
    # a child of a forkserver makes its own children by forkserver too: a DataLoader's workers would import all anew
    multiprocessing.set_start_method(job.start_method, force=True)
    sys.path[:] = job.path  # as it is: multiprocessing writes the folder of the start in the place of ""
    try:
        _run(rank, job, folder)
    except BaseException as error:  # SystemExit too: a rank that calls sys.exit(3) has not returned a result
        _fail(rank, folder, "raised", error)


def _run(rank: int, job: Job, folder: str) -> None:
    import cloudpickle
    import torch

    from course_lib.observe.collectives import Pulse, Recorder

    torch.set_num_threads(job.threads)
    # as torchrun does: a library that finds it unset, Accelerate for one, chooses a number of its own, and says so
    os.environ.setdefault("OMP_NUM_THREADS", str(job.threads))
    try:
        call = cloudpickle.loads(job.function)
    except Exception as error:  # whatever a learner's module does on import
        _fail(rank, folder, "arrival", error)
    recorder = Recorder(pulse=Pulse(f"{folder}/pulse{rank}")).install()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = LOOPBACK
    with process_group(job.backend, init_method=f"file://{folder}/store", timeout=job.timeout + 60):
        write_atomically(f"{folder}/joined{rank}", b"")
        _wait_for_all(f"{folder}/joined", job.ranks)
        try:
            packed = _packed(rank, folder, recorder, *call)
        except BaseException as error:  # caught in here: the way out of the group may wait for the peers
            _fail(rank, folder, "raised", error)
        write_atomically(f"{folder}/result{rank}", packed)
        _wait_for_all(f"{folder}/result", job.ranks, LINGER)


def _packed(
    rank: int,
    folder: str,
    recorder: Recorder,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bytes:
    """What the function returns, with the report of its run, as the notebook reads it."""
    import cloudpickle

    from course_lib.observe.memory import process_report
    from course_lib.observe.wire import WireMeter

    began = time.perf_counter()
    with WireMeter() as wire:
        value = function(*args, **kwargs)
    seconds = time.perf_counter() - began
    report = {
        "collectives": recorder.collect(),
        "memory": process_report(),
        "seconds": seconds,
        "wire_bytes": wire.bytes,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
    }
    try:
        return cloudpickle.dumps((value, report))
    except Exception as error:  # cloudpickle raises what the object's own __reduce__ raises
        _fail(rank, folder, "result", error, named=type(value).__name__)


def _wait_for_all(path: str, ranks: int, seconds: float = float("inf")) -> None:
    """Until ``path`` followed by its number is there for every rank. (Should one fail, the agent ends this process.)"""
    give_up = time.monotonic() + seconds
    while not all(os.path.exists(f"{path}{r}") for r in range(ranks)) and time.monotonic() < give_up:
        time.sleep(0.001)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _fail(rank: int, folder: str, kind: str, error: BaseException, named: str = "") -> NoReturn:
    """Leave the reason on disk, where the notebook finds it, and end this rank."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0, "<syntax>"))
    message = str(error)
    failure = Failure(
        rank,
        kind,
        named or type(error).__name__,
        message,
        frames,
        kind == "raised" and any(sign in message.lower() for sign in PEER_LOST),
    )
    if not _has_ended(_notebook, seconds=0):
        with contextlib.suppress(FileNotFoundError):  # the folder: the notebook ends just now
            write_atomically(f"{folder}/error{rank}", json.dumps(asdict(failure)).encode())
    if _has_ended(_notebook, seconds=0):  # nobody reads a report any more, and nobody else clears up
        _end(folder)
    if failure.lost_peer:
        time.sleep(GRACE)
    exit_now(1)


def _take_environment(environment: dict[str, str]) -> None:
    """The forkserver froze the environment when it started; what the notebook set since then counts too."""
    keep = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    keep |= {name for name in os.environ if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))}
    for name in set(os.environ) - set(environment) - keep:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name not in keep})


def _die_with(notebook: int, folder: str) -> None:
    """End this rank, and what it started, as soon as process ``notebook`` is gone, however it went.

    Asking the kernel for a signal at the parent's death does not serve: a rank's parent is the forkserver, and each
    rank holds the pipe that keeps the forkserver alive.
    """

    global _notebook
    _notebook = notebook

    def watch() -> None:
        _has_ended(notebook)
        _end(folder)

    threading.Thread(target=watch, daemon=True, name="die-with-notebook").start()


def _end(folder: str) -> NoReturn:
    """Leave nothing: neither the launch's folder nor this rank, nor what it started."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")


def _has_ended(pid: int, seconds: float | None = None) -> bool:
    """Wait for the end of process `pid`, as long as it takes or at most `seconds`; True when it has ended."""
    with contextlib.suppress(AttributeError, OSError):  # macOS has no pidfd, and a sandbox may forbid it
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        import select

        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)
    give_up = time.monotonic() + (float("inf") if seconds is None else seconds)
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= give_up:
            return False
        time.sleep(0.5)
