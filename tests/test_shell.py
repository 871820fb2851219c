"""Commands: what comes back, what is said of a failure, and that nothing stays behind, however the notebook ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import psutil
import pytest

from course_lib.launch import commands as shell_module
from course_lib.launch.commands import Background, shell

# like torchrun: the workers get sessions of their own; argv[1] marks them. Whoever sees them knows that it has printed.
TREE = """
import subprocess, sys, time
print("started")
worker = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
for _ in range(2):
    subprocess.Popen(worker, start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path):
    """Write a program; gives back its path as a command takes it."""

    def write(text: str) -> str:
        path = tmp_path / f"{uuid.uuid4().hex}.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def mark():
    """A word for the command lines of a test's processes; whatever of them still runs afterwards is ended."""
    word = f"mark-{uuid.uuid4().hex}"
    yield word
    for process in running(word):
        process.kill()


def running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def until(true, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (told := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(told)


def whole_tree(mark: str) -> bool:
    return len(running(mark)) == 4  # supervisor, command, two workers


def test_what_it_printed_comes_back(script, capfd):
    program = script("import sys; print('out'); print('err', file=sys.stderr); print(sys.argv[1:], sys.executable)")
    assert shell(f"python {program} 'two words' x") == f"out\nerr\n['two words', 'x'] {sys.executable}\n"
    assert capfd.readouterr() == ("", "")
    assert shell("true") == ""


def test_unicode_and_bytes_that_are_none(script, monkeypatch):
    program = script(r"""
        import sys
        print(sys.argv[1], "− 2·(n−1)/n 🦙")
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\xff 10 %\r 20 %\r\n")
    """)
    wanted = "größer − 2·(n−1)/n 🦙\n\ufffd 10 %\n 20 %\n"
    assert shell(f"python {program} größer") == wanted
    monkeypatch.setenv("LC_ALL", "C")
    assert shell(f"python {program} größer") == wanted


def test_the_environment_is_passed(script, monkeypatch):
    monkeypatch.setenv("B1G_OUTER", "from the notebook")
    program = script("import os; print(os.environ['B1G_OUTER'], os.environ['B1G_INNER'])")
    assert shell(f"python {program}", B1G_INNER="for this one") == "from the notebook for this one\n"
    assert "B1G_INNER" not in os.environ


def test_a_command_imports_what_the_notebook_can(script, monkeypatch, tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "b1g_beside.py").write_text("word = 'found'")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    assert shell(f"python {script('import b1g_beside, course_lib; print(b1g_beside.word)')}") == "found\n"


def test_nobody_answers_a_question(script):
    program = script("import sys; print([sys.stdin.read()])")
    readable, writable = os.pipe()
    os.write(writable, b"an answer")
    os.close(writable)
    before = os.dup(0)
    os.dup2(readable, 0)
    try:
        assert shell(f"python {program}") == "['']\n"
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(readable)


def test_tools_of_this_environment_need_no_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert shell("pytest --version").startswith("pytest ")
    assert [shell_module._own_tools([word, "x"]) for word in ("python", "python3")] == [[sys.executable, "x"]] * 2


def test_a_failure_tells_the_last_lines(script):
    program = script("import sys; [print('line', i) for i in range(100)]; sys.exit('the reason')")
    with pytest.raises(RuntimeError) as failed:
        shell(f"python {program}")
    lines = str(failed.value).splitlines()
    assert lines[0] == f"`python {program}` ended with exit code 1:"
    assert lines[1:] == [f"line {i}" for i in range(86, 100)] + ["the reason"]
    assert shell(f"python {program}", check=False).endswith("line 99\nthe reason\n")


def test_a_silent_failure_and_a_signal(script):
    with pytest.raises(RuntimeError, match="exit code 1; it had printed nothing"):
        shell("false")
    with pytest.raises(RuntimeError, match="exit code 139"):  # 128 + SIGSEGV, as a shell tells it
        shell(f"python {script('import os, signal; os.kill(os.getpid(), signal.SIGSEGV)')}")


def test_a_command_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no command 'torchrunn' in this environment"):
        shell("torchrunn --nproc_per_node 2")


def test_a_file_that_is_no_program(tmp_path):
    path = tmp_path / "program"
    path.write_bytes(b"\x7fELF, not really")
    with pytest.raises(FileNotFoundError):
        shell(str(path))  # nobody may execute it
    path.chmod(0o755)
    with pytest.raises(RuntimeError, match=f"exit code 126:\n{path}: Exec format error"):
        shell(str(path))


def test_no_command():
    with pytest.raises(ValueError, match="no command in an empty line"):
        shell(" ")


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_no_time(timeout, script, mark):
    with pytest.raises(ValueError, match=f"timeout={timeout}: .* above 0"):
        shell(f"python {script(TREE)} {mark}", timeout=timeout)
    assert not running(mark)


def test_a_timeout_ends_the_whole_tree(script, mark, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = Background(f"python {script(TREE)} {mark}")
    assert until(lambda: whole_tree(mark))
    with pytest.raises(RuntimeError, match="did not end within 0.1 s and was ended:\nstarted$"):
        command.wait(0.1)
    assert not running(mark)


def test_what_was_printed_before_a_timeout_is_not_lost(script, mark):
    command = Background(f"python {script(TREE)} {mark}")
    assert until(lambda: whole_tree(mark))
    printed = command.wait(0.1, check=False)
    assert printed.startswith("started\n") and printed.endswith("did not end within 0.1 s and was ended.\n")
    assert not running(mark)


def test_ctrl_c_ends_the_whole_tree(script, mark):
    seen = []

    def press():
        seen.append(until(lambda: whole_tree(mark)))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        shell(f"python {script(TREE)} {mark}", timeout=60)
    assert seen == [True] and not running(mark)
    presser.join()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands a process's orphans to the supervisor")
def test_what_a_command_leaves_behind_ends_with_it(script, mark):
    at_once = TREE.removesuffix("time.sleep(600)\n")
    assert shell(f"python {script(at_once)} {mark}") == "started\n"
    assert not running(mark)


def test_a_background_command_runs_until_it_is_ended(script, mark):
    command = Background(f"python {script(TREE)} {mark}")
    assert until(lambda: whole_tree(mark))
    command.end()
    assert not running(mark)
    command.end()
    with pytest.raises(RuntimeError, match="started"):
        command.wait()
    assert command.wait(check=False) == "started\n"


def test_much_output_does_not_stop_a_command_that_nobody_reads_from(script, tmp_path):
    program = script(f"print('x' * 1_000_000); open({str(tmp_path / 'done')!r}, 'w').close()")
    command = Background(f"python {program}")
    assert until((tmp_path / "done").exists)
    assert len(command.wait()) == 1_000_001


def test_a_supervisor_that_cannot_act(script, mark, monkeypatch):
    monkeypatch.setattr(shell_module, "GRACE", 0.3)
    command = Background(f"python {script(TREE)} {mark}")
    assert until(lambda: whole_tree(mark))
    command._process.send_signal(signal.SIGSTOP)
    command.end()
    assert not running(mark)


NOTEBOOK = """
import os, signal, sys, time
from course_lib.launch.commands import Background
Background(f"python {sys.argv[1]} {sys.argv[2]}")
if sys.argv[3] == "at once":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_sigkill_of_the_notebook_leaves_nothing(when, script, mark):
    notebook = subprocess.Popen([sys.executable, script(NOTEBOOK), script(TREE), mark, when])
    if when == "later":
        assert until(lambda: len(running(mark)) == 5)  # with the notebook
        notebook.kill()
    else:
        assert until(lambda: psutil.Process(notebook.pid).status() == psutil.STATUS_ZOMBIE)
    try:
        # nobody has waited for the killed notebook: it is a zombie, which is gone all the same
        assert until(lambda: not running(mark))
    finally:
        notebook.wait()
    time.sleep(0.3)  # nor does anything come up late
    assert not running(mark)
