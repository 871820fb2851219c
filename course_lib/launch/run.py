"""``launch``: a function, also one defined in this notebook, on several real ranks, and back with what they did."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from course_lib.launch import agent, failures
from course_lib.launch.group import choose_backend
from course_lib.launch.output import Stream, ranks_in_words, to_cell
from course_lib.launch.rank import GRACE, Job
from course_lib.observe.collectives import Collective

JOIN_SECONDS = 120.0  # ranks that have not met by then never will; the first start imports PyTorch, on a busy machine


@dataclass
class Run:
    """What came back from a launch.

    Attributes:
        results: what each rank returned, by rank.
        logs: what each rank printed, by rank.
        seconds: from the call to the last result.
        rank_seconds: seconds inside the function, by rank.
        collectives: every collective of every rank, in the order of rank and issue.
        memory: per rank, bytes by category (see ``course_lib.observe``).
        wire_bytes: bytes that each rank sent over its sockets, counted by the system; ``None`` where it does not count.
        stamp: what it ran on: ranks, backend, device, threads a rank.
    """

    results: list[Any]
    logs: list[str]
    seconds: float
    rank_seconds: list[float]
    collectives: list[Collective]
    memory: list[dict[str, Any]]
    wire_bytes: list[int | None]
    stamp: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Run({self.stamp['summary']}, {self.seconds:.2f} s, {len(self.collectives)} collectives)"


def launch(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    timeout: float = 60.0,
    backend: str | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Run:
    """Run ``function(*args, **kwargs)`` on ``ranks`` real processes with the default process group up.

    Inside the function ``torch.distributed`` is initialised (NCCL where every rank gets a GPU, gloo on the CPU
    otherwise) and the device is set. Ranks are forked from a warm server that has PyTorch imported and has never
    touched CUDA, so it does not matter whether the notebook has. They talk over the loopback interface, meet in a
    private folder, and end with the call, with Ctrl-C and with the notebook, however that ends.

    Args:
        function: any function; one from a notebook cell travels by value.
        ranks: number of processes, 1 or more.
        timeout: seconds the function may take, counted from when all ranks have joined.
        backend: ``"gloo"``, ``"nccl"`` or ``None`` to let the machine decide.
        quiet: keep what the ranks print in ``run.logs`` without showing it.

    Raises:
        RankFailed: a rank raised or died; the message has the learner's own line and whom it took down.
        RanksHung: the timeout passed; the message says who waits where for whom.
        ValueError: ranks or timeout that make no sense, more NCCL ranks than GPUs.
        TypeError: a function or result that cannot travel, an argument that the function does not take.
    """
    _check(function, ranks, timeout, args, kwargs)
    chosen = choose_backend(ranks, backend)
    function_bytes = _pack(function, args, kwargs)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    device = "one GPU a rank" if chosen == "nccl" else f"CPU, {threads} thread{'s' * (threads > 1)} a rank"
    summary = f"{ranks} rank{'s' * (ranks > 1)}, {chosen}, {device}"
    if not quiet:
        first = "" if agent.is_warm() else " (first launch of this session: importing PyTorch once, a few seconds)"
        to_cell(f"launch: {summary}{first}")
    began = time.perf_counter()
    agent.warm()
    folder = tempfile.mkdtemp(prefix="beyond-one-gpu-")  # mode 0700: nobody else reads or joins
    try:
        job = Job(function_bytes, ranks, chosen, timeout, os.getpid(), dict(os.environ), threads)
        _write_job(folder, job)
        stream = Stream(f"{folder}/logs", ranks, None if quiet else to_cell)
        exit_codes = _watch(folder, ranks, timeout, stream)
        outcome = _read_results(folder, ranks, exit_codes)
        return _assemble(outcome, stream.logs, time.perf_counter() - began, summary, chosen, ranks)
    finally:
        _end(folder, ranks)
        shutil.rmtree(folder, ignore_errors=True)


def _check(function: Any, ranks: Any, timeout: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if not callable(function):
        raise TypeError(
            f"launch() takes the function itself, and got {type(function).__name__}: write launch(train, ranks=2), "
            "not launch(train(), ranks=2)."
        )
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: give the number of processes to start, 1 or more.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r}: give the seconds that the ranks may take, more than 0.")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some built-ins have none; the rank will tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(_wrong_arguments(function, signature, kwargs, error)) from None


def _wrong_arguments(function: Any, signature: inspect.Signature, kwargs: dict[str, Any], error: TypeError) -> str:
    name = getattr(function, "__name__", "the function")
    known = [*signature.parameters, "ranks", "timeout", "backend", "quiet"]
    unknown = [k for k in kwargs if k not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{name}() takes no argument {unknown[0]!r}.{hint} It takes {name}{signature}."
    return f"{name}{signature} cannot be called with what launch() was given: {error}."


def _pack(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # the object's own __reduce__ decides what is raised
        culprit = _culprit(function, args, kwargs)
        raise TypeError(
            f"{culprit or getattr(function, '__name__', 'the function')} cannot travel to the ranks ({error}). "
            "Create files, locks, loaders and generators inside the function, and pass plain values or tensors."
        ) from None


def _culprit(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Name of the first argument, global or closure variable of the function that cannot be pickled."""
    import cloudpickle

    named: dict[str, Any] = {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f"argument {name!r}": value for name, value in kwargs.items()}
    with contextlib.suppress(TypeError, ValueError):
        variables = inspect.getclosurevars(function)
        named |= {f"variable {name!r}": v for name, v in {**variables.globals, **variables.nonlocals}.items()}
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - any refusal names it
            return f"{name} ({type(value).__name__})"
    return None


def _write_job(folder: str, job: Job) -> None:
    import cloudpickle

    with open(f"{folder}/job", "wb") as file:
        file.write(cloudpickle.dumps(job))


def _watch(folder: str, ranks: int, timeout: float, stream: Stream) -> dict[int, int]:
    """Follow the ranks to their end, one way or another. Returns the exit codes that the agent saw."""
    thread = agent.Agent(folder, ranks)
    thread.start()
    joined_at: float | None = None
    started, failed_at = time.monotonic(), None
    try:
        while thread.is_alive():
            thread.join(0.02)
            stream.pump()
            now = time.monotonic()
            if joined_at is None and all(os.path.exists(f"{folder}/joined{r}") for r in range(ranks)):
                joined_at = now
            if failed_at is None and any(os.path.exists(f"{folder}/error{r}") for r in range(ranks)):
                failed_at = now
            if failed_at is not None and now - failed_at > 2 * GRACE:
                _end(folder, ranks)  # the agent asks politely and waits; a rank deep in a library does not hear it
            elif joined_at is not None and now - joined_at > timeout:
                _read_stacks(folder, ranks)
                raise failures.hung(folder, ranks, timeout)
            elif joined_at is None and failed_at is None and now - started > max(timeout, JOIN_SECONDS):
                missing = [r for r in range(ranks) if not os.path.exists(f"{folder}/joined{r}")]
                raise failures.RanksHung(
                    f"{ranks_in_words(missing)} did not join the process group within {now - started:.0f} s. "
                    "Is the machine out of memory, or very busy?"
                )
    finally:
        give_up = time.monotonic() + 10
        while thread.is_alive() and time.monotonic() < give_up:  # Ctrl-C or a timeout
            _end(folder, ranks)  # again and again: a rank that was just starting had no pid file yet
            thread.join(0.1)
        stream.pump(final=True)
    if thread.error is not None:
        raise thread.error
    return thread.failed


def _read_stacks(folder: str, ranks: int) -> None:
    """Ask every rank for its stack; the answer is written by a C signal handler, so a rank stuck in C answers too."""
    _signal(folder, ranks, signal.SIGUSR1, whole_group=False)
    deadline = time.monotonic() + 1.0
    expected = [f"{folder}/stack{r}" for r in range(ranks) if not os.path.exists(f"{folder}/result{r}")]
    while time.monotonic() < deadline and not all(os.path.exists(p) and os.path.getsize(p) for p in expected):
        time.sleep(0.02)
    time.sleep(0.05)  # a stack longer than a page arrives in pieces


def _end(folder: str, ranks: int) -> None:
    """End every rank's process group; those that have ended already are no matter."""
    _signal(folder, ranks, signal.SIGKILL, whole_group=True)


def _signal(folder: str, ranks: int, which: signal.Signals, *, whole_group: bool) -> None:
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            with open(f"{folder}/pid{rank}") as file:
                pid = int(file.read())
            (os.killpg if whole_group else os.kill)(pid, which)


def _read_results(folder: str, ranks: int, exit_codes: dict[int, int]) -> list[tuple[Any, dict[str, Any]]]:
    import cloudpickle

    if exit_codes or not all(os.path.exists(f"{folder}/result{r}") for r in range(ranks)):
        raise failures.failed(folder, ranks, exit_codes)
    outcome = []
    for rank in range(ranks):
        with open(f"{folder}/result{rank}", "rb") as file:
            outcome.append(cloudpickle.loads(file.read()))
    return outcome


def _assemble(
    outcome: list[tuple[Any, dict[str, Any]]], logs: list[str], seconds: float, summary: str, backend: str, ranks: int
) -> Run:
    reports = [report for _, report in outcome]
    return Run(
        results=[value for value, _ in outcome],
        logs=logs,
        seconds=seconds,
        rank_seconds=[r["seconds"] for r in reports],
        collectives=[c for r in reports for c in r["collectives"]],
        memory=[r["memory"] | {"max_rss": r["max_rss_bytes"]} for r in reports],
        wire_bytes=[r["wire_bytes"] for r in reports],
        stamp={"summary": summary, "backend": backend, "ranks": ranks},
    )
