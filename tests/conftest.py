"""Fixtures for tests that start real ranks."""

from __future__ import annotations

import glob
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import time

import psutil
import pytest

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def ctrl_c_is_pythons_own():
    """Some packages take SIGINT for themselves and keep it; a test that presses Ctrl-C shall find Python's handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def private_tmp():
    """A temporary folder that only this session writes to; its path is short, for it has to hold sockets."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="b1g-tests-")
    # multiprocessing keeps a folder of its own in there until the interpreter ends, and removes it at priority -100
    multiprocessing.util.Finalize(None, shutil.rmtree, args=(tempfile.tempdir,), exitpriority=-200)
    yield tempfile.tempdir
    tempfile.tempdir = before
    if variable is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = variable


@pytest.fixture
def one_thread():
    """What the test computes, it computes on one thread: the tiny model gains nothing from two."""
    from course_lib.launch.threads import one_thread

    with one_thread():
        yield


def launch_leftovers(folder: str) -> list[str]:
    """Descendants of this process, other than the warm server and the tracker, and whatever lies in the folder.

    What may stay: Python's own folder for its server's socket, pytest's for tmp_path, PyTorch's cache of compiled code,
    torchrun's logs, which it never removes, and the folders that wandb makes when it is imported and removes at exit.
    """
    servers = {
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    left = [str(p) for p in psutil.Process().children(recursive=True) if p.pid not in servers]
    may_stay = ("pymp-", "pytest-", "torchinductor_", "torchelastic_")
    names = [os.path.basename(path) for path in glob.glob(f"{folder}/*")]
    return left + [name for name in names if not name.startswith(may_stay) and "wandb-" not in name]


@pytest.fixture
def no_leftovers(private_tmp):
    """After the test no process and no temporary file may be left; what is on its way out gets the time that it needs."""
    before = set(launch_leftovers(private_tmp))
    yield
    deadline = time.monotonic() + 30
    while (left := set(launch_leftovers(private_tmp)) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
