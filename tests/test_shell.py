"""Commands: what comes back, what is said of a failure, and that nothing stays behind, however the notebook ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import uuid

import psutil
import pytest
from processes import until
from refusals import assert_refused

from course_lib.launch.commands import Background, shell

# like torchrun: the workers get sessions of their own; argv[1] marks them. Whoever sees them knows that it has printed.
TREE = """
import subprocess, sys, time
print("started", flush=True)
worker = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
for _ in range(2):
    subprocess.Popen(worker, start_new_session=True)
time.sleep(600)
"""


def python(program: str, *arguments: str) -> str:
    """The command line that runs a program."""
    return shlex.join(["python", "-c", textwrap.dedent(program), *arguments])


@pytest.fixture
def mark():
    """A word for the command lines of a test's processes; whatever of them still runs afterwards is ended."""
    word = f"mark-{uuid.uuid4().hex}"
    yield word
    for process in running(word):
        process.kill()


def running(mark: str) -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
        except psutil.NoSuchProcess:
            continue
    return marked


def tree_is_up(mark: str) -> None:
    until(lambda: len(running(mark)) == 4)  # supervisor, command, two workers


def test_what_it_printed_comes_back(capfd, monkeypatch):
    program = r"""
        import sys
        print(sys.argv[1:], sys.executable, "− 2·(n−1)/n 🦙")
        print("err", file=sys.stderr)
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\xff 10 %\r 20 %\r\n")
    """
    expected = f"['größer', 'two words'] {sys.executable} − 2·(n−1)/n 🦙\nerr\n\ufffd 10 %\n 20 %\n"
    assert shell(python(program, "größer", "two words")) == expected
    monkeypatch.setenv("LC_ALL", "C")
    assert shell(python(program, "größer", "two words")) == expected
    assert capfd.readouterr() == ("", "")
    assert shell("true") == ""


def test_a_command_has_the_notebooks_variables_modules_and_tools(monkeypatch, tmp_path):
    (tmp_path / "b1g_beside.py").write_text("word = 'found'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("B1G_OUTER", "outer")
    monkeypatch.setenv("PATH", "/nowhere")
    program = (
        "import os, b1g_beside, course_lib; print(b1g_beside.word, os.environ['B1G_OUTER'], os.environ['B1G_INNER'])"
    )
    assert shell(python(program), B1G_INNER="inner") == "found outer inner\n"
    assert "B1G_INNER" not in os.environ
    assert shell("pytest --version").startswith("pytest ")


def test_what_fails_or_is_impossible_says_why(mark, tmp_path):
    fails = python("import sys; [print('line', i) for i in range(100)]; sys.exit('the reason')")
    forever, no_program = python(TREE, mark), tmp_path / "no_program"
    no_program.write_bytes(b"\x7fELF, not really")
    assert_refused([(lambda: shell(str(no_program)), FileNotFoundError, "no_program")])  # nobody may execute it
    no_program.chmod(0o755)
    assert_refused(
        [
            (lambda: shell(fails), RuntimeError, "line 99\nthe reason"),
            (lambda: shell("false"), RuntimeError, "exit code 1"),
            # 128 + SIGSEGV, as a shell tells it
            (lambda: shell(python("import os; os.kill(os.getpid(), 11)")), RuntimeError, "exit code 139"),
            (lambda: shell(str(no_program)), RuntimeError, "exit code 126"),
            (lambda: shell("torchrunn --nproc_per_node 2"), FileNotFoundError, "'torchrunn'"),
            (lambda: shell(" "), ValueError, "no command"),
            (lambda: shell(forever, timeout=0), ValueError, "timeout=0"),
        ]
    )
    assert not running(mark)
    printed = shell(fails, check=False)
    assert printed.startswith("line 0\n") and printed.endswith("line 99\nthe reason\n")


def test_a_timeout_ends_the_whole_tree_and_tells_what_it_printed(mark):
    command = Background(python(TREE, mark))
    tree_is_up(mark)
    with pytest.raises(RuntimeError, match="started"):
        command.wait(0.1)
    assert not running(mark)


def test_ctrl_c_ends_the_whole_tree(mark):
    def press():
        tree_is_up(mark)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        shell(python(TREE, mark), timeout=200)
    presser.join()
    assert not running(mark)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands a process's orphans to the supervisor")
def test_what_a_command_leaves_behind_ends_with_it(mark):
    assert shell(python(TREE.removesuffix("time.sleep(600)\n"), mark)) == "started\n"
    assert not running(mark)


def test_a_background_command_runs_until_it_is_ended(mark):
    command = Background(python(TREE, mark))
    tree_is_up(mark)
    command.end()
    assert not running(mark)
    command.end()  # a second time does nothing
    assert command.wait(check=False) == "started\n"


def test_much_output_does_not_stop_a_command_that_nobody_reads_from(tmp_path):
    command = Background(python("import sys; print('x' * 1_000_000); open(sys.argv[1], 'w')", str(tmp_path / "done")))
    until((tmp_path / "done").exists)
    assert len(command.wait()) == 1_000_001


NOTEBOOK = """
import sys, time
from course_lib.launch.commands import Background
Background(sys.argv[1])
time.sleep(600)
"""


def test_sigkill_of_the_notebook_leaves_nothing(mark):
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK, python(TREE, mark)])
    try:
        tree_is_up(mark)
        notebook.kill()
        until(lambda: not running(mark))  # nobody has waited for the killed notebook, a zombie: it is gone all the same
    finally:
        notebook.kill()
        notebook.wait()


def test_a_backgrounds_processes_are_the_command_and_what_it_started(mark):
    with Background(python(TREE, mark)) as command:
        tree_is_up(mark)
        first, *workers = command.processes()
        assert {worker.ppid() for worker in workers} == {first.pid} and len(workers) == 2
        workers[0].kill()
        until(lambda: len(command.processes()) == 2)  # what has ended is none of them
