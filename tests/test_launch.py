"""What a launch that ends well gives back, what travels to the ranks, and what it leaves behind: nothing."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch, process_group
from course_lib.launch.output import Stream

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def sum_of_ranks(offset: float = 0.0) -> float:
    value = torch.full((256,), dist.get_rank() + offset)
    dist.all_reduce(value)
    print("sum", value[0].item())
    return value[0].item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_comes_back(ranks, capsys):
    began = time.perf_counter()
    run = launch(sum_of_ranks, ranks=ranks, offset=0.5)
    took = time.perf_counter() - began

    total = sum(range(ranks)) + 0.5 * ranks
    assert run.results == [total] * ranks
    assert run.logs == [f"sum {total}\n"] * ranks
    assert 0 < max(run.rank_seconds) < run.seconds <= took and len(run.rank_seconds) == ranks
    assert [(c.rank, c.kind, c.bytes, c.group) for c in run.collectives] == [
        (rank, "all_reduce", 1024, tuple(range(ranks))) for rank in range(ranks)
    ]
    assert all(c.seconds > 0 for c in run.collectives)
    assert all(memory["max_rss"] > 50e6 for memory in run.memory) and len(run.memory) == ranks
    assert run.wire_bytes == [0] if ranks == 1 else all(sent > 0 for sent in run.wire_bytes)
    assert run.stamp["ranks"] == ranks and run.stamp["backend"] == "gloo"
    assert repr(run).startswith(f"Run({ranks} rank")
    word = "rank 0" if ranks == 1 else "ranks 0, 1" if ranks == 2 else f"ranks 0-{ranks - 1}"
    assert f"[{word}] sum {total}\n" in capsys.readouterr().out


def test_quiet_shows_nothing_and_keeps_the_logs(capsys):
    run = launch(sum_of_ranks, ranks=2, quiet=True)
    assert capsys.readouterr().out == "" and run.logs[1] == "sum 1.0\n"


def test_any_function_travels():
    scale = 3

    def closure(x):
        return x * scale

    class Counter:
        def __init__(self, start):
            self.start = start

        def up(self, x):
            return self.start + x

    def call_all(functions, counter_class):
        assert torch.distributed.is_initialized()
        return [f(2) for f in functions] + [counter_class(10).up(5)]

    functions = [lambda x: x + scale, closure, functools.partial(pow, exp=4), Counter(7).up]
    assert launch(call_all, functions, Counter, ranks=1).results == [[5, 6, 16, 9, 15]]
    assert launch(Counter(1).up, 1, ranks=1).results == [2]
    assert launch(functools.partial(closure, x=4), ranks=2).results == [12, 12]
    assert launch(lambda: torch.arange(3), ranks=1).results[0].tolist() == [0, 1, 2]


def test_ranks_see_the_notebook_as_it_is_now(monkeypatch, tmp_path):
    launch(sum_of_ranks, ranks=1, quiet=True)  # the server runs from here on
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("RANK", "77")  # what is left from another launcher must not confuse the ranks
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a notebook: the folder that it is in by now
    (tmp_path / "written_just_now.py").write_text("VALUE = 42\n")

    def look():
        import written_just_now

        ours = {name: os.environ.get(name) for name in ("SET_LATER", "HOME", "RANK")}
        return ours, os.getcwd(), written_just_now.VALUE

    for rank, (variables, folder, value) in enumerate(launch(look, ranks=2).results):
        assert variables == {"SET_LATER": "yes", "HOME": None, "RANK": str(rank)}
        assert folder == str(tmp_path) and value == 42


def test_output_streams_in_order_and_folded(tmp_path):
    shown: list[str] = []

    def talk(signal):
        print("both say this")
        print(f"only {dist.get_rank()} says this")
        print("10%\r50%\r100%")
        print()
        sys.stderr.write("from stderr\n")
        while not os.path.exists(
            signal
        ):  # until the notebook has shown the line: a line that is held back ends in a hang
            time.sleep(0.02)
        print("no newline at the end", end="")

    class Cell:
        def write(self, text):
            shown.extend(line for line in text.splitlines() if line)
            if {"[ranks 0, 1] both say this", "[ranks 0, 1] from stderr"} <= set(shown):
                (tmp_path / "shown").touch()

        def flush(self):
            pass

    before, sys.stdout = sys.stdout, Cell()
    try:
        run = launch(talk, str(tmp_path / "shown"), ranks=2)
    finally:
        sys.stdout = before
    assert shown.count("[ranks 0, 1] both say this") == 1
    assert {"[rank 0] only 0 says this", "[rank 1] only 1 says this", "[ranks 0, 1] from stderr"} <= set(shown)
    assert "[ranks 0, 1] 100%" in shown and not any("50%" in line for line in shown)
    assert shown[-1] == "[ranks 0, 1] no newline at the end"
    assert "only 1 says this\n100%\n\n" in run.logs[1] and run.logs[1].endswith("no newline at the end")


def test_ten_thousand_lines(capsys):
    def chatter():
        for i in range(10_000):
            print("line", i)
        for _ in range(2_000):
            print("the same")

    run = launch(chatter, ranks=2)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown if "] line" in line and " 0" in line] == [str(i) for i in range(10_000)]
    assert sum("the same" in line for line in shown) >= 2_000
    assert run.logs[0] == run.logs[1] and run.logs[0].count("\n") == 12_000


def test_a_rank_that_comes_late_keeps_its_own_order(tmp_path, monkeypatch):
    """Some of the lines that it could join are shown already, the others still wait: it may not join those out of turn."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("course_lib.launch.output.time", clock)
    logs = [tmp_path / str(rank) / "stdout.log" for rank in (0, 1)]
    for log in logs:
        log.parent.mkdir()
        log.touch()
    shown: list[str] = []
    stream = Stream(str(tmp_path), 2, shown.append)
    for clock.now, line in [(0.0, "a\n"), (0.1, "b\nc\n"), (0.2, "")]:  # then rank 1's "a" has waited long enough
        with open(logs[1], "a") as file:
            file.write(line)
        stream.pump()
    assert shown == ["[rank 1] a"]
    logs[0].write_text("a\nb\nc\n")
    stream.pump(final=True)
    assert shown[1:] == ["[rank 0] a\n[ranks 0, 1] b\n[ranks 0, 1] c"]


def test_a_rank_keeps_its_own_order_while_lines_wait_for_company(tmp_path):
    for rank, text in enumerate(["mine\nours\n", "ours\n"]):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "stdout.log").write_text(text)
    shown: list[str] = []
    stream = Stream(str(tmp_path), 2, shown.append)
    stream.pump()
    assert shown == []  # "ours" is complete, but "mine" came first
    stream.pump(final=True)
    assert shown == ["[rank 0] mine\n[ranks 0, 1] ours"]


def test_nothing_listens_for_strangers():
    def listeners(notebook: int):
        dist.barrier()
        found = {}
        for name, pid in (("rank", os.getpid()), ("server", os.getppid()), ("notebook", notebook)):
            told = psutil.Process(pid).net_connections()
            found[name] = [(c.laddr.ip, c.raddr.ip if c.raddr else "") for c in told]
        dist.barrier()
        return found

    for found in launch(listeners, os.getpid(), ranks=3).results:
        assert found["server"] == [] and found["notebook"] == []
        assert found["rank"]  # gloo's own connections
        assert {ip for pair in found["rank"] for ip in pair} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1", ""}


def test_thirty_launches_and_four_at_once_leave_no_trace(private_tmp):
    launch(sum_of_ranks, ranks=2, quiet=True)

    def counts():
        me = psutil.Process()
        return len(me.children(recursive=True)), me.num_threads(), me.num_fds()

    before, files, runs = counts(), sorted(os.listdir(private_tmp)), []
    for _ in range(30):
        launch(sum_of_ranks, ranks=2, quiet=True)
    threads = [
        threading.Thread(target=lambda n=n: runs.append((n, launch(sum_of_ranks, n, ranks=2, quiet=True))))
        for n in range(4)
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted((n, run.results) for n, run in runs) == [(n, [1.0 + 2 * n] * 2) for n in range(4)]
    # A thread is joined a little before the system ends it: one from before may have gone meanwhile, so fewer is fine.
    deadline = time.monotonic() + 30
    while any(now > then for now, then in zip(counts(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(counts(), before, strict=True)), (before, counts())
    assert sorted(os.listdir(private_tmp)) == files


def test_folders_of_killed_notebooks_are_swept(private_tmp):
    folders = {name: os.path.join(private_tmp, f"beyond-one-gpu-{name}") for name in ("dead", "alive", "young")}
    for name, folder in folders.items():
        os.mkdir(folder)
        open(f"{folder}/lock", "w").close()
        if name != "young":
            os.utime(folder, (time.time() - 100, time.time() - 100))
    with open(f"{folders['alive']}/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launch(time.time, ranks=1, quiet=True)
    assert {name for name, folder in folders.items() if os.path.exists(folder)} == {"alive", "young"}
    for folder in (folders["alive"], folders["young"]):
        shutil.rmtree(folder)


SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    from course_lib.launch import launch

    print("top level of the script")

    def train(factor):
        value = torch.ones(2) * (dist.get_rank() + 1) * factor
        dist.all_reduce(value)
        return value[0].item()

    print(launch(train, ranks=2, factor=int(sys.argv[1])).results)
"""
IN_ANOTHER_CHECKOUT = """
    import sys
    sys.path.insert(0, "{checkout}")
    import course_lib
    from course_lib.launch import RankFailed, launch
    from course_lib.launch.commands import shell

    def places():
        import course_checks, course_lib
        return course_lib.__file__, course_checks.__file__

    def fail():
        from course_lib import wrong
        wrong.divide()

    expected = (course_lib.__file__, "{checkout}/course_checks/__init__.py")
    assert course_lib.__file__.startswith("{checkout}"), course_lib.__file__
    assert launch(places, ranks=2).results == [expected] * 2
    assert shell("python {elsewhere}/shown.py", timeout=60).strip() == str(expected)
    try:
        launch(fail, ranks=1)
    except RankFailed as failure:
        assert failure.where.startswith("plain.py"), failure.where  # the learner's line, not the course's
    else:
        raise AssertionError("it should fail")
"""
UNDER_TORCHRUN = """
    import torch, torch.distributed as dist
    from course_lib.launch import process_group

    with process_group() as device:
        value = torch.ones(2, device=device)
        dist.all_reduce(value)
        print(f"{device} ranks {int(value[0].item())}\\n", end="", flush=True)  # in one piece
    assert not dist.is_initialized()
"""


def test_plain_scripts_four_at_once_and_torchrun(tmp_path):
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    (tmp_path / "plain.py").write_text(textwrap.dedent(SCRIPT))  # no `if __name__ == "__main__"` on purpose
    (tmp_path / "group.py").write_text(textwrap.dedent(UNDER_TORCHRUN))
    # a broken Transformers is no matter to ranks that do not use it, and four imports of it would be most of the time
    (tmp_path / "transformers.py").write_text("raise RuntimeError('broken')\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "group.py"]
    commands = [["plain.py", str(factor)] for factor in (1, 2, 3, 4)] + [torchrun]
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands
    ]
    told = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 5, told
    for factor, text in enumerate(told[:4], 1):
        assert text.count("top level of the script") == 1
        assert text.splitlines()[-1] == str([3.0 * factor] * 2)
    assert told[4].count("cpu ranks 2") == 2


def test_ranks_of_a_second_checkout_run_that_checkouts_code(tmp_path):
    """The first checkout is importable, as an editable install is, and the folder that the notebook is in."""
    installed = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    shutil.copytree(f"{installed}/course_lib", checkout / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "course_lib" / "wrong.py").write_text("def divide():\n    return 1 / 0\n")
    (checkout / "course_checks").mkdir()
    (checkout / "course_checks" / "__init__.py").touch()
    elsewhere.mkdir()
    shown = "import course_checks, course_lib\nprint((course_lib.__file__, course_checks.__file__))\n"
    (elsewhere / "shown.py").write_text(shown)
    (elsewhere / "plain.py").write_text(
        textwrap.dedent(IN_ANOTHER_CHECKOUT).format(checkout=checkout, elsewhere=elsewhere)
    )
    (checkout / "transformers.py").write_text("raise RuntimeError('not needed here')\n")
    done = subprocess.run(
        [sys.executable, elsewhere / "plain.py"],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": installed},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_is_alone(monkeypatch):
    """What ``python script.py`` is to a function that torchrun runs as well: rank 0 of 1, and no port opened."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with process_group() as device:
        assert (device, dist.get_rank(), dist.get_world_size()) == ("cpu", 0, 1)
        assert sum_of_ranks(2.0) == 2.0
        assert not [c for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.ip != "127.0.0.1"]
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), process_group():
        raise ZeroDivisionError
    assert not dist.is_initialized()
