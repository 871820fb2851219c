"""Run a function, also one defined in this notebook, on several real ranks, and return what they did."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from course_lib.launch import agent, failures, supervision
from course_lib.launch import rank as rank_program
from course_lib.launch.checkout import patience, rank_path
from course_lib.launch.group import choose_backend
from course_lib.launch.leases import for_run
from course_lib.launch.output import Stream, to_cell
from course_lib.launch.rank import Job
from course_lib.observe.collectives import Collective
from course_lib.validation import did_you_mean


@dataclass
class Run:
    """What came back from a launch.

    Attributes:
        results: what each rank returned, by rank.
        logs: what each rank printed, by rank.
        seconds: from the call to the last result, less the wait for GPUs that a class shares.
        rank_seconds: seconds inside the function, by rank.
        collectives: every collective of every rank, in the order of rank and issue.
        memory: per rank, bytes by category (see ``course_lib.observe``).
        wire_bytes: bytes that each rank sent over its sockets, counted by the system; ``None`` where it does not count.
        stamp: what it ran on: ranks, backend, device, threads per rank.
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
    timeout: float | None = None,
    backend: str | None = None,
    threads: int | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Run:
    """Run ``function(*args, **kwargs)`` on ``ranks`` real processes with the default process group up.

    Inside the function ``torch.distributed`` is initialised (NCCL where every rank gets a GPU, gloo on the CPU
    otherwise) and the device is set. Ranks are forked from a warm server that has PyTorch imported and has never
    touched CUDA, so it does not matter whether the notebook has. They talk over the loopback interface, meet in a
    private folder, and end with the call, with Ctrl-C and with the notebook, however that ends. Where
    BEYOND_ONE_GPU_LEASES names a class's folder (see ``course_lib.launch.leases``), the run waits its turn for its GPUs.

    Args:
        function: any function; one from a notebook cell travels by value.
        ranks: number of processes, 1 or more.
        timeout: seconds the function may take, counted from when all ranks have joined; None: 60, or
            BEYOND_ONE_GPU_TIMEOUT where that is more.
        backend: ``"gloo"``, ``"nccl"`` or ``None`` to let the machine decide.
        threads: PyTorch's CPU threads per rank; ``None`` shares the machine's cores out.
        quiet: keep what the ranks print in ``run.logs`` without showing it; an error has its last lines.

    Raises:
        RankFailed: a rank raised or died; the message has the learner's own line and whom it took down.
        RanksHung: the timeout passed; the message says who waits where for whom.
        ValueError: ranks, timeout or threads that make no sense, more NCCL ranks than GPUs, or than the class shares.
        TypeError: a function or result that cannot travel, an argument that the function does not take.
        RuntimeError: called inside a rank.
    """
    if rank_program.inside_a_rank():
        raise RuntimeError(
            "launch() was called inside a rank: the ranks are up already. Use torch.distributed here, or call launch() "
            'from the notebook (in a script: below `if __name__ == "__main__":`).'
        )
    timeout = patience(60.0) if timeout is None else timeout
    _check(function, ranks, timeout, threads, args, kwargs)
    began = time.perf_counter()
    if not quiet and not agent.is_warm():
        to_cell("launch: the first of this session; a server imports PyTorch and Transformers once, a few seconds")
    agent.warm()  # before this process imports PyTorch itself: both at once
    chosen = choose_backend(ranks, backend)
    function_bytes = _pack(function, args, kwargs)
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    device = "one GPU a rank" if chosen == "nccl" else f"CPU, {threads} thread{'s' * (threads > 1)} a rank"
    summary = f"{ranks} rank{'s' * (ranks > 1)}, {chosen}, {device}"
    if not quiet:
        to_cell(f"launch: {summary}")
    job = Job(
        function=function_bytes,
        ranks=ranks,
        backend=chosen,
        timeout=timeout,
        notebook=os.getpid(),
        environment=dict(os.environ),
        path=rank_path(),
        start_method=multiprocessing.get_start_method(allow_none=True),
        threads=threads,
    )
    lease = for_run(ranks, chosen, backend, to_cell)
    folder = supervision.Folder()
    thread = agent.Agent(folder.path, ranks)
    clean_up = supervision.CleanUp(thread, folder, lease)
    open_gate = clean_up.gate.release
    try:
        clean_up.start()
        job.environment |= lease.take().environment
        _write_job(folder.path, job)
        stream = Stream(f"{folder.path}/logs", ranks, None if quiet else to_cell)
        exit_codes = supervision.follow(thread, timeout, stream)
        outcome = _read_results(folder.path, ranks, exit_codes)
        return _assemble(outcome, stream.logs, time.perf_counter() - began - lease.waited, summary, chosen, ranks)
    except failures.LaunchError as error:
        if quiet:
            error.show_output(stream.tail)
        raise
    except KeyboardInterrupt as pressed:
        pressed._render_traceback_ = _stopped  # IPython's hook: a page of the launcher's own lines helps nobody
        raise
    finally:
        open_gate()
        clean_up.join()


def _stopped() -> list[str]:
    return ["KeyboardInterrupt: you stopped the run; its ranks are ended."]


def _check(function: Any, ranks: Any, timeout: Any, threads: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if not callable(function):
        raise TypeError(
            f"launch() takes the function itself, and got {type(function).__name__}: write launch(train, ranks=2), "
            "not launch(train(), ranks=2)."
        )
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: give the number of processes to start, 1 or more.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r}: give the seconds that the ranks may take, more than 0.")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads={threads!r}: give the CPU threads of a rank, 1 or more, or leave it out.")
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
    known = [*signature.parameters, "ranks", "timeout", "backend", "threads", "quiet"]
    unknown = [k for k in kwargs if k not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
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
        except Exception:
            return f"{name} ({type(value).__name__})"
    return None


def _write_job(folder: str, job: Job) -> None:
    import cloudpickle

    with open(f"{folder}/job", "wb") as file:
        file.write(cloudpickle.dumps(job))


def _read_results(folder: str, ranks: int, exit_codes: dict[int, int]) -> list[tuple[Any, dict[str, Any]]]:
    import cloudpickle

    if exit_codes or not all(os.path.exists(f"{folder}/result{r}") for r in range(ranks)):
        raise failures.failed(folder, ranks, exit_codes)
    outcome = []
    for rank in range(ranks):
        with open(f"{folder}/result{rank}", "rb") as file:
            try:
                outcome.append(cloudpickle.load(file))
            except Exception as error:  # what the object's own __setstate__ raises
                raise TypeError(
                    f"what rank {rank} returned cannot be put together again outside its process group "
                    f"({type(error).__name__}: {error}). Return plain values or tensors: numbers, lists, dicts; of a "
                    "DTensor its .to_local() or .full_tensor()."
                ) from None
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
