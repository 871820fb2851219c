"""One private file, no lost update, nothing that stops a notebook."""

import json
import math
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from course_lib.notebook import progress
from course_lib.notebook.progress import LedgerRecord, Progress

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "home"))
    progress._store.cache_clear()
    return tmp_path / "home"


def another_process(*lines: str) -> subprocess.Popen:
    code = "\n".join(["from course_lib.notebook import progress", *lines])
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": "."})


def test_the_default_folder_is_the_users_own(monkeypatch):
    monkeypatch.delenv("BEYOND_ONE_GPU_HOME")
    path = progress.progress_path()
    assert path.is_absolute() and path.parts[-2:] == ("beyond-one-gpu", "progress.json")


def test_import_needs_no_torch():
    code = "import sys, course_lib.notebook.progress, course_lib.notebook.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_a_pass_stays_a_pass_and_tries_count_up_to_it(home):
    for passed, message in [(False, "wrong by 2"), (True, "2 ranks"), (False, "broken again")]:
        progress.record_exercise("04_ddp", "my_ddp", passed=passed, seconds=1.23456, message=message)
    record = progress.load().labs["04_ddp"]["my_ddp"]
    assert (record.status, record.tries, record.message, record.seconds) == ("passed", 2, "2 ranks", 1.235)
    assert record.first_passed >= record.first_tried
    assert json.loads((home / "progress.json").read_text())["version"] == progress.VERSION


def test_only_the_learner_can_read_it(home):
    progress.load()  # makes nothing
    assert not home.exists()
    old = os.umask(0)
    try:
        progress.record_exercise("04_ddp", "my_ddp", passed=True, seconds=1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}


def test_two_processes_at_once_lose_no_update():
    count = "for i in range(40): progress.record_exercise('lab', '{}' + str(i % 4), passed=False, seconds=0)"
    running = [another_process(count.format(name)) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    records = progress.load().labs["lab"]
    assert {name: record.tries for name, record in records.items()} == {f"{n}{i}": 10 for n in "ab" for i in range(4)}


def test_a_write_that_dies_half_way_leaves_the_old_file(home, monkeypatch, capsys):
    progress.record_exercise("lab", "one", passed=True, seconds=0)
    before = (home / "progress.json").read_bytes()
    dies = "os.fsync = lambda fd: os._exit(9)"
    process = another_process("import os", dies, "progress.record_exercise('lab', 'two', passed=True, seconds=0)")
    assert process.wait(60) == 9
    assert (home / "progress.json").read_bytes() == before
    progress.record_exercise("lab", "three", passed=True, seconds=0)
    assert list(progress.load().labs["lab"]) == ["one", "three"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"version": 1, "labs"',
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"version": 0, "labs": {}, "ledger": {}}',
        b'{"version": 1, "labs": {"l": {"x": {"status": 3}}}, "ledger": {}}',
        b'{"version": 1, "labs": {"l": {"x": {"status": "passed", "tries": "2", "first_tried": ""}}}, "ledger": {}}',
        b'{"version": 1, "labs": [], "ledger": {}}',
        b'{"version": 1, "labs": {}, "ledger": {"l": {"x": {"name": "x", "unit": "s", "predicted": 1e999}}}}',
        b'{"version": 1, "labs": {}, "ledger": {"l": {"x": {"name": "x", "unit": "s", "predicted": NaN}}}}',
        b'{"version": 1, "labs": {}, "ledger": {"l": {"x": {"name": "x", "unit": "s", "parts": {"p": "q"}}}}}',
        b"[" * 100_000,
        b" " * (progress.MAX_BYTES + 1),
    ],
    ids=lambda damage: repr(damage[:24]),
)
@pytest.mark.parametrize("first", ["load", "record"])
def test_a_damaged_file_is_set_aside_with_one_line(home, capsys, damage, first):
    home.mkdir()
    (home / "progress.json").write_bytes(damage)
    if first == "load":
        assert progress.load() == Progress()
    progress.record_exercise("lab", "one", passed=True, seconds=0)
    assert list(progress.load().labs["lab"]) == ["one"]
    [aside] = home.glob("progress.damaged-*.json")
    assert aside.read_bytes() == damage
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "damaged" in error and str(aside) in error


def test_a_newer_courses_file_is_left_alone(home, capsys):
    home.mkdir()
    newer = '{"version": 99, "something": "else"}'
    (home / "progress.json").write_text(newer)
    progress.record_exercise("lab", "one", passed=True, seconds=0)
    assert list(progress.load().labs["lab"]) == ["one"]
    assert (home / "progress.json").read_text() == newer and not list(home.glob("*damaged*"))
    assert "newer version of the course" in capsys.readouterr().err


def test_a_home_that_cannot_be_made_warns_once_and_goes_on_in_memory(tmp_path, monkeypatch, capsys):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "a file" / "home"))
    for name in ("one", "two", "two"):
        progress.record_exercise("lab", name, passed=False, seconds=0)
    assert {name: record.tries for name, record in progress.load().labs["lab"].items()} == {"one": 1, "two": 2}
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "BEYOND_ONE_GPU_HOME" in error


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX permissions")
def test_a_read_only_home_is_still_read(monkeypatch, capsys):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the session's own folder is closed to another user
        monkeypatch.setenv("BEYOND_ONE_GPU_HOME", folder)
        progress.record_exercise("lab", "before", passed=True, seconds=0)
        os.chmod(Path(folder) / "progress.json", 0o644)
        os.remove(Path(folder) / "progress.lock")
        os.chmod(folder, 0o555)
        root = os.geteuid() == 0
        try:
            if root:  # root may write anywhere
                os.seteuid(65534)
            progress.record_exercise("lab", "after", passed=True, seconds=0)
            assert list(progress.load().labs["lab"]) == ["before", "after"]
        finally:
            if root:
                os.seteuid(0)
            os.chmod(folder, 0o700)
        assert capsys.readouterr().err.count("\n") == 1
        # What could not be written is written as soon as it can be, once.
        progress.record_exercise("lab", "later", passed=False, seconds=0)
        kept = progress.read(Path(folder) / "progress.json").labs["lab"]
        assert {name: record.tries for name, record in kept.items()} == {"before": 1, "after": 1, "later": 1}


def test_a_full_disk_keeps_the_file_and_the_change(home, monkeypatch, capsys):
    progress.record_exercise("lab", "one", passed=True, seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        progress.record_exercise("lab", "two", passed=True, seconds=0)
    assert "No space left" in capsys.readouterr().err
    assert list(progress.read(home / "progress.json").labs["lab"]) == ["one"]
    assert list(progress.load().labs["lab"]) == ["one", "two"]


def test_a_file_never_grows_above_what_is_read_back(home, monkeypatch, capsys):
    monkeypatch.setattr(progress, "MAX_BYTES", 2000)
    for i in range(30):
        progress.record_exercise("lab", f"exercise{i}", passed=True, seconds=0)
    assert (home / "progress.json").stat().st_size <= 2000 and not list(home.glob("*damaged*"))
    assert len(progress.load().labs["lab"]) == 30
    assert capsys.readouterr().err.count("\n") == 1


def test_a_held_lock_does_not_stop_the_notebook(home, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LOCK_SECONDS", 0.2)
    home.mkdir()
    with progress.FileLock(home / "progress.lock"):
        progress.record_exercise("lab", "one", passed=True, seconds=0)
    assert "progress.lock" in capsys.readouterr().err
    progress.record_exercise("lab", "two", passed=True, seconds=0)
    assert list(progress.read(home / "progress.json").labs["lab"]) == ["one", "two"]


def test_the_ledger_is_kept_by_lesson_and_name(home):
    progress.record_ledger("04", LedgerRecord("peak", "GiB", predicted=1.9))
    record = LedgerRecord("peak", "GiB", 1.9, 2.05, {"buffer": 0.1}, {"device": "a CPU", "ranks": 2})
    progress.record_ledger("04", record)
    record.measured = 7.0  # what the caller does to it later is not the ledger's business
    [kept] = progress.load().ledger["04"].values()
    assert (kept.measured, kept.parts, kept.stamp["ranks"]) == (2.05, {"buffer": 0.1}, 2) and kept.when


@pytest.mark.parametrize(
    "record",
    [
        LedgerRecord("x", "s", predicted=math.nan),
        LedgerRecord("x", "s", measured=math.inf),
        LedgerRecord("x", "s", stamp={"device": object()}),
        LedgerRecord("x" * 70_000, "s"),
    ],
    ids=["nan", "inf", "object", "long"],
)
def test_what_json_cannot_hold_is_refused(home, record):
    with pytest.raises(ValueError, match="ledger"):
        progress.record_ledger("04", record)
    assert not (home / "progress.json").exists()


def test_odd_names_travel(home):
    name = 'quote " \\ <b> é \udcff \n'
    progress.record_exercise("lab", name, passed=True, seconds=0, message="m" * 9000)
    record = progress.load().labs["lab"][name]
    assert len(record.message) == 500
