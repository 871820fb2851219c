"""What a launch that ends well gives back, what travels to the ranks, and what it leaves behind: nothing."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import ROOT, until

from course_lib.launch import launch
from course_lib.launch.output import Stream
from course_lib.launch.rendezvous import restart_safe_init_method

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def sum_of_ranks(offset: float = 0.0) -> float:
    value = torch.full((256,), dist.get_rank() + offset)
    dist.all_reduce(value)
    print("sum", value[0].item())
    return value[0].item()


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_comes_back(ranks, capsys):
    run = launch(sum_of_ranks, ranks=ranks, offset=0.5)
    total = sum(range(ranks)) + 0.5 * ranks
    assert run.results == [total] * ranks
    assert run.logs == [f"sum {total}\n"] * ranks
    assert 0 < max(run.rank_seconds) < run.seconds and len(run.rank_seconds) == ranks
    assert [(c.rank, c.kind, c.bytes, c.group) for c in run.collectives] == [
        (rank, "all_reduce", 1024, tuple(range(ranks))) for rank in range(ranks)
    ]
    assert all(memory["max_rss"] > 50e6 for memory in run.memory) and len(run.memory) == ranks
    assert run.wire_bytes == [0] if ranks == 1 else all(sent > 0 for sent in run.wire_bytes)
    assert run.stamp["ranks"] == ranks and run.stamp["backend"] == "gloo"
    assert capsys.readouterr().out.count(f"sum {total}\n") == 1  # folded

    run = launch(sum_of_ranks, ranks=ranks, offset=0.5, quiet=True)
    assert capsys.readouterr().out == "" and run.logs == [f"sum {total}\n"] * ranks


def test_any_function_and_large_results_travel():
    scale = 3

    def closure(x):
        return x * scale

    class Counter:
        def __init__(self, start):
            self.start = start

        def up(self, x):
            return self.start + x

    def call_all(functions, counter_class):
        return [f(2) for f in functions] + [counter_class(10).up(5)]

    functions = [lambda x: x + scale, closure, functools.partial(pow, exp=4), Counter(7).up]
    assert launch(call_all, functions, Counter, ranks=1).results == [[5, 6, 16, 9, 15]]
    assert launch(functools.partial(closure, x=4), ranks=2).results == [12, 12]
    (large,) = launch(lambda: torch.full((10_000_000,), 7.0), ranks=1).results
    assert large.shape == (10_000_000,) and large[-1] == 7


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

        variables = {name: os.environ.get(name) for name in ("SET_LATER", "HOME", "RANK")}
        return variables, os.getcwd(), written_just_now.VALUE

    for rank, (variables, folder, value) in enumerate(launch(look, ranks=2).results):
        assert variables == {"SET_LATER": "yes", "HOME": None, "RANK": str(rank)}
        assert folder == str(tmp_path) and value == 42


def test_output_streams_in_order_and_folded(tmp_path, monkeypatch):
    shown: list[str] = []

    def talk(signal):
        dist.barrier()  # a rank may have taken long to start
        print("both say this")
        print(f"only {dist.get_rank()} says this")
        print("10%\r50%\r100%")
        print()
        sys.stderr.write("from stderr\n")
        while not os.path.exists(signal):  # until the notebook has shown it: a line that is held back ends in a hang
            time.sleep(0.02)
        print("no newline at the end", end="")

    def to_cell(text):
        shown.extend(text.splitlines())
        if {"[ranks 0, 1] both say this", "[ranks 0, 1] from stderr"} <= set(shown):
            (tmp_path / "shown").touch()

    monkeypatch.setattr("course_lib.launch.run.to_cell", to_cell)
    # on a busy machine a rank may be late by more than a line usually waits for company
    monkeypatch.setattr("course_lib.launch.output.FOLD_SECONDS", 10)
    run = launch(talk, str(tmp_path / "shown"), ranks=2)
    assert shown.count("[ranks 0, 1] both say this") == 1 and not any("50%" in line for line in shown)
    for rank in (0, 1):  # each rank's own order
        lines = "[ranks 0, 1] both say this", f"[rank {rank}] only {rank} says this", "[ranks 0, 1] 100%"
        assert shown.index(lines[0]) < shown.index(lines[1]) < shown.index(lines[2])
    assert shown[-1] == "[ranks 0, 1] no newline at the end"
    assert "only 1 says this\n100%\n\n" in run.logs[1] and run.logs[1].endswith("no newline at the end")


def test_a_line_finds_company_whichever_file_is_read_first(tmp_path, monkeypatch):
    """Rank 1's two lines come in one look at its files, and stderr is read before stdout."""
    monkeypatch.setattr("course_lib.launch.output.FOLD_SECONDS", 60)
    shown: list[str] = []
    stream = Stream(str(tmp_path), 2, shown.append)
    for said in ([(0, "stdout", "both")], [(0, "stderr", "warned")], [(1, "stdout", "both"), (1, "stderr", "warned")]):
        for rank, name, text in said:
            (tmp_path / str(rank)).mkdir(exist_ok=True)
            with (tmp_path / str(rank) / f"{name}.log").open("a") as file:
                file.write(f"{text}\n")
        stream.pump()
    assert shown == ["[ranks 0, 1] both\n[ranks 0, 1] warned"]


def test_nothing_listens_for_strangers():
    def listeners(notebook: int):
        dist.barrier()
        addresses = {}
        for name, pid in (("rank", os.getpid()), ("server", os.getppid()), ("notebook", notebook)):
            connections = psutil.Process(pid).net_connections()
            addresses[name] = [(c.laddr.ip, c.raddr.ip if c.raddr else "") for c in connections]
        dist.barrier()
        return addresses

    for addresses in launch(listeners, os.getpid(), ranks=3).results:
        assert addresses["server"] == [] and addresses["notebook"] == []
        assert addresses["rank"]  # gloo's own connections
        assert {ip for pair in addresses["rank"] for ip in pair} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1", ""}


def test_many_launches_and_four_at_once_leave_no_trace(private_tmp):
    launch(sum_of_ranks, ranks=2, quiet=True)

    def counts():
        process = psutil.Process()
        return len(process.children(recursive=True)), process.num_threads(), process.num_fds()

    before, files = counts(), sorted(os.listdir(private_tmp))
    for _ in range(8):
        launch(sum_of_ranks, ranks=2, quiet=True)
    with ThreadPoolExecutor(4) as threads:
        runs = threads.map(lambda offset: launch(sum_of_ranks, offset, ranks=2, quiet=True), range(4))
        assert [run.results for run in runs] == [[1.0 + 2 * offset] * 2 for offset in range(4)]
    # A thread is joined a little before the system ends it: one from before may have gone meanwhile, so fewer is fine.
    until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))
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


IN_ANOTHER_CHECKOUT = """
    import sys
    sys.path.insert(0, "{checkout}")
    import course_lib
    from course_lib.launch import launch
    from course_lib.launch.commands import shell

    print("top level of the script")  # there is no `if __name__ == "__main__"` on purpose

    def places():
        import course_checks, course_lib
        return course_lib.__file__, course_checks.__file__

    expected = (course_lib.__file__, "{checkout}/course_checks/__init__.py")
    assert course_lib.__file__.startswith("{checkout}"), course_lib.__file__
    assert launch(places, ranks=2).results == [expected] * 2
    assert shell("python {elsewhere}/shown.py", timeout=60).strip() == str(expected)
"""


def test_a_plain_script_in_a_second_checkout_runs_that_checkouts_code_once(tmp_path):
    """The first checkout is importable, as an editable install is, and the folder that the notebook is in."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    shutil.copytree(f"{ROOT}/course_lib", checkout / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    files = {
        checkout / "course_checks/__init__.py": "",
        checkout / "transformers.py": "raise RuntimeError('not needed here')\n",
        elsewhere
        / "shown.py": "import course_checks, course_lib\nprint((course_lib.__file__, course_checks.__file__))",
        elsewhere / "plain.py": textwrap.dedent(IN_ANOTHER_CHECKOUT).format(checkout=checkout, elsewhere=elsewhere),
    }
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, elsewhere / "plain.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("top level of the script") == 1


def test_each_life_of_a_job_has_a_part_of_the_store_to_itself(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    life = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port), RANK="0", WORLD_SIZE="1", GROUP_WORLD_SIZE="1")
    for name, value in (life | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}).items():
        monkeypatch.setenv(name, value)
    first, *_ = next(dist.rendezvous(restart_safe_init_method()))
    first.set("address", "of a rank that will die")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second, rank, world_size = next(dist.rendezvous(restart_safe_init_method()))
    assert first.check(["address"]) and not second.check(["address"]) and (rank, world_size) == (0, 1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert restart_safe_init_method() == "env://"
