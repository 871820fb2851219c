"""Commands as a reader would type them (torchrun, accelerate launch), which end with the cell that started them.

A launcher such as torchrun puts its ranks into sessions of their own, so that neither Ctrl-C in a notebook nor the end
of a killed kernel reaches them. Here a small supervisor stands between the notebook and the command: when the notebook
is gone, it ends everything below it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence


def shell(command: str, *, timeout: float = 120.0, check: bool = True, **environment: str) -> str:
    """Run a command and give back what it printed.

    ``torchrun``, ``accelerate`` and ``python`` are those of this environment. Nothing is shown while it runs: real
    launchers print pages of warnings; print the part that matters.

    Args:
        command: one command line, without shell syntax.
        timeout: seconds after which it is ended.
        check: raise when the command fails.
        environment: variables set for it.

    Raises:
        RuntimeError: it failed, or ran into the timeout; with the last lines that it printed.
        FileNotFoundError: there is no such command.
    """
    return Background(command, **environment).wait(timeout, check=check)


class Background:
    """A command that runs beside the notebook (one of two node agents, say) until :meth:`wait` or :meth:`end`."""

    def __init__(self, command: str, **environment: str) -> None:
        self.command = command
        self._process = subprocess.Popen(
            [sys.executable, "-m", "course_lib.shell", str(os.getpid()), *_own_tools(shlex.split(command))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the notebook alone, which then ends the command
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        )

    def wait(self, timeout: float = 120.0, *, check: bool = True) -> str:
        """Everything it printed, once it has ended."""
        try:
            output, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise RuntimeError(f"`{self.command}` did not end within {timeout:g} s and was ended.") from None
        except BaseException:  # Ctrl-C
            self.end()
            raise
        if check and self._process.returncode:
            tail = "\n".join(output.splitlines()[-15:])
            raise RuntimeError(f"`{self.command}` ended with exit code {self._process.returncode}:\n{tail}")
        return output

    def end(self) -> None:
        """End the command and everything that it started."""
        if self._process.poll() is None:
            _end_tree(self._process.pid, itself=True)
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def _own_tools(words: list[str]) -> list[str]:
    """``torchrun`` of this environment also where its folder is not on the PATH."""
    import shutil

    if words[0] in ("python", "python3"):
        return [sys.executable, *words[1:]]
    beside = os.path.join(os.path.dirname(sys.executable), words[0])
    found = beside if os.path.exists(beside) else shutil.which(words[0])
    if found is None:
        raise FileNotFoundError(f"There is no command {words[0]!r} in this environment.")
    return [found, *words[1:]]


def _end_tree(pid: int, *, itself: bool) -> None:
    import psutil

    try:
        root = psutil.Process(pid)
        below = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in ([root] if itself else []) + below:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _supervise(notebook: int, words: Sequence[str]) -> int:
    import psutil

    command = subprocess.Popen(words)

    def follow_the_notebook() -> None:
        try:
            psutil.Process(notebook).wait()
        except psutil.NoSuchProcess:
            pass  # gone before we looked
        _end_tree(os.getpid(), itself=False)

    threading.Thread(target=follow_the_notebook, daemon=True).start()
    code = command.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[2:]))
