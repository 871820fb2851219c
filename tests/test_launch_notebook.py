"""Launches from a real Jupyter kernel: reports name the cell, Ctrl-C and the kernel's end leave nothing behind."""

from __future__ import annotations

import glob
import os
import signal
import textwrap
import time
from dataclasses import dataclass

import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from processes import ROOT, runs, until

IMPORTS = """
    import os, sys, time
    from course_lib.launch import launch
"""
HANG = """
    def forever():
        import torch, torch.distributed as dist
        print("rank is up")
        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    launch(forever, ranks=3, timeout={timeout})
"""


@dataclass
class Cell:
    """What became of one executed cell."""

    text: str = ""
    number: int = 0
    error: str = ""
    traceback: str = ""


class Notebook:
    """A kernel, one cell at a time."""

    def __init__(self, folder: str):
        self.folder = folder
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        self.manager, self.client = start_new_kernel(200, "python3", env=environment, cwd=folder)

    def run(self, code: str, *, when: str = "never", then=None) -> Cell:
        """Execute a cell; ``then()`` is called as soon as the cell has printed ``when``."""
        cell = Cell()
        message = self.client.execute(textwrap.dedent(code).lstrip("\n"))  # IPython does not count leading empty lines
        while True:
            reply = self.client.get_iopub_msg(timeout=200)
            kind, content = reply["msg_type"], reply["content"]
            if reply["parent_header"].get("msg_id") != message:
                continue
            if kind == "execute_input":
                cell.number = content["execution_count"]
            elif kind == "stream":
                before, cell.text = cell.text, cell.text + content["text"]
                if when in cell.text and when not in before:
                    then()
            elif kind == "error":
                cell.error, cell.traceback = content["ename"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def processes(self) -> list[int]:
        """Everything below the kernel: first the resource tracker and the warm server, then the ranks."""
        return [process.pid for process in psutil.Process(self.manager.provisioner.pid).children(recursive=True)]

    def folders(self) -> list[str]:
        return glob.glob(f"{self.folder}/beyond-one-gpu-*")


@pytest.fixture(scope="module")
def notebook(private_tmp):
    opened = Notebook(private_tmp)
    assert not opened.run(IMPORTS).error
    yield opened
    opened.client.stop_channels()
    opened.manager.shutdown_kernel(now=True)


def test_a_cells_function_and_class_run(notebook):
    cell = notebook.run("""
        scale = 3

        class Model:
            def __init__(self, rank):
                self.value = rank * scale

        def work():
            import torch.distributed as dist
            print("working")
            return Model(dist.get_rank())

        run = launch(work, ranks=2)
        print([model.value for model in run.results], isinstance(run.results[0], Model))
    """)
    assert not cell.error, cell.traceback
    assert cell.text.endswith("[ranks 0, 1] working\n[0, 3] True\n")


def test_a_failure_shows_the_learners_line_and_no_launcher(notebook):
    cell = notebook.run("""
        def divide():
            x = 1
            return x / 0

        launch(divide, ranks=2)
    """)
    assert cell.error == "RankFailed"
    assert "ZeroDivisionError" in cell.traceback.splitlines()[0]
    assert f"cell [{cell.number}], line 3: `return x / 0`" in cell.traceback.splitlines()[1]
    assert "elastic" not in cell.traceback and "course_lib" not in cell.traceback and "run.py" not in cell.traceback


def test_a_hang_names_the_line_of_the_cell(notebook):
    cell = notebook.run(HANG.format(timeout=1))
    assert cell.error == "RanksHung"
    here = f"cell [{cell.number}], line"
    assert f"ranks 0, 2 wait in all_reduce ({here} 6: `dist.all_reduce(torch.ones(1))`)" in cell.traceback
    assert f"{here} 5: `time.sleep(1000)`" in cell.traceback
    assert "course_lib" not in cell.traceback


def test_ctrl_c_ends_the_ranks_and_only_them(notebook):
    for presses in (1, 3):

        def press(presses=presses):
            time.sleep(0.3)  # the ranks are deep in their waiting
            for _ in range(presses):
                notebook.manager.interrupt_kernel()
                time.sleep(0.02)

        # a second Ctrl-C may hit the kernel while it reports the first: then the cell ends without a word
        expected = {"KeyboardInterrupt"} if presses == 1 else {"KeyboardInterrupt", ""}
        cell = notebook.run(HANG.format(timeout=500), when="rank is up", then=press)
        assert cell.error in expected, presses
        assert "course_lib" not in cell.traceback or presses > 1
        until(lambda: len(notebook.processes()) == 2 and not notebook.folders())

        cell = notebook.run("print(launch(lambda: 5, ranks=2).results)")
        assert not cell.error and "[5, 5]" in cell.text, presses


def test_ranks_and_what_they_started_end_with_the_kernel(notebook):
    """However it ends: a restart in the middle of a run, and then a kill of the kernel's process alone."""
    with_child = HANG.replace('print("rank', 'import subprocess; subprocess.Popen(["sleep", "1000"]); print("rank')
    ends = {
        "restart": lambda: notebook.manager.restart_kernel(now=True),
        "kill": lambda: os.kill(notebook.manager.provisioner.pid, signal.SIGKILL),
    }
    for name, end in ends.items():
        notebook.client.execute(textwrap.dedent(IMPORTS + with_child.format(timeout=500)))
        until(lambda: len(notebook.processes()) == 2 + 3 + 3)
        time.sleep(0.5)  # the ranks are deep in their waiting
        below = [*map(psutil.Process, notebook.processes())]
        end()
        until(lambda below=below: not any(map(runs, below)) and not notebook.folders())
        if name == "restart":
            notebook.client.wait_for_ready(timeout=200)
