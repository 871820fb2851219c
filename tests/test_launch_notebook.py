"""Launches from a real Jupyter kernel: reports name the cell, Ctrl-C and the kernel's end leave nothing behind."""

from __future__ import annotations

import glob
import os
import signal
import textwrap
import time
from dataclasses import dataclass, field

import psutil
import pytest
from jupyter_client.manager import KernelManager

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
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
    error: str = ""
    traceback: str = ""
    number: int = 0


@dataclass
class Notebook:
    """A kernel, one cell at a time."""

    folder: str
    manager: KernelManager = field(init=False)

    def __post_init__(self):
        self.manager = KernelManager(kernel_name="python3")
        environment = os.environ | {"PYTHONPATH": HERE, "TMPDIR": self.folder, "OMP_NUM_THREADS": "1"}
        self.manager.start_kernel(env=environment, cwd=self.folder)
        self.connect()

    def connect(self):
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=200)

    def run(self, code: str, *, when: str = "", then=None, timeout: float = 200) -> Cell:
        """Execute a cell; ``then()`` is called as soon as the cell has printed ``when``."""
        cell = Cell()
        message = self.client.execute(textwrap.dedent(code).lstrip("\n"))  # IPython does not count leading empty lines
        deadline = time.monotonic() + timeout
        while True:
            told = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if told["parent_header"].get("msg_id") != message:
                continue
            content = told["content"]
            if told["msg_type"] == "execute_input":
                cell.number = content["execution_count"]
            elif told["msg_type"] == "stream":
                cell.text += content["text"]
                if then is not None and when in cell.text:
                    then()
                    then = None
                    if not self.manager.is_alive():
                        return cell
            elif told["msg_type"] == "error":
                cell.error, cell.traceback = content["ename"], "\n".join(content["traceback"])
            elif told["msg_type"] == "status" and content["execution_state"] == "idle":
                return cell

    def processes(self) -> list[psutil.Process]:
        """Everything below the kernel: first the resource tracker and the warm server, then the ranks."""
        return psutil.Process(self.manager.provisioner.pid).children(recursive=True)

    def folders(self) -> list[str]:
        return glob.glob(f"{self.folder}/beyond-one-gpu-*")


@pytest.fixture(scope="module")
def notebook(private_tmp):
    opened = Notebook(private_tmp)
    assert not opened.run(IMPORTS).error
    yield opened
    opened.client.stop_channels()
    opened.manager.shutdown_kernel(now=True)


def within(seconds: float, holds) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_a_cells_function_and_class_run(notebook):
    cell = notebook.run("""
        scale = 3

        class Model:
            def __init__(self, rank):
                self.value = rank * scale

        def work(plus=0):
            import torch.distributed as dist
            print("working")
            return Model(dist.get_rank())

        run = launch(work, ranks=2)
        print([model.value for model in run.results], isinstance(run.results[0], Model))
    """)
    assert not cell.error, cell.traceback
    assert "imports PyTorch and Transformers once" in cell.text
    assert cell.text.endswith("[ranks 0, 1] working\n[0, 3] True\n")


def test_a_failure_shows_the_learners_line_and_no_launcher(notebook):
    cell = notebook.run("""
        def divide():
            x = 1
            return x / 0

        launch(divide, ranks=2)
    """)
    assert cell.error == "RankFailed"
    first, second = cell.traceback.splitlines()[:2]
    assert first.startswith("RankFailed: rank ") and "raised ZeroDivisionError: division by zero" in first
    assert second == f"    at cell [{cell.number}], line 3: `return x / 0`"
    assert "elastic" not in cell.traceback and "course_lib" not in cell.traceback and "run.py" not in cell.traceback


def test_a_hang_names_the_line_of_the_cell(notebook):
    cell = notebook.run(HANG.format(timeout=1))
    assert cell.error == "RanksHung"
    here = f"cell [{cell.number}], line"
    assert f"ranks 0, 2 wait in all_reduce ({here} 6: `dist.all_reduce(torch.ones(1))`)" in cell.traceback
    assert f"rank 1 never got there: it is in {here} 5: `time.sleep(1000)`" in cell.traceback
    assert "course_lib" not in cell.traceback


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_ends_the_ranks_and_only_them(notebook, presses):
    def press():
        time.sleep(0.3)  # the ranks are deep in their waiting
        for _ in range(presses):
            notebook.manager.interrupt_kernel()
            time.sleep(0.02)

    # a second Ctrl-C may hit the kernel while it reports the first: then the cell ends without a word
    expected = {"KeyboardInterrupt"} if presses == 1 else {"KeyboardInterrupt", ""}
    cell = notebook.run(HANG.format(timeout=50), when="rank is up", then=press)
    assert cell.error in expected
    if presses == 1:
        assert cell.traceback == "KeyboardInterrupt: you stopped the run; its ranks are ended."
    assert within(60, lambda: len(notebook.processes()) == 2), notebook.processes()
    assert within(60, lambda: not notebook.folders())

    cell = notebook.run("print(launch(lambda: 5, ranks=2).results)")
    assert not cell.error and "[5, 5]" in cell.text
    cell = notebook.run("print('asleep', flush=True); time.sleep(600)", when="asleep", then=press)
    assert cell.error in expected


def test_an_interrupt_during_the_first_start_spares_the_server(notebook):
    """Jupyter interrupts the kernel's whole process group, of which the server, still importing, is a member."""
    code = """
        import subprocess
        program = '''
        import os, signal, sys, time
        from course_lib.launch import agent
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, lambda *_: None)
        agent.warm()
        time.sleep(float(sys.argv[1]))
        os.killpg(0, signal.SIGINT)
        time.sleep(0.3)
        print(os.waitpid(agent.multiprocessing.forkserver._forkserver._forkserver_pid, os.WNOHANG))
        '''
        started = [subprocess.Popen([sys.executable, "-c", program, str(s)], stdout=-1, stderr=-1) for s in (0.02, 0.5)]
        print([process.communicate() for process in started])
    """
    cell = notebook.run(code.replace("        '''", "'''").replace("\n        ", "\n"))
    assert cell.text.count(r"(b'(0, 0)\n', b'')") == 2, cell.text + cell.traceback


def test_the_server_imports_what_else_the_ranks_will_need_and_says_nothing(notebook):
    cell = notebook.run("""
        import sys
        from course_lib.launch import launch, warm

        def there():
            return "this" in sys.modules  # the module of Python's that prints a poem when it is imported

        print(launch(there, ranks=1, quiet=True).results)
        warm("this")  # the server that runs already is replaced
        print(launch(there, ranks=1, quiet=True).results)
    """)
    assert not cell.error, cell.traceback
    assert cell.text == "[False]\n[True]\n"


def test_a_restart_in_the_middle_of_a_run(notebook):
    def restart():
        before.extend(notebook.processes())
        notebook.manager.restart_kernel(now=True)

    before: list[psutil.Process] = []
    message = notebook.client.execute(textwrap.dedent(HANG.format(timeout=50)))
    assert message and within(60, lambda: len(notebook.processes()) == 5)
    time.sleep(0.5)
    restart()
    assert len(before) == 5 and within(60, lambda: not any(p.is_running() for p in before)), before
    assert within(60, lambda: not notebook.folders())
    notebook.client.stop_channels()
    notebook.connect()


def test_a_kernel_killed_in_the_middle_of_a_run(notebook):
    assert not notebook.run(IMPORTS).error
    children: list[psutil.Process] = []

    def kill():
        children.extend(notebook.processes())
        os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)
        within(60, lambda: not notebook.manager.is_alive())

    with_child = HANG.replace('print("rank', 'import subprocess; subprocess.Popen(["sleep", "1000"]); print("rank')
    cell = notebook.run(with_child.format(timeout=50), when="rank is up", then=kill)
    assert "rank is up" in cell.text and len(children) >= 2 + 3 + 1, children
    assert within(60, lambda: not any(p.is_running() and p.status() != "zombie" for p in children)), children
    assert within(60, lambda: not notebook.folders())
