"""The doctor: each planted illness gets its sentence, a healthy machine gets none, and a bare old Python can run it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest

from course_tools.doctor import Finding, examine, gpus, machine, packages, probe
from course_tools.doctor.command import main, summary, text_of
from course_tools.doctor.findings import NOTE, OK, PROBLEM

ROOM = Path(machine.__file__).parent
ROOT = ROOM.parent.parent
Usage = namedtuple("Usage", "total used free")
CUDA = {"version": "2.13.0", "cuda": "13.0", "available": True, "nccl": True, "gloo": True}
CARD = {"name": "A100", "memory": 80 * 2**30, "capability": [8, 0]}


def asked(**told: object) -> probe.Answer:
    return probe.Answer(dict(told))


@pytest.fixture(scope="module")
def whole() -> dict[str, Finding]:
    """This machine, once; it may be busy with other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "SECONDS", 100.0)
        patch.setattr(packages, "RANKS_SECONDS", 100.0)
        return {finding.about: finding for finding in examine()}


def test_this_machine_can_run_the_course(whole) -> None:
    problems = [text_of(finding) for finding in whole.values() if finding.level == PROBLEM]
    assert not problems, "\n".join(problems)
    assert whole["two ranks"].says == "an all-reduce over gloo adds up" or "nccl" in whole["two ranks"].says
    assert {
        "Python",
        "PyTorch",
        "GPUs",
        "DeepSpeed",
        "bitsandbytes",
        "axolotl",
        "hub",
        "build locks",
        "progress",
    } <= set(whole)


def test_each_module_is_python_3_8() -> None:
    """So that an old Python gets the sentence that it is old, and not a SyntaxError."""
    others = (
        "course_tools/__init__",
        "course_tools/__main__",
        "course_tools/command_line",
        "course_lib/validation",
        "course_lib/units",
    )
    for path in [*ROOM.glob("*.py"), *(ROOT / f"{name}.py" for name in others)]:
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"torch", "numpy", "tomllib"}, path


def test_an_old_python_is_told_so(monkeypatch) -> None:
    old = machine.python_version((3, 9, 18))
    assert (
        old.level == PROBLEM and "3.9.18" in old.says and "3.11, 3.12 or 3.13" in old.means and "make lab" in old.mend
    )
    assert machine.python_version((3, 14, 0)).level == PROBLEM
    assert machine.python_version((3, 12, 1)).level == NOTE and machine.python_version((3, 11, 7)).level == OK
    monkeypatch.setattr(machine, "python_version", lambda: old)
    found = list(examine())
    assert found[0] is old and "PyTorch" not in {finding.about for finding in found}


def test_no_compiler_is_a_note(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = machine.compiler()
    assert found.level == NOTE and "lesson 5 does without" in found.means and "apt install g++" in found.mend


def test_a_full_disk_and_little_shared_memory(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 2**20))
    full = machine.disk(str(tmp_path / "not" / "there"), "disk", needs=2**30, advice="Free some space.")
    assert full.level == PROBLEM and full.says == "0.0 GiB free" and full.mend == "Free some space."
    little = machine.shared_memory(str(tmp_path))
    assert little.level == NOTE and "64 MiB" in little.says and "--shm-size" in little.mend


def test_a_home_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    found = machine.writable(str(tmp_path / "file" / "below"), "progress", means="It is forgotten.", mend="Set it.")
    assert (found.level, found.means, found.mend) == (PROBLEM, "It is forgotten.", "Set it.")
    assert machine.writable(str(tmp_path / "new"), "progress", means="", mend="").level == OK
    assert list((tmp_path / "new").iterdir()) == []  # nothing is left there


def test_half_an_installation_of_cuda() -> None:
    broken = packages.torch_works(probe.Answer(failed="ImportError: libcudnn.so.9: cannot open shared object file"))
    assert broken.level == PROBLEM and "half installed" in broken.mend
    missing = packages.torch_works(probe.Answer(failed="ModuleNotFoundError: No module named 'torch'"))
    assert "make setup" in missing.mend
    listed = "GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n"
    cpu_build = gpus.cards(asked(**CUDA | {"cuda": None, "available": False, "cards": []}), listed)
    assert cpu_build.level == PROBLEM and "the driver has 2, and this PyTorch is a CPU build" in cpu_build.says
    hidden = gpus.cards(asked(**CUDA | {"available": False, "cards": []}), listed)
    assert hidden.level == PROBLEM and "CUDA_VISIBLE_DEVICES" in hidden.means
    assert gpus.cards(asked(**CUDA | {"available": False, "cards": []}), None).level == OK  # a laptop
    assert "A100 (80.0 GiB)" in gpus.cards(asked(**CUDA, cards=[CARD]), listed).says


def test_old_cards_and_slow_links() -> None:
    t4 = asked(**CUDA, cards=[{"name": "Tesla T4", "memory": 15 * 2**30, "capability": [7, 5]}] * 2)
    found = gpus.sixteen_bit(t4)
    assert found.level == NOTE and found.says == "Tesla T4 does not compute in bf16" and "fp16" in found.means
    assert gpus.sixteen_bit(asked(**CUDA, cards=[CARD])).level == OK and gpus.sixteen_bit(asked(cards=[])) is None
    two = asked(**CUDA, cards=[CARD, CARD])
    assert gpus.topology(two, "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n").level == OK
    far = gpus.topology(two, "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n")
    assert far.level == NOTE and "the processors only (SYS)" in far.says
    assert gpus.topology(two, None).level == NOTE and gpus.topology(asked(cards=[CARD]), None) is None


def test_ranks_that_do_not_add_up() -> None:
    assert packages.sums_are_right(asked(sums=[3.0, 3.0], backend="gloo")).level == OK
    assert packages.sums_are_right(asked(sums=[3.0, 1.0], backend="gloo")).says == "1 + 2 gave [3.0, 1.0]"
    assert "loopback" in packages.sums_are_right(probe.Answer(failed="it did not answer within 40 seconds")).mend


def test_locks_of_dead_builds(tmp_path) -> None:
    assert packages.build_locks(str(tmp_path)).level == OK
    (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.touch()
    found = packages.build_locks(str(tmp_path))
    assert found.level == NOTE and str(lock) in found.mend and lock.exists()  # it removes nothing by itself


def test_the_hub_is_a_note_at_most(monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert machine.hub(0.5).level == NOTE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "unset HF_HUB_OFFLINE" in machine.hub().mend


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nonsense_of_nobody", "ModuleNotFoundError: No module named 'nonsense_of_nobody'"),
        ("import os; os.abort()", "the process died of SIGABRT"),
        ("raise SystemExit(3)", "the process ended with exit code 3"),
        ("print('hello')", "it printed nothing that can be read"),
    ],
)
def test_what_a_process_of_its_own_can_do(code: str, why: str) -> None:
    assert probe.probe(code) == probe.Answer(failed=why)
    assert probe.probe("print('noise'); print('{\"a\": 1}')") == probe.Answer({"a": 1})


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path) -> None:
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    late = probe.probe(code, seconds=8.0)
    assert late.failed == "it did not answer within 8 seconds"
    told = late.finding("PyTorch", "No lesson runs.", "Install it again.")
    assert told.level == PROBLEM and "not known" in told.means and "when it is quieter" in told.mend
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(child, 0)
            if Path(f"/proc/{child}/stat").exists() and " Z " in Path(f"/proc/{child}/stat").read_text():
                raise ProcessLookupError  # dead, and nobody has asked for its exit code
            time.sleep(0.1)


def test_the_command(monkeypatch, capsys) -> None:
    some = [Finding(OK, "Python", "3.11"), Finding(PROBLEM, "disk", "full", "Saving fails.", "Free some.")]
    monkeypatch.setattr("course_tools.doctor.command.examine", lambda: iter(some))
    assert main([]) == 1
    told = capsys.readouterr().out
    assert (
        "PROBLEM  disk            full" in told
        and "Free some." in told
        and "1 problem, with what mends it above" in told
    )
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["mend"] == "Free some."
    monkeypatch.setattr("course_tools.doctor.command.examine", lambda: iter(some[:1]))
    assert main([]) == 0 and "every lesson runs here" in capsys.readouterr().out
    assert summary([], 0.1, "every lesson runs").startswith("every lesson runs (")
