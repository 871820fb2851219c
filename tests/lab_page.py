"""JupyterLab as a learner meets it: a server on a copy of the notebooks, and what a person does on its page."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from course_lib.models.smollm2_weights import cache_dir

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parent.parent
MAP = "lessons/00_start_here.ipynb"
PATIENCE = 60.0
"""Seconds for anything but the run of a whole lesson: an idle machine needs a tenth of it."""
PRIVATE = {
    "HOME": ".", "TMPDIR": "tmp", "BEYOND_ONE_GPU_HOME": "progress", "IPYTHONDIR": "ipython", "MPLCONFIGDIR": "matplotlib",
    "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
}  # fmt: skip
NO_NEWS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}


def within(seconds: float, holds: Callable[[], object]) -> bool:
    """True as soon as `holds()` does; asked for `seconds` at most."""
    deadline = time.monotonic() + seconds
    while not (held := bool(holds())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Server:
    """`make lab`'s JupyterLab, without a browser, on a copy of `notebooks` in `folder`, with a home of its own.

    It keeps its token and takes a free port. course_lib comes from the environment, as it does for a learner. `folder`
    has a short path: sockets lie below it.
    """

    def __init__(self, folder: Path, notebooks: list[str]):
        self.course, self.home, self.log = folder / "course", folder / "home", folder / "server.log"
        for name in notebooks:
            (self.course / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.course / name)
        for under in PRIVATE.values():
            (self.home / under).mkdir(parents=True, exist_ok=True)
        overrides = self.home / "config" / "labconfig" / "default_setting_overrides.json"
        overrides.parent.mkdir()
        overrides.write_text(json.dumps(NO_NEWS))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "JPY_", "PYTEST"))}
        environment |= {name: str(self.home / under) for name, under in PRIVATE.items()}
        # SmolLM2's weights are converted once for all tests
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "BEYOND_ONE_GPU_CACHE": str(cache_dir())}
        command = [
            sys.executable,
            "-m",
            "course_lib.notebook.start_jupyterlab",
            "--ServerApp.root_dir=.",
            "--no-browser",
            "--allow-root",
        ]
        command += [f"--LabApp.default_url=/lab/tree/{MAP}", "--ServerApp.port=0"]
        self.seen: set[psutil.Process] = set()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.course, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        if not within(PATIENCE, lambda: self.process.poll() is not None or self.address()):
            self.stop()
        assert self.process.poll() is None, f"JupyterLab did not start:\n{self.log_tail()}"

    def address(self) -> str:
        """Where the map opens, token included; empty as long as the server has not said so."""
        for file in (self.home / "runtime").glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):  # it is being written
                told = json.loads(file.read_text())
                return f"{told['url']}lab/tree/{MAP}?token={told['token']}"
        return ""

    def processes(self) -> list[psutil.Process]:
        """What runs below the server now. It is remembered, for `stop` says what outlives the server."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self.seen if alive(process)]

    def folders(self) -> list[Path]:
        """What launches have left in their temporary folder."""
        return list((self.home / "tmp").glob("beyond-one-gpu-*"))

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> list[psutil.Process]:
        """End the server as one ends it by a signal; returns the processes that outlived it, which are then killed."""
        if self.process.returncode is not None:
            return []
        self.processes()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        within(10, lambda: not any(map(alive, self.seen)))
        left = [process for process in self.seen if alive(process)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        return left


class Lab:
    """The page: what a person does in JupyterLab by mouse and keyboard, and what they can read there."""

    def __init__(self, page: Page, course: Path):
        self.page, self.course = page, course
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.set_default_timeout(1000 * PATIENCE)

    @property
    def notebook(self) -> Locator:
        """The notebook in front."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def ready(self, file: str) -> None:
        """Wait until `file` is in front, all of its cells are there and its kernel is idle."""
        cells = len(json.loads((self.course / file).read_text())["cells"])
        self.tab(file, ".lm-mod-current").wait_for()
        self.notebook.locator(f".jp-Notebook .jp-Cell >> nth={cells - 1}").wait_for(state="attached")
        self.notebook.locator(".jp-Spinner").wait_for(state="detached")
        self.notebook.locator(".jp-KernelName", has_text="Python 3").wait_for()
        self.idle()

    def idle(self, seconds: float = PATIENCE) -> None:
        """Wait until no cell is queued or running and the kernel says that it is idle."""
        limit = 1000 * seconds
        self.notebook.locator(".jp-InputPrompt", has_text="[*]").first.wait_for(state="detached", timeout=limit)
        self.notebook.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=limit)

    def tab(self, file: str, also: str = "") -> Locator:
        """The tab of a notebook; a lesson and its lab have the same name there, and only its tooltip has the path."""
        return self.page.locator(f'.lm-DockPanel-tabBar .lm-TabBar-tab{also}[title*="Path: {file}"]')

    def to(self, file: str) -> None:
        """Click the tab of a notebook that is open."""
        self.tab(file).click()
        self.ready(file)

    def save(self, file: str) -> None:
        """Ctrl+S in the notebook in front; returns when `file` is written and its tab shows no dot any more."""
        before = (self.course / file).stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        assert within(PATIENCE, lambda: (self.course / file).stat().st_mtime_ns != before), f"{file} is not saved"
        self.tab(file, ":not(.jp-mod-dirty)").wait_for()

    def menu(self, menu: str, entry: str) -> None:
        """Choose from the menu bar, for example menu("Run", "Run All Cells")."""
        self.page.locator("#jp-MainMenu .lm-MenuBar-item", has_text=menu).click()
        self.page.locator(".lm-Menu-item", has=self.page.get_by_text(entry, exact=True)).click()

    def cell(self, source: str) -> Locator:
        """The code cell whose source has `source` in it."""
        editor = self.page.locator(".jp-InputArea-editor", has_text=source)
        return self.notebook.locator(".jp-CodeCell", has=editor).first

    def select(self, cell: Locator) -> None:
        """Click into a cell's code."""
        cell.locator(".cm-content").click()

    def write(self, cell: Locator, code: str) -> None:
        """Replace a cell's code as a paste does."""
        self.select(cell)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(code)
        assert cell.locator(".cm-line").all_text_contents() == code.split("\n")

    def run(self, cell: Locator, seconds: float = PATIENCE) -> str:
        """Shift+Enter in a cell; returns what it shows when it is done."""
        self.start(cell)
        self.idle(seconds)
        return self.text(cell)

    def start(self, cell: Locator) -> None:
        """Shift+Enter in a cell; when this returns it is queued, running or done."""
        prompt = cell.locator(".jp-InputPrompt")
        before = prompt.text_content()
        self.select(cell)
        self.page.keyboard.press("Shift+Enter")
        assert within(PATIENCE, lambda: prompt.text_content() != before), f"the cell does not start: {before}"

    def text(self, cell: Locator) -> str:
        """What stands below a cell."""
        return "\n".join(cell.locator(".jp-OutputArea-output").all_text_contents())

    def pictures(self) -> list[tuple[int, str]]:
        """(width of the decoded image in pixels, text for those who do not see it) of every picture in an output."""
        found = self.notebook.locator(".jp-OutputArea img")
        return [tuple(seen) for seen in found.evaluate_all("all => all.map(i => [i.naturalWidth, i.alt])")]
