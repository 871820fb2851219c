"""Follow the ranks of one launch until they have ended, and leave nothing of them behind."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import tempfile
import threading
import time

from course_lib.launch import agent, failures
from course_lib.launch.leases import Lease
from course_lib.launch.output import Stream, ranks_in_words
from course_lib.launch.rank import GRACE

JOIN_SECONDS = 120.0  # ranks that have not met by then never will; the first start imports PyTorch, on a busy machine
PREFIX = "beyond-one-gpu-"


class Folder:
    """The private folder of one launch (mode 0700: nobody else reads or joins), locked for as long as it is in use."""

    def __init__(self) -> None:
        _sweep()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = os.open(f"{self.path}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep() -> None:
    """Remove the folders of notebooks that were killed before their first rank was there to do it."""
    for path in glob.glob(f"{tempfile.gettempdir()}/{PREFIX}*"):
        try:
            status = os.stat(path)
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < 60:  # perhaps not locked yet
                continue
            handle = os.open(f"{path}/lock", os.O_CREAT | os.O_RDWR)
        except OSError:  # somebody else's, or gone already
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(handle)


def follow(thread: agent.Agent, timeout: float, stream: Stream) -> dict[int, int]:
    """Run the agent and show the ranks' output until they have ended. Returns the exit codes that the agent saw.

    Raises:
        RanksHung: ``timeout`` seconds after the last rank joined; or the ranks never met.
    """
    folder, ranks = thread.folder, thread.ranks
    started, joined_at, failed_at = time.monotonic(), None, None
    gone: set[int] = set()
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.02)
            stream.pump()
            now = time.monotonic()
            if joined_at is None and all(os.path.exists(f"{folder}/joined{r}") for r in range(ranks)):
                joined_at = now
            if failed_at is None or now - failed_at < GRACE / 2:  # later the agent ends the others
                gone |= {r for r in range(ranks) if _is_gone(folder, r)}
            if failed_at is None and (gone or any(os.path.exists(f"{folder}/error{r}") for r in range(ranks))):
                failed_at = now
            if failed_at is not None:
                if now - failed_at > 2 * GRACE:  # the agent asks politely; a rank deep in a library does not hear it
                    end_ranks(folder, ranks)
                    thread.abandoned.set()
            elif joined_at is not None and now - joined_at > timeout:
                _read_stacks(folder, ranks)
                raise failures.hung(folder, ranks, timeout)
            elif joined_at is None and now - started > max(timeout, JOIN_SECONDS):
                missing = [r for r in range(ranks) if not os.path.exists(f"{folder}/joined{r}")]
                raise failures.RanksHung(
                    f"{ranks_in_words(missing)} did not join the process group within {now - started:.0f} s. "
                    "Is the machine out of memory, or very busy?"
                )
    finally:
        stream.pump(final=True)
    if thread.error is not None:
        raise thread.error
    # to the agent, a rank that leaves with code 0 and without a result is a rank that has not answered yet
    return thread.failed | {rank: 0 for rank in gone if rank not in thread.failed}


def _is_gone(folder: str, rank: int) -> bool:
    """True for a rank that ended without a result and without a word."""
    try:
        with open(f"{folder}/pid{rank}") as file:
            os.kill(int(file.read()), 0)
        return False
    except (FileNotFoundError, ValueError):  # it has not started
        return False
    except ProcessLookupError:
        return not any(os.path.exists(f"{folder}/{outcome}{rank}") for outcome in ("result", "error"))


class CleanUp(threading.Thread):
    """Ends what is left of the ranks, removes the folder and gives the GPUs back, as soon as its ``gate`` is released.

    A thread of its own, started first: Ctrl-C, also a second and a third, interrupts only the wait for it. The gate is
    a bare lock because its release is one step of the interpreter, which no Ctrl-C can come before.
    """

    def __init__(self, agent_thread: agent.Agent, folder: Folder, lease: Lease) -> None:
        super().__init__(name="launch-clean-up")
        self._agent, self._folder, self._lease = agent_thread, folder, lease
        self.gate = threading.Lock()
        self.gate.acquire()

    def run(self) -> None:
        self.gate.acquire()
        give_up = time.monotonic() + 10
        self._agent.abandoned.set()
        end_ranks(self._agent.folder, self._agent.ranks)  # also after a good end: it may have left children
        while self._agent.is_alive() and time.monotonic() < give_up:
            self._agent.join(0.05)
            end_ranks(self._agent.folder, self._agent.ranks)  # again: a rank just starting had no pid file yet
        self._folder.remove()
        self._lease.give_back()


def end_ranks(folder: str, ranks: int) -> None:
    """End every rank's process group; those that have ended already are no matter."""
    _signal(folder, ranks, signal.SIGKILL, whole_group=True)


def _read_stacks(folder: str, ranks: int) -> None:
    """Ask every rank for its stack; the answer is written by a C signal handler, so a rank stuck in C answers too."""
    _signal(folder, ranks, signal.SIGUSR1, whole_group=False)
    deadline = time.monotonic() + 1.0
    expected = [f"{folder}/stack{r}" for r in range(ranks) if not os.path.exists(f"{folder}/result{r}")]
    while time.monotonic() < deadline and not all(os.path.exists(p) and os.path.getsize(p) for p in expected):
        time.sleep(0.02)
    time.sleep(0.05)  # a stack longer than a page arrives in pieces


def _signal(folder: str, ranks: int, which: signal.Signals, *, whole_group: bool) -> None:
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            with open(f"{folder}/pid{rank}") as file:
                pid = int(file.read())
            (os.killpg if whole_group else os.kill)(pid, which)
