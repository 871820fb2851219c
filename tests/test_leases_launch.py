"""`launch` where a class shares the GPUs: it waits its turn, shows its ranks what it leased, and always gives it back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from course_lib.launch import RankFailed, RanksHung, launch
from course_lib.launch.leases import Pool

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds that a condition may take before a test fails
pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def leases(tmp_path, monkeypatch) -> Pool:
    """A class's folder for 4 GPUs, on a machine that only rehearses having them."""
    monkeypatch.setenv("BEYOND_ONE_GPU_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", "4")
    monkeypatch.setenv("BEYOND_ONE_GPU_NAME", "Ada")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # the machine may have some
    made = Pool(tmp_path / "leases", gpus=4)
    made.make()
    return made


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def look(folder: str) -> tuple[str | None, list[tuple[int, str, int]], str | None]:
    held = [(h.gpu, h.name, h.pid) for h in Pool(folder).holders()]
    return os.environ.get("CUDA_VISIBLE_DEVICES"), held, os.environ.get("CUDA_DEVICE_ORDER")


def test_the_ranks_see_what_was_leased(leases, monkeypatch):
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    with leases.lease(1, name="Ben"):
        taker = threading.Thread(target=lambda: runs.append(launch(look, leases.folder, ranks=2, quiet=True)))
        runs: list = []
        taker.start()
        taker.join(60)
        me = os.getpid()
        assert runs[0].results == [("1,2", [(0, "Ben", me), (1, "Ada", me), (2, "Ada", me)], "PCI_BUS_ID")] * 2
        assert [h.name for h in leases.holders()] == ["Ben"]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before  # the notebook's own is not touched


def test_nothing_is_leased_where_no_gpu_is_wanted(leases, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    seen = launch(look, leases.folder, ranks=1, backend="gloo", quiet=True).results
    seen += launch(look, leases.folder, ranks=5, quiet=True).results[:1]  # more ranks than GPUs: they are on the CPU
    monkeypatch.delenv("BEYOND_ONE_GPU_LEASES")
    seen += launch(look, leases.folder, ranks=1, quiet=True).results
    assert [(visible, held) for visible, held, _ in seen] == [("as it was", [])] * 3


def test_it_waits_its_turn_and_says_whose_it_is(leases, capsys):
    held, end = threading.Event(), threading.Event()

    def ben() -> None:
        with leases.lease(3, name="Ben"):
            held.set()
            end.wait(60)

    def free_them_when_somebody_waits() -> None:
        until(leases.waiting)
        time.sleep(1.0)
        end.set()

    others = [threading.Thread(target=ben), threading.Thread(target=free_them_when_somebody_waits)]
    others[0].start()
    held.wait(60)
    others[1].start()
    began = time.perf_counter()
    run = launch(look, leases.folder, ranks=2)
    seconds = time.perf_counter() - began
    for other in others:
        other.join()
    said = capsys.readouterr().out
    assert re.search("Ben has GPUs 0, 1, 2 for .*; GPU 3 is free; you are next\nyour turn: GPUs 0, 1", said)
    assert run.results[0][0] == "0,1"
    assert run.seconds < seconds - 0.9  # the wait is not the run's


def test_it_is_given_back_however_the_run_ends(leases, monkeypatch):
    def fail():
        raise ArithmeticError("no")

    with pytest.raises(RankFailed):
        launch(fail, ranks=2, quiet=True)
    assert leases.holders() == []
    with pytest.raises(RanksHung):
        launch(time.sleep, 60, ranks=2, timeout=0.5, quiet=True)
    assert leases.holders() == []
    with pytest.raises(TypeError, match="cannot travel"):
        launch(threading.Lock, ranks=1, quiet=True)
    assert leases.holders() == []
    monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", "8")  # more than the folder was made for
    with pytest.raises(ValueError, match="shares 4"):
        launch(fail, ranks=8, quiet=True)
    assert leases.holders() == leases.waiting() == []


@pytest.mark.parametrize("moment", ["running", "waiting"])
def test_ctrl_c_gives_it_back(leases, moment):
    blocker = leases.lease(4, name="Ben")
    if moment == "waiting":
        thread = threading.Thread(target=blocker.take)
        thread.start()
        thread.join()

    def interrupt() -> None:
        until(leases.waiting if moment == "waiting" else leases.holders)
        time.sleep(0.5)
        for _ in range(2):  # an impatient learner
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        time.sleep(0.1)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            launch(time.sleep, 30, ranks=2, timeout=60, quiet=True)
        finally:
            presser.join()  # the second press may find the launch ended
    presser.join()
    until(lambda: [h.name for h in leases.holders()] == ["Ben"] * 4 * (moment == "waiting"))
    assert leases.waiting() == []
    blocker.give_back()


NOTEBOOK = """
import json, os, sys, time
from course_lib.launch import launch

def step(flags):
    import os, time
    import torch, torch.distributed as dist
    gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[dist.get_rank()]
    os.close(os.open(f"{flags}/{gpu}", os.O_CREAT | os.O_EXCL))
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    time.sleep(0.1)
    os.unlink(f"{flags}/{gpu}")
    return gpu, total.item()

if __name__ == "__main__":
    flags, name = sys.argv[1:]
    seen = [launch(step, flags, ranks=2, threads=1, timeout=200, quiet=True).results for _ in range(3)]
    print(json.dumps(seen), flush=True)
    if name == "killed":
        launch(time.sleep, 600, ranks=2, timeout=600, quiet=True)
"""


def test_four_notebooks_launch_at_once(leases, tmp_path, private_tmp):
    """On a class of 4 GPUs, 2 ranks each, 3 runs each; one is killed in a fourth: GPUs back, no rank and no file left."""
    flags, script = tmp_path / "flags", tmp_path / "notebook.py"
    flags.mkdir()
    script.write_text(NOTEBOOK)
    (tmp_path / "transformers.py").write_text("raise ImportError")  # half of a server's start, and of no use here
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": private_tmp}
    notebooks: list[subprocess.Popen] = []
    try:
        for name in ("killed", "a", "b", "c"):
            command = [sys.executable, str(script), str(flags), name]
            of_its_own = environment | {"BEYOND_ONE_GPU_NAME": name}
            notebooks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=of_its_own))
        for notebook in notebooks:
            said = next(line for line in notebook.stdout if line.startswith("["))  # others tell of the wait
            for (first, total), (second, same) in json.loads(said):
                assert first != second and total == same == 3.0
        assert [notebook.wait(PATIENCE) for notebook in notebooks[1:]] == [0, 0, 0]
        victim = psutil.Process(notebooks[0].pid)
        until(lambda: len(leases.holders()) == 2 and len(victim.children(recursive=True)) >= 4)  # 2 servers, 2 ranks
        children = victim.children(recursive=True)
        assert {h.pid for h in leases.holders()} == {victim.pid}
        victim.kill()
        until(lambda: not leases.holders())
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
    finally:
        for notebook in notebooks:
            notebook.kill()
            notebook.wait()
            notebook.stdout.close()
    assert os.listdir(flags) == []
