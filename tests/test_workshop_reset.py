"""A lab back to its start, with the work in it kept byte for byte whatever happens on the way."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from classroom.authoring import labs
from classroom.workshop import reset
from course_lib.notebook import progress

GENERATOR = reset.render
WORK = b'{"cells": "an evening of work"}'


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A copy of the course with three labs: worked in, at its start, missing."""
    monkeypatch.setattr(reset, "render", lambda path: f"pristine {Path(path).stem}\n")
    (tmp_path / "labs").mkdir()
    (tmp_path / "solutions").mkdir()
    for name in ("03_c", "04_d", "05_e"):
        (tmp_path / "solutions" / f"{name}.ipynb").write_text("a solution")
    (tmp_path / "labs" / "03_c.ipynb").write_bytes(WORK)
    (tmp_path / "labs" / "04_d.ipynb").write_text("pristine 04_d\n")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_work_is_kept_and_the_lab_is_what_the_generator_makes(course, capsys):
    lab = course / "labs" / "03_c.ipynb"
    assert reset.main(["--lab", "3", "--root", str(course)]) == 0
    assert lab.read_bytes() == b"pristine 03_c\n" and GENERATOR is labs.render
    [kept] = (course / "labs" / "kept").glob("*/*")
    assert kept.name == lab.name and kept.read_bytes() == WORK and str(kept.parent) in capsys.readouterr().out
    lab.write_bytes(b"typed afterwards, into the same file")  # must not reach what is kept
    assert kept.read_bytes() == WORK


def test_only_what_was_worked_in_is_touched(course):
    untouched = (course / "labs" / "04_d.ipynb").stat()
    changed, kept = reset.reset_labs(["03_c", "04_d", "05_e"], course)
    assert changed == ["03_c", "05_e"] and files(kept) == {"03_c.ipynb": WORK}
    assert (course / "labs" / "04_d.ipynb").stat().st_ino == untouched.st_ino
    assert (course / "labs" / "05_e.ipynb").read_text() == "pristine 05_e\n"
    assert reset.reset_labs(["03_c", "04_d", "05_e"], course) == ([], None)
    (course / "labs" / "03_c.ipynb").write_bytes(b"second")
    _, again = reset.reset_labs(["03_c"], course)
    assert again != kept and files(kept) == {"03_c.ipynb": WORK} and files(again) == {"03_c.ipynb": b"second"}


def test_a_dry_run_writes_nothing(course, capsys):
    before = files(course)
    assert reset.main(["--dry-run", "--progress", "--root", str(course)]) == 0
    told = capsys.readouterr().out
    assert "labs/03_c.ipynb: would be back" in told and "labs/04_d.ipynb: at its start already" in told
    assert files(course) == before and not (course / "labs" / "kept").exists()


@pytest.mark.parametrize("call", range(6))
def test_nothing_is_lost_when_the_disk_is_full_at_any_moment(course, monkeypatch, capsys, call):
    """The n-th write or exchange fails, for every n."""
    (course / "labs" / "04_d.ipynb").write_bytes(WORK + b"4")
    calls = []

    def full(real):
        def failing(*args, **kwargs):
            calls.append(real)
            if len(calls) == call + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return failing

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full(getattr(os, name)))
    code = reset.main(["--lab", "03", "04", "--root", str(course)])
    monkeypatch.undo()
    assert len(calls) > call and code == 1 and "nothing is lost" in capsys.readouterr().err
    there = files(course / "labs")
    for name, work in (("03_c", WORK), ("04_d", WORK + b"4")):
        assert there[f"{name}.ipynb"] in (work, f"pristine {name}\n".encode())
        assert [data for path, data in there.items() if path.endswith(f"{name}.ipynb") and data == work]
    assert not [path for path in there if path.endswith(".part")]


def test_what_cannot_be_reset_is_refused_in_a_sentence(course, capsys):
    assert reset.main(["--lab", "9", "--root", str(course)]) == 2
    assert "there are 03_c, 04_d, 05_e" in capsys.readouterr().err
    (course / "labs" / "05_e.ipynb").symlink_to("/etc/passwd")
    assert reset.main(["--root", str(course)]) == 2
    assert "move it away yourself" in capsys.readouterr().err
    assert (course / "labs" / "03_c.ipynb").read_bytes() == WORK
    shutil.rmtree(course / "solutions")
    assert reset.main(["--root", str(course)]) == 2
    assert "a whole copy of the course" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "home"))
    progress._store.cache_clear()
    for lab in ("03_c", "04_d"):
        progress.record_exercise(lab, "one", passed=True, seconds=1)
    progress.record_ledger("03", progress.LedgerRecord("peak", "GiB", 1.0))
    return tmp_path / "home"


def test_progress_is_forgotten_only_when_asked_and_kept_aside(course, home, capsys):
    before = (home / "progress.json").read_bytes()
    assert reset.main(["--root", str(course)]) == 0
    assert (home / "progress.json").read_bytes() == before
    assert reset.main(["--lab", "3", "--progress", "--root", str(course)]) == 0
    left = progress.load()
    assert list(left.labs) == ["04_d"] and list(left.ledger) == ["03"]
    [aside] = home.glob("progress.kept-*.json")
    assert aside.read_bytes() == before and aside.stat().st_mode & 0o777 == 0o600
    assert str(aside) in capsys.readouterr().out
    assert reset.reset_progress(["03_c"]) is None
    assert list(progress.read(reset.reset_progress()).labs) == ["04_d"]
    assert progress.load() == progress.Progress()


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_progress_stays_where_it_cannot_be_written(home, monkeypatch, name):
    before = (home / "progress.json").read_bytes()
    monkeypatch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        reset.reset_progress()
    assert (home / "progress.json").read_bytes() == before
