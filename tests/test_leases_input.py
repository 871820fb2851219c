"""Leases of GPUs with other people's input, other users, impossible requests, and from the shell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import pytest
from leasing import PATIENCE, names, python

from classroom.workshop import gpus
from course_lib.launch.leases import Pool, count_gpus, files, machine, state
from course_lib.launch.leases.state import Holder

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"[]",
        b'{"name": 3, "pid": 1, "since": 1.0}',
        b'{"name": "x", "pid": -1, "since": 1.0}',
        b'{"name": "x", "pid": 1, "since": NaN}',
        b"x" * 5000,
        b"[" * 1000,
        b'{"name": "x", "pid": true, "since": 1.0}',
        b'{"name": "x", "pid": 1, "since": 1.0, "number": 1, "wants": 1}' + b" " * 1000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_record_is_somebodys(tmp_path, record):
    leases = Pool(tmp_path / "leases", gpus=1)
    with leases.lease(name="Ada"):
        (tmp_path / "leases/gpu0").write_bytes(record)
        assert leases.holders() == [Holder(0, "somebody", None, None)]
        assert gpus.main(["--folder", leases.folder]) == 0
        seat = files.lock(leases.folder, "seat00")
        files.write_record(seat, {"number": 1, "name": "Eve", "pid": 1, "wants": 1, "since": 1.0})
        assert [t.name for t in leases.waiting()] == ["Eve"]
        (tmp_path / "leases/seat00").write_bytes(record)
        assert leases.waiting() == []
    with leases.lease(name="Ben", wait=PATIENCE):  # the seat of nobody known is still locked, and stops no one
        assert names(leases) == ["Ben"]
    files.unlock(seat)


def test_names_are_plain(tmp_path, monkeypatch):
    leases = Pool(tmp_path / "leases", gpus=1)
    for given, shown in {
        "\x1b[31mRed\nBen\u202e": "[31mRed Ben",
        "\t": "somebody",
        "ü" * 99: "ü" * 40,
        "😀" * 99: "😀" * 40,
    }.items():
        with leases.lease(name=given):
            assert names(leases) == [shown]
    monkeypatch.setenv("BEYOND_ONE_GPU_NAME", "Cem")
    with leases.lease():
        assert names(leases) == ["Cem"]


def test_a_link_or_a_pipe_is_refused(tmp_path):
    leases, victim = Pool(tmp_path / "leases", gpus=2), tmp_path / "victim"
    leases.make()
    victim.write_text("mine")
    (tmp_path / "leases/gpu0").unlink()
    (tmp_path / "leases/gpu0").symlink_to(victim)
    with pytest.raises(ValueError, match="gpu0 cannot be used .it is a link"):
        leases.lease().take()
    (tmp_path / "leases/gpu0").unlink()
    os.mkfifo(tmp_path / "leases/gpu0")
    with pytest.raises(ValueError, match="gpu0 is no plain file"):
        leases.lease().take()
    assert victim.read_text() == "mine"
    (tmp_path / "leases/gpu0").unlink()
    with pytest.raises(ValueError, match="gpu0.* cannot be used|is damaged .gpu0 is gone"):
        Pool(tmp_path / "leases").lease().take()


STRANGER = """
import os, sys
from course_lib.launch.leases import Pool
os.setgid(65534); os.setuid(65534)
with Pool(sys.argv[1]).lease(1, name="Stranger", wait=5) as lease:
    print(lease.gpus, Pool(sys.argv[1]).holders()[0].name)
for attempt in (lambda: os.unlink(sys.argv[1] + "/gpu0"), lambda: open(sys.argv[1] + "/mine", "w")):
    try:
        attempt()
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_the_folder_serves_other_users_of_the_box(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="b1g-leases-") as outside:  # tests have private ones
        os.chmod(outside, 0o755)
        before = os.umask(0o077)
        try:
            leases = Pool(f"{outside}/leases", gpus=2)
            leases.make()
        finally:
            os.umask(before)
        assert os.stat(leases.folder).st_mode & 0o777 == 0o755
        with leases.lease(1, name="Root"):
            stranger = python(STRANGER, leases.folder, stdout=subprocess.PIPE, text=True)
            assert stranger.communicate(timeout=30)[0] == "(1,) Root\nrefused\nrefused\n"


def test_the_door_is_never_awaited_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "SHUT_SECONDS", 0.05)
    leases = Pool(tmp_path / "leases", gpus=1)
    leases.make()
    door = files.lock(leases.folder, files.DOOR)
    with pytest.raises(ValueError, match="door has been shut .* stopped in it"):
        leases.lease().take()
    files.unlock(door)
    with leases.lease() as lease:
        assert lease.gpus == (0,)


# ------------------------------------------------------------------------------------------------------------- bad input
def refusal(action) -> str:
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def test_refusals(tmp_path, monkeypatch):
    leases = Pool(tmp_path / "leases", gpus=2)
    assert "ask for 2 or fewer" in refusal(leases.lease(3).take)
    for n in (0, -1, True, 1.0, "1"):
        assert "ask for 1 or more" in refusal(leases.lease(n).take)
    for wait in (-1, float("nan"), float("inf"), True, "5"):
        assert "give the seconds" in refusal(leases.lease(1, wait=wait).take)
    for count in (0, 65, True, "4"):
        assert "1 to 64" in refusal(lambda count=count: Pool(tmp_path, gpus=count))
    with leases.lease(1):
        assert "may not wait for another" in refusal(leases.lease(1).take)
    assert "was made for 2 GPUs, not for 4" in refusal(Pool(leases.folder, gpus=4).lease().take)
    assert Pool(leases.folder).gpus == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    assert "has other files in it (thesis.tex)" in refusal(Pool(tmp_path / "full", gpus=1).make)
    assert "cannot be" in refusal(Pool(tmp_path / "full/thesis.tex", gpus=1).make)
    assert "holds no pool" in refusal(Pool(tmp_path / "none", gpus=1).holders)
    mounts = tmp_path / "mounts"
    device = os.stat(tmp_path).st_dev
    mounts.write_text(f"1 0 {os.major(device)}:{os.minor(device)} / /home rw shared:1 - nfs4 server:/home rw\n")
    monkeypatch.setattr(machine, "MOUNTS", str(mounts))
    assert "network file system (nfs4)" in refusal(Pool(leases.folder).lease().take)


def test_counting(tmp_path, monkeypatch):
    monkeypatch.delenv("BEYOND_ONE_GPU_GPUS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "lists no GPU" in refusal(count_gpus)
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: 1)\n  MIG 1g (UUID: 2)\nGPU 1: A (UUID: 3)'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert count_gpus() == 2
    monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", "3")
    assert count_gpus() == 3
    for said in ("0", "-1", "four", "²", "1000"):
        monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", said)
        assert "1 to 64" in refusal(count_gpus)


# ------------------------------------------------------------------------------------------------------------ the command
COMMAND = "import sys; from classroom.workshop.gpus import main; sys.exit(main(sys.argv[1:]))"


def test_command(tmp_path, monkeypatch, capsys):
    folder = str(tmp_path / "leases")
    assert gpus.main(["init", folder, "--gpus", "2"]) == 0
    assert f"export BEYOND_ONE_GPU_LEASES={folder}\n" in capsys.readouterr().out
    monkeypatch.setenv("BEYOND_ONE_GPU_LEASES", folder)
    tell = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], 'BEYOND_ONE_GPU_LEASES' in os.environ, flush=True); os.read(0, 1)"
    held = python(
        COMMAND,
        "run",
        "-n",
        2,
        "--name",
        "Ada",
        "--",
        sys.executable,
        "-S",
        "-c",
        tell,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout.readline() == "0,1 False\n"
    with ExitStack() as stack:
        waiter = stack.enter_context(
            python(
                COMMAND,
                "run",
                "--name",
                "Ben",
                "--",
                "sh",
                "-c",
                "echo mine; exit 7",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        assert waiter.stderr.readline().startswith("waiting for 1 of 2 GPUs: Ada has GPUs 0, 1 for ")
        assert gpus.main([]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].split() == ["GPU", "holder", "for", "process"]
        assert shown[1].split()[:2] == ["0", "Ada"] and shown[1].split()[-1] == str(held.pid)
        assert shown[3:] == ["In the queue, whose turn is next first:", shown[4]] and "Ben wants 1, for" in shown[4]
        assert gpus.main(["run", "--wait", "0", "--", "sh"]) == 1
        assert "did not come free within 0 s" in capsys.readouterr().err
        held.kill()
        assert waiter.communicate(timeout=PATIENCE)[0] == "mine\n" and waiter.returncode == 7
    held.communicate()
    assert gpus.main(["--folder", folder]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["0    free", "1    free", "Nobody waits."]


def test_command_with_bad_input(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BEYOND_ONE_GPU_LEASES", raising=False)
    folder = str(tmp_path / "leases")
    gpus.main(["init", folder, "--gpus", "1"])
    cases = {
        (): "Which folder?",
        ("--folder", str(tmp_path / "none")): "holds no pool",
        ("init", folder, "--gpus", "2"): "was made for 1 GPUs",
        ("init", folder + "2", "--gpus", "0"): "1 to 64",
        ("run", "--folder", folder): "Which command?",
        ("run", "--folder", folder, "--", "no-such-command"): "no such command",
        ("run", "--folder", folder, "-n", "2", "--", "sh"): "ask for 1 or fewer",
        ("run", "--folder", folder, "--wait", "-1", "--", "sh"): "give the seconds",
    }
    for arguments, sentence in cases.items():
        assert gpus.main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1
