"""Leases of GPUs with other people's input, other users, impossible requests, and from the shell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
from processes import PATIENCE, python
from refusals import assert_refused

from classroom.workshop import gpus
from course_lib.launch.leases import Pool, count_gpus, files, machine
from course_lib.launch.leases.state import Holder

DAMAGED = [
    b"",
    b"[]",
    b'{"name": 3, "pid": 1, "since": 1.0}',
    b'{"name": "x", "pid": -1, "since": 1.0}',
    b'{"name": "x", "pid": 1, "since": NaN}',
    b'{"name": "x", "pid": 1, "since": 1.0, "number": 1, "wants": 1}' + b" " * 1000,
    b"[" * 1000,
    b"\xff\xfe",
]


def test_a_damaged_record_is_somebodys_and_stops_no_one(tmp_path):
    for number, record in enumerate(DAMAGED):
        folder = tmp_path / str(number)
        leases = Pool(folder, gpus=1)
        with leases.lease(name="Ada"):
            (folder / "gpu0").write_bytes(record)
            assert leases.holders() == [Holder(0, "somebody", None, None)], record
            assert gpus.main(["--folder", leases.folder]) == 0
            seat = files.lock(leases.folder, "seat00")
            files.write_record(seat, {"number": 1, "name": "Eve", "pid": 1, "wants": 1, "since": 1.0})
            assert [t.name for t in leases.waiting()] == ["Eve"]
            (folder / "seat00").write_bytes(record)
            assert leases.waiting() == [], record
        with leases.lease(name="Ben", wait=PATIENCE):  # the seat of nobody known is still locked
            assert [h.name for h in leases.holders()] == ["Ben"], record
        files.unlock(seat)


def test_names_are_plain(tmp_path):
    leases = Pool(tmp_path / "leases", gpus=1)
    for name, shown in {"\x1b[31mRed\nBen\u202e": "[31mRed Ben", "\t": "somebody", "😀" * 99: "😀" * 40}.items():
        with leases.lease(name=name):
            assert [h.name for h in leases.holders()] == [shown]


def test_a_link_a_pipe_and_a_missing_file_are_refused(tmp_path):
    leases, victim, gpu = Pool(tmp_path / "leases", gpus=2), tmp_path / "victim", tmp_path / "leases/gpu0"
    leases.make()
    victim.write_text("untouched")
    for replace in (lambda: gpu.symlink_to(victim), lambda: os.mkfifo(gpu), lambda: None):
        gpu.unlink(missing_ok=True)
        replace()
        assert_refused([(Pool(leases.folder).lease().take, ValueError, "gpu0")])
    assert victim.read_text() == "untouched"


STRANGER = """
import os, sys
from course_lib.launch.leases import Pool
os.setgid(65534); os.setuid(65534)
with Pool(sys.argv[1]).lease(1, name="Stranger", wait=60) as lease:
    print(lease.gpus, Pool(sys.argv[1]).holders()[0].name)
for attempt in (lambda: os.unlink(sys.argv[1] + "/gpu0"), lambda: open(sys.argv[1] + "/new", "w")):
    try:
        attempt()
    except PermissionError:
        print("refused")
"""


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_the_folder_serves_other_users_of_the_box_who_cannot_change_it(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="b1g-leases-") as outside:  # those of tests are private
        os.chmod(outside, 0o755)
        before = os.umask(0o077)
        try:
            leases = Pool(f"{outside}/leases", gpus=2)
            leases.make()
        finally:
            os.umask(before)
        with leases.lease(1, name="Root"):
            stranger = python(STRANGER, leases.folder, stdout=subprocess.PIPE)
            assert stranger.communicate(timeout=PATIENCE)[0] == "(1,) Root\nrefused\nrefused\n"


def test_impossible_requests_are_refused(tmp_path, monkeypatch):
    leases = Pool(tmp_path / "leases", gpus=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    with leases.lease(1):
        assert_refused([(leases.lease(1).take, ValueError, "holds a lease")])  # it would wait for itself
    assert_refused(
        [
            (leases.lease(3).take, ValueError, "3 GPUs"),
            (leases.lease(0).take, ValueError, "0 GPUs"),
            (leases.lease(1, wait=float("nan")).take, ValueError, "wait=nan"),
            (lambda: Pool(tmp_path, gpus=65), ValueError, "gpus=65"),
            (Pool(leases.folder, gpus=4).lease().take, ValueError, "for 2 GPUs"),
            (Pool(tmp_path / "full", gpus=1).make, ValueError, "thesis.tex"),
            (Pool(tmp_path / "none", gpus=1).holders, ValueError, "none"),
        ]
    )
    device, mounts = os.stat(tmp_path).st_dev, tmp_path / "mounts"
    mounts.write_text(f"1 0 {os.major(device)}:{os.minor(device)} / /home rw shared:1 - nfs4 server:/home rw\n")
    monkeypatch.setattr(machine, "MOUNTS", str(mounts))
    monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", "four")
    assert_refused([(Pool(leases.folder).lease().take, ValueError, "nfs4"), (count_gpus, ValueError, "four")])


# ------------------------------------------------------------------------------------------------------------ the command
COMMAND = "import sys; from classroom.workshop.gpus import main; sys.exit(main(sys.argv[1:]))"
HOLDS = """
import os
print(os.environ["CUDA_VISIBLE_DEVICES"], "BEYOND_ONE_GPU_LEASES" in os.environ, flush=True)
os.read(0, 1)
"""


def test_the_command_leases_shows_and_waits(tmp_path, monkeypatch, capsys):
    folder, pipe = str(tmp_path / "leases"), subprocess.PIPE
    assert gpus.main(["init", folder, "--gpus", "2"]) == 0
    assert f"export BEYOND_ONE_GPU_LEASES={folder}\n" in capsys.readouterr().out
    monkeypatch.setenv("BEYOND_ONE_GPU_LEASES", folder)
    ada = ["run", "-n", 2, "--name", "Ada", "--", sys.executable, "-S", "-c", HOLDS]
    with python(COMMAND, *ada, stdin=pipe, stdout=pipe) as held:
        assert held.stdout.readline() == "0,1 False\n"
        ben = ["run", "--name", "Ben", "--", "sh", "-c", "echo started; exit 7"]
        with python(COMMAND, *ben, stdout=pipe, stderr=pipe) as waiter:
            assert "Ada" in waiter.stderr.readline()
            assert gpus.main([]) == 0
            table = capsys.readouterr().out
            assert table.count("Ada") == 2 and str(held.pid) in table and "Ben wants 1" in table
            assert gpus.main(["run", "--wait", "0", "--", "sh"]) == 1
            assert "Ada" in capsys.readouterr().err
            held.kill()
            assert waiter.communicate(timeout=PATIENCE)[0] == "started\n" and waiter.returncode == 7
    assert gpus.main([]) == 0
    assert capsys.readouterr().out.count("free") == 2


def test_the_command_refuses_bad_input_with_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BEYOND_ONE_GPU_LEASES", raising=False)
    folder = str(tmp_path / "leases")
    gpus.main(["init", folder, "--gpus", "1"])
    cases = {
        (): "--folder",
        ("--folder", str(tmp_path / "none")): "none",
        ("--folder", folder, "run"): "Which command",
        ("--folder", folder, "run", "--", "no-such-command"): "no-such-command",
        ("--folder", folder, "run", "-n", "2", "--", "sh"): "2 GPUs",
    }
    for arguments, fragment in cases.items():
        assert gpus.main(list(arguments)) == 2, arguments
        error = capsys.readouterr().err
        assert fragment in error and error.count("\n") == 1, arguments
