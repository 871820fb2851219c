"""The doctor: each planted illness is found, a healthy machine has none, and a bare old Python can run it."""

from __future__ import annotations

import ast
import json
import shutil
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from course_tools.doctor import Finding, examine, gpus, machine, packages, probe
from course_tools.doctor.command import main, text_of
from course_tools.doctor.findings import NOTE, OK, PROBLEM

ROOM = Path(machine.__file__).parent
ROOT = ROOM.parent.parent
CUDA = {"version": "2.13.0", "cuda": "13.0", "available": True, "nccl": True, "gloo": True}
HIDDEN = CUDA | {"available": False, "cards": []}
CARD = {"name": "A100", "memory": 80 * 2**30, "capability": [8, 0]}


def test_two_ranks_and_the_installed_packages_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS", 100.0)  # the machine may be busy with other tests
    monkeypatch.setattr(packages, "RANKS_SECONDS", 100.0)
    findings = {finding.about: finding for finding in examine()}
    assert {"Python", "GPUs", "hub", "build locks", "progress"} <= set(findings)
    for name in ("PyTorch", "two ranks", "DeepSpeed", "bitsandbytes", "axolotl"):
        assert findings[name].level != PROBLEM, text_of(findings[name])


def test_each_module_is_python_3_8() -> None:
    """So that an old Python gets the sentence that it is old, and not a SyntaxError."""
    tools = [f"course_tools/{name}.py" for name in ("__init__", "__main__", "command_line")]
    shared = ("course_lib/validation.py", "course_lib/units.py")
    for path in [*ROOM.glob("*.py"), *(ROOT / name for name in (*tools, *shared))]:
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"torch", "numpy", "tomllib"}, path


def test_an_old_python_is_a_problem_and_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, level in {(3, 14, 0): PROBLEM, (3, 12, 1): NOTE, (3, 11, 7): OK}.items():
        assert machine.python_version(version).level == level, version
    old = machine.python_version((3, 9, 18))
    assert old.level == PROBLEM and "3.9.18" in old.says and old.mend
    monkeypatch.setattr(machine, "python_version", lambda: old)
    findings = list(examine())
    assert findings[0] is old and "PyTorch" not in {finding.about for finding in findings}


def test_what_the_machine_lacks_is_found_with_what_mends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")(64 * 2**20, 0, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    full = machine.disk(str(tmp_path / "not" / "there"), "disk", needs=2**30, advice="Free some.")
    little, no_compiler = machine.shared_memory(str(tmp_path)), machine.compiler()
    assert (full.level, full.mend) == (PROBLEM, "Free some.")
    assert little.level == NOTE and "--shm-size" in little.mend
    assert no_compiler.level == NOTE and "g++" in no_compiler.mend
    (tmp_path / "file").write_text("")
    unwritable = machine.writable(str(tmp_path / "file" / "below"), "progress", means="Forgotten.", mend="Set it.")
    assert unwritable.level == PROBLEM
    assert machine.writable(str(tmp_path / "new"), "progress", means="", mend="").level == OK


def test_a_broken_pytorch_and_cards_that_it_does_not_see() -> None:
    broken = packages.torch_works(probe.Answer(failed="ImportError: libcudnn.so.9: cannot open shared object file"))
    assert broken.level == PROBLEM and broken.mend
    listed = "GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n"
    for seen in (HIDDEN | {"cuda": None}, HIDDEN):  # the CPU build, and CUDA_VISIBLE_DEVICES=""
        assert gpus.cards(probe.Answer(seen), listed).level == PROBLEM, seen
    assert gpus.cards(probe.Answer(HIDDEN), None).level == OK  # a laptop
    t4 = probe.Answer(CUDA | {"cards": [{"name": "Tesla T4", "memory": 15 * 2**30, "capability": [7, 5]}] * 2})
    old_card = gpus.sixteen_bit(t4)
    assert old_card.level == NOTE and "Tesla T4" in old_card.says and "fp16" in old_card.means
    assert gpus.sixteen_bit(probe.Answer(CUDA | {"cards": [CARD]})).level == OK
    for link, level in (("NV12", OK), ("SYS", NOTE)):
        matrix = f"\tGPU0\tGPU1\nGPU0\t X \t{link}\nGPU1\t{link}\t X \n"
        assert gpus.topology(probe.Answer(CUDA | {"cards": [CARD, CARD]}), matrix).level == level


def test_ranks_that_do_not_add_up_and_locks_of_dead_builds(tmp_path: Path) -> None:
    assert packages.sums_are_right(probe.Answer({"sums": [3.0, 3.0], "backend": "gloo"})).level == OK
    wrong = packages.sums_are_right(probe.Answer({"sums": [3.0, 1.0], "backend": "gloo"}))
    assert wrong.level == PROBLEM and "[3.0, 1.0]" in wrong.says
    assert packages.build_locks(str(tmp_path)).level == OK
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    locked = packages.build_locks(str(tmp_path))
    assert locked.level == NOTE and str(lock) in locked.mend and lock.exists()  # it removes nothing by itself


def test_a_process_of_its_own_answers_or_says_how_it_ended(tmp_path: Path) -> None:
    rows = {
        "import nonsense_of_nobody": "ModuleNotFoundError",
        "import os; os.abort()": "SIGABRT",
        "print('hello')": "printed nothing",
    }
    for code, fragment in rows.items():
        assert fragment in probe.probe(code).failed, code
    assert probe.probe("print('noise'); print('{\"a\": 1}')") == probe.Answer({"a": 1})
    hangs = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    late = probe.probe(hangs, seconds=8.0)
    assert "8 seconds" in late.failed and late.finding("PyTorch", "No lesson runs.", "Mend it.").level == PROBLEM
    child = int((tmp_path / "pid").read_text())
    if psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        psutil.Process(child).wait(timeout=60)  # what it started ends with it


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    some = [Finding(OK, "Python", "3.11"), Finding(PROBLEM, "disk", "full", "Saving fails.", "Free some.")]
    monkeypatch.setattr("course_tools.doctor.command.examine", lambda: iter(some))
    assert main([]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["mend"] == "Free some."
    monkeypatch.setattr("course_tools.doctor.command.examine", lambda: iter(some[:1]))
    assert main([]) == 0 and "PROBLEM" not in capsys.readouterr().out
