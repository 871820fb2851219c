"""Run the elastic agent behind ``torchrun`` inside this process, over a warm forkserver, without opening a port."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from course_lib.launch import rank as rank_program
from course_lib.launch.checkout import python_path

ALSO = "COURSE_LIB_PRELOAD"  # how `warm` tells the server, which is started by Python's own means

_starting = threading.Lock()
_imported: set[str] = set()  # what the server has beyond `preload.SLOW`
_in_agent = threading.local()


def is_warm() -> bool:
    """True when the forkserver of this process is up (it may still be importing)."""
    return multiprocessing.forkserver._forkserver._forkserver_pid is not None


def warm(*also: str) -> None:
    """Start the forkserver, which then imports PyTorch and Transformers beside the notebook. Returns at once.

    Args:
        also: further modules that every rank of this notebook will need. They are imported by the server too, so they
            must not touch the GPUs. A server that runs without them is replaced.
    """
    with _starting:
        if is_warm() and not _imported.issuperset(also):
            # it ends by itself only when the last process is gone that holds its pipe: nobody shall wait for that
            os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
            multiprocessing.forkserver._forkserver._stop()
        if not is_warm():
            _imported.update(also)
            multiprocessing.set_forkserver_preload(["course_lib.launch.server_imports"])
        multiprocessing.resource_tracker.ensure_running()  # it unblocks SIGINT, so it comes first
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # the server starts with Ctrl-C blocked, until it ignores it
            with _environment(_for_server()):
                multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _for_server() -> dict[str, str]:
    """Environment of the server, which Python 3.11 starts with the sys.path of a fresh interpreter."""
    return {
        ALSO: ",".join(sorted(_imported)),
        "PYTHONPATH": python_path(),
        "PYTHONSAFEPATH": "1",  # or the folder that the notebook is in would come first
    }


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def warm_on_cpu(*also: str, environment: Mapping[str, str] | None = None) -> None:
    """`warm`, with modules that look for GPUs while they are imported: DeepSpeed, and what imports it.

    On a machine with NVIDIA's driver they are left to the ranks, and `environment` is not set: a process that asked the
    driver for GPUs can have no forks that use them. Elsewhere DeepSpeed is told to use the CPU.

    Args:
        also: the modules.
        environment: variables that they read while they are imported.
    """
    if os.path.exists("/proc/driver/nvidia"):
        warm()
        return
    for name, value in {"DS_ACCELERATOR": "cpu", **(environment or {})}.items():
        os.environ.setdefault(name, value)
    warm(*also)


class Agent(threading.Thread):
    """One launch: ``torch.distributed.launcher.elastic_launch`` in a thread, so that Ctrl-C stays the notebook's.

    Attributes:
        failed: exit codes by local rank (negative: the signal), as far as the agent reports them.
        error: what the agent itself raised, if it could not do its work.
        abandoned: set it and the agent ends its work. Without this it would wait for ever for the return value of a
            rank that left with exit code 0.
    """

    def __init__(self, folder: str, ranks: int) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self.folder, self.ranks = folder, ranks
        self.failed: dict[int, int] = {}
        self.error: Exception | None = None
        self.abandoned = threading.Event()

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        _register_rendezvous()
        _quiet_agent_log()
        _in_agent.agent = self
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            run_id=os.path.basename(self.folder),
            rdzv_backend="in_process",
            rdzv_endpoint="127.0.0.1",
            local_addr="127.0.0.1",
            start_method="forkserver",
            monitor_interval=0.01,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=f"{self.folder}/logs", redirects=Std.ALL),
        )
        try:
            elastic_launch(config, rank_program.main)(self.folder)
        except ChildFailedError as error:
            self.failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except _Abandoned:
            return
        except Exception as error:  # kept, and raised in the caller's thread
            self.error = error


class _Abandoned(Exception):
    """Nobody waits for this launch any more."""


def _register_rendezvous() -> None:
    """One agent meets nobody: a store inside this process replaces the TCP port that a rendezvous would open."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    if "in_process" in rendezvous_handler_registry._registry:
        return

    class InProcess(RendezvousHandler):
        def __init__(self, parameters: RendezvousParameters) -> None:
            self._run_id = parameters.run_id
            self._agent: Agent = _in_agent.agent

        def get_backend(self) -> str:
            return "in_process"

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            return None

        def num_nodes_waiting(self) -> int:  # the agent asks each time that it has looked after its ranks
            if self._agent.abandoned.is_set():
                raise _Abandoned
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    rendezvous_handler_registry.register("in_process", InProcess)


def _quiet_agent_log() -> None:
    """The agent's own log repeats, at length and under a stack of its own, what the failure report says in a line."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


_original_preparation = multiprocessing.spawn.get_preparation_data


def _preparation_without_main(name: str) -> dict[str, Any]:
    """A rank gets its function by value, so it need not run the caller's script again to find it.

    Without this every rank would execute a plain script's top level once more (and a script without the
    ``if __name__ == "__main__"`` guard would launch ranks for ever). Only processes that an Agent starts are spared.
    """
    data = _original_preparation(name)
    if hasattr(_in_agent, "agent"):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


multiprocessing.spawn.get_preparation_data = _preparation_without_main
