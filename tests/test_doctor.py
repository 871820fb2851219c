"""The doctor: each planted illness is found, a healthy machine has none, and a bare old Python can start it."""

from __future__ import annotations

import ast
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from processes import ROOT, python, runs, until

from course_tools.doctor import Finding, examine, examining, findings, gpus, limits
from course_tools.doctor.command import main
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Answer, probe

CARD = {"name": "A100", "memory": 80 * 2**30, "major": 8, "minor": 0}
T4 = {"name": "Tesla T4", "memory": 15 * 2**30, "major": 7, "minor": 5}


def answer(**values: object) -> Answer:
    return Answer({"version": "2.13.0", "cuda": "13.0", "cards": [], "backends": ["gloo", "nccl"], **values})


def nvidia_smi(link: str = "SYS", number: int = 2):
    """What nvidia-smi prints on a machine of two GPUs, by its arguments."""
    listed = "".join(f"GPU {i}: NVIDIA A100 (UUID: GPU-{i})\n" for i in range(number))
    matrix = f"\tGPU0\tGPU1\nGPU0\t X \t{link}\nGPU1\t{link}\t X \n"
    printed = {("-L",): listed, ("topo", "-m"): matrix, (): "| Driver Version: 550.54  CUDA Version: 12.4 |"}
    return lambda arguments: printed[arguments]


def no_package(name: str) -> str:
    if name == "axolotl":
        raise PackageNotFoundError(name)
    return version(name)


def test_two_ranks_and_the_installed_packages_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "SECONDS", 80.0)  # the machine may be busy with other tests
    found = {finding.about: finding for finding in examine()}
    assert not {finding for finding in found.values() if "cannot be looked at" in finding.says}
    for name in ("PyTorch", "two ranks", "packages", "DeepSpeed", "bitsandbytes", "kernel", "GPUs"):
        assert found[name].level != PROBLEM, found[name]


def test_it_starts_on_python_3_8_with_nothing_but_the_standard_library() -> None:
    program = """if True:
        import sys, course_tools.__main__, course_tools.doctor.command
        files = (getattr(module, "__file__", None) for module in sys.modules.values())
        print("\\n".join(file for file in files if file and "/course_" in file))"""
    files = python(program, stdout=subprocess.PIPE).communicate()[0].split()  # which has no site-packages
    assert str(ROOT / "course_tools/doctor/limits.py") in files
    for file in files:
        ast.parse(Path(file).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_an_old_python_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    old = examining.python((3, 9, 18))
    monkeypatch.setattr(examining, "python", lambda: old)
    found = list(examine())
    assert found[0] is old and {"cores", "disk"} < {finding.about for finding in found}
    assert not {"PyTorch", "packages"} & {finding.about for finding in found}


def test_what_is_wrong_with_python_pytorch_packages_or_gpus_is_found() -> None:
    rows = [
        (examining.python((3, 9, 18)), PROBLEM, "3.9.18"),
        (examining.python((3, 14, 0)), PROBLEM, "3.14"),
        (examining.python((3, 12, 1)), NOTE, ""),
        (examining.python((3, 11, 7)), OK, ""),
        (examining.packages(lambda name: "0.0.1"), NOTE, "torch 0.0.1"),
        (examining.packages(no_package), PROBLEM, "axolotl"),
        (examining.pytorch(Answer(failed="No module named 'torch'")), PROBLEM, "make setup"),
        (examining.pytorch(Answer(failed="ImportError: libcudnn.so.9: cannot open")), PROBLEM, "libcudnn"),
        (examining.pytorch(Answer(failed="no answer", slow=True)), PROBLEM, "again"),
        (examining.pytorch(answer()), OK, "CUDA 13.0"),
        (examining.two_ranks(Answer({"sums": [3.0, 3.0, 1.0], "backends": ["gloo"]})), OK, "gloo"),
        (examining.two_ranks(Answer({"sums": [3.0, 1.0, 1.0], "backends": ["gloo"]})), PROBLEM, "[3.0, 1.0, 1.0]"),
        (examining.deepspeed(Answer(failed="broken")), PROBLEM, "broken"),
        (examining.bitsandbytes(Answer(failed="broken")), PROBLEM, "broken"),
        (examining.kernel(Answer({"python": "/opt/other/bin/python"})), PROBLEM, "/opt/other/bin/python"),
        (examining.kernel(Answer({"python": "python"})), OK, ""),
        (examining.kernel(Answer({"python": sys.executable})), OK, ""),
        (gpus.cards(answer(cuda=None), nvidia_smi(number=0)), OK, ""),  # a laptop
        (gpus.cards(answer(cuda=None), nvidia_smi()), PROBLEM, "CPU build"),
        (gpus.cards(answer(), nvidia_smi()), PROBLEM, "12.4"),  # too old a driver, or hidden cards
        (gpus.cards(answer(cards=[CARD])), OK, "80.0 GiB, compute 8.0"),
        (gpus.cards(answer(cards=[CARD, T4])), NOTE, "fp16"),
        (gpus.links(answer(cards=[CARD] * 2), nvidia_smi("NV12")), OK, ""),
        (gpus.links(answer(cards=[CARD] * 2), nvidia_smi("SYS")), NOTE, "SYS"),
    ]
    for finding, level, words in rows:
        assert finding.level == level and words in f"{finding.says} {finding.means} {finding.mend}", finding
    assert gpus.links(answer(cards=[CARD])) is None


def test_what_the_machine_lacks_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def elsewhere(*_: object, **__: object) -> list[tuple]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))]  # nobody's: it is for documentation

    taken = socket.create_server(("", 0))
    usage = namedtuple("usage", "total used free")
    gib = 2**30
    (tmp_path / "file").touch()
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    plenty = [
        (limits, "cores_here", lambda: 16.0),
        (limits, "memory_here", lambda: 64 * gib),
        (shutil, "disk_usage", lambda path: usage(64 * gib, 0, 64 * gib)),
        (resource, "getrlimit", lambda which: (4096, 4096)),
        (socket, "gethostname", lambda: "localhost"),
    ]
    little = [
        (limits, "cores_here", lambda: 0.5),
        (limits, "memory_here", lambda: 4 * gib),
        (shutil, "disk_usage", lambda path: usage(gib / 16, 0, gib / 64)),
        (resource, "getrlimit", lambda which: (256, 4096)),
        (socket, "getaddrinfo", elsewhere),
    ]
    looks = {
        limits.cores: NOTE,
        limits.threads: NOTE,
        limits.memory: PROBLEM,
        lambda: limits.shared_memory(str(tmp_path)): NOTE,
        limits.disk: PROBLEM,
        limits.open_files: NOTE,
        limits.host_name: NOTE,
        lambda: examining.build_locks(str(tmp_path)): NOTE,
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "new"))
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(tmp_path / "new"))
    with taken, monkeypatch.context() as patch:
        for where, name, what in little:
            patch.setattr(where, name, what)
        lock.parent.mkdir(parents=True)
        lock.touch()
        assert (limits.port(taken.getsockname()[1]).level, limits.port(0).level) == (NOTE, OK)  # 0: any that is free
        for look, level in looks.items():
            assert look().level == level, look()
    for where, name, what in plenty:
        monkeypatch.setattr(where, name, what)
    lock.unlink()
    for look in looks:
        assert look().level == OK, look()
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "file" / "below"))
    assert limits.disk().level == PROBLEM and "BEYOND_ONE_GPU_HOME" in limits.disk().mend


def test_a_look_that_breaks_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def quota() -> Finding:
        raise ZeroDivisionError

    monkeypatch.setattr(examining, "MACHINE", (quota, limits.memory))
    monkeypatch.setattr(examining, "python", lambda: Finding(PROBLEM, "Python", "old"))
    assert [(found.about, found.level) for found in examine()][1] == ("quota", PROBLEM)
    assert len(list(examine())) == 3


def test_a_process_of_its_own_answers_or_says_how_it_ended(tmp_path: Path) -> None:
    rows = {
        "import nonsense_of_nobody": "ModuleNotFoundError",
        "import os; os.abort()": "SIGABRT",
        "print('hello')": "nothing",
        "import os; os._exit(7)": "7",
    }
    for code, fragment in rows.items():
        assert fragment in probe(code).failed, code
    code = "import json, os; print('noise'); print(json.dumps([os.environ[name] for name in ('PATH', 'MORE')]))"
    assert probe(code, MORE="1").values == [os.environ["PATH"], "1"]


def test_a_process_that_does_not_answer_is_killed_with_all_that_it_started(monkeypatch, tmp_path: Path) -> None:
    pid, communicate = tmp_path / "pid", subprocess.Popen.communicate

    def late(process: subprocess.Popen, timeout: float | None = None) -> tuple[str, str]:
        if timeout:
            until(lambda: pid.exists() and pid.read_text().endswith("."))
            raise subprocess.TimeoutExpired(process.args, timeout)
        return communicate(process)

    monkeypatch.setattr(subprocess.Popen, "communicate", late)
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    answer = probe(f"{child}open({str(pid)!r}, 'w').write(str(p.pid) + '.'); p.wait()")
    assert answer.slow and answer.finding("PyTorch", "No lesson runs.", "Mend it.").level == PROBLEM
    until(lambda: not runs(int(pid.read_text()[:-1])))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    some = [Finding(OK, "Python", "3.11"), Finding(PROBLEM, "disk", "full", "Saving fails.", "Free some.")]
    monkeypatch.setattr("course_tools.doctor.command.examine", lambda: iter(some))
    assert main([]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["mend"] == "Free some."
    monkeypatch.setattr("course_tools.doctor.command.examine", lambda: iter(some[:1]))
    assert main([]) == 0 and "PROBLEM" not in capsys.readouterr().out
