"""Run commands as a reader would type them (torchrun, accelerate launch); they end with the cell that started them.

A launcher such as torchrun puts its ranks into sessions of their own, so that neither Ctrl-C in a notebook nor the end
of a killed kernel reaches them. Here a small supervisor stands between the notebook and the command: when the notebook
is gone, it ends everything below it.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from course_lib.launch.checkout import patience, python_path

if TYPE_CHECKING:
    import psutil

GRACE = 5.0  # seconds in which a supervisor ends what is below it, before it is ended itself


def shell(command: str, *, timeout: float | None = None, check: bool = True, **environment: str) -> str:
    """Run a command and give back what it printed.

    ``torchrun``, ``accelerate`` and ``python`` are those of this environment. Nothing is shown while it runs: real
    launchers print pages of warnings; print the part that matters.

    Args:
        command: one command line, without shell syntax.
        timeout: seconds after which it is ended; None: 120, or BEYOND_ONE_GPU_TIMEOUT where that is more.
        check: raise when the command fails or does not end in time; False gives back what it printed, then with a last
            line that says so.
        environment: variables set for it.

    Raises:
        RuntimeError: it failed, or ran into the timeout; with the last lines that it printed.
        FileNotFoundError: there is no such command.
        ValueError: no command, or a timeout that is not above 0.
    """
    timeout = _checked(timeout)
    return Background(command, **environment).wait(timeout, check=check)


class Background:
    """A command that runs beside the notebook (one of two node agents, say) until :meth:`wait`, :meth:`end` or the end of
    its ``with`` block."""

    def __init__(self, command: str, **environment: str) -> None:
        words = _own_tools(shlex.split(command))
        self.command = command
        # a file, not a pipe: a pipe holds 64 KiB, and a command that nobody reads from yet would stop there
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "course_lib.launch.commands", str(os.getpid()), *words],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the notebook alone, which then ends the command
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "PYTHONUNBUFFERED": "1",  # a command that gets ended has still said what it said
                **environment,
            },
        )

    def wait(self, timeout: float | None = None, *, check: bool = True) -> str:
        """Everything it printed, once it has ended; raises as :func:`shell` does."""
        timeout = _checked(timeout)
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            message = f"`{self.command}` did not end within {timeout:g} s and was ended"
            if check:
                raise RuntimeError(f"{message}{self._tail()}") from None
            return f"{self._printed()}\n{message}.\n"
        except BaseException:  # Ctrl-C
            self.end()
            raise
        if check and code:
            raise RuntimeError(f"`{self.command}` ended with exit code {code}{self._tail()}")
        return self._printed()

    def processes(self) -> list[psutil.Process]:
        """The command, and then what runs below it, parents first: torchrun and its ranks."""
        return _below(self._process.pid)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the command and everything that it started."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:  # it cannot act, stopped for instance
            _end_below(self._process.pid)
            self._process.kill()
            self._process.wait()

    def _printed(self) -> str:
        file = self._output.fileno()
        content = os.pread(file, os.fstat(file).st_size, 0)
        return content.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")

    def _tail(self) -> str:
        lines = self._printed().splitlines()[-15:]
        return ":\n" + "\n".join(lines) if lines else "; it had printed nothing."


def _checked(timeout: float | None) -> float:
    if timeout is None:
        return patience(120.0)
    if not timeout > 0:
        raise ValueError(f"timeout={timeout}: give the command a number of seconds above 0.")
    return timeout


def _own_tools(words: list[str]) -> list[str]:
    """``torchrun`` of this environment also where its folder is not on the PATH."""
    if not words:
        raise ValueError("There is no command in an empty line: give one, `torchrun --help` for instance.")
    if words[0] in ("python", "python3"):
        return [sys.executable, *words[1:]]
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    found = shutil.which(words[0], path=os.pathsep.join(folders))
    if found is None:
        raise FileNotFoundError(f"There is no command {words[0]!r} in this environment.")
    return [found, *words[1:]]


def _end_below(pid: int, seconds: float = 3.0) -> None:
    """Kill every descendant of a process, and what they start meanwhile."""
    import psutil

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        below = _below(pid)
        if not below:
            return
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.01)


def _below(pid: int) -> list[psutil.Process]:
    """Every descendant that runs, parents first."""
    import psutil

    return [process for process in psutil.Process(pid).children(recursive=True) if _runs(process)]


def _runs(process: object) -> bool:
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _supervise(notebook: int, words: Sequence[str]) -> int:
    """Run the command; end it and all below it on SIGTERM, and when the notebook is gone."""
    if sys.platform == "linux":  # whose parent ends becomes a child of this process, and is found here
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: _give_up())
    try:
        command = subprocess.Popen(words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}")
        return 126

    def follow_the_notebook() -> None:
        while os.getppid() == notebook:  # becomes another at once, also while a killed notebook is still a zombie
            time.sleep(0.1)
        _give_up()

    threading.Thread(target=follow_the_notebook, daemon=True).start()
    code = command.wait()
    _end_below(os.getpid())  # what it left behind
    return code if code >= 0 else 128 - code


def _give_up() -> None:
    _end_below(os.getpid())
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[2:]))
