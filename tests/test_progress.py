"""One private file, no lost update, nothing that stops a notebook; and where the learner stands."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.notebook import contents, progress, where_you_stand
from course_lib.notebook.progress import ExerciseRecord, GuessRecord, Progress, load, record_exercise, record_guess
from course_tools.__main__ import main

LABS = contents.labs()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "home"))
    progress._store.cache_clear()
    return tmp_path / "home"


def another_process(*lines: str) -> subprocess.Popen:
    code = "\n".join(["from course_lib.notebook import progress", *lines])
    root = Path(__file__).parent.parent
    return subprocess.Popen([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": "."})


def modes(home: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}


def test_a_pass_stays_a_pass_and_tries_count_up_to_it(home):
    for passed, message in [(False, "wrong by 2"), (True, "2 ranks" * 900), (False, "broken again")]:
        record_exercise("04_ddp", "my_ddp", passed=passed, seconds=1.23456, message=message)
    record = load().labs["04_ddp"]["my_ddp"]
    assert (record.status, record.tries, record.seconds, len(record.message)) == ("passed", 2, 1.235, 500)
    assert record.first_passed >= record.first_tried
    assert json.loads((home / "progress.json").read_text())["version"] == progress.VERSION


def test_it_lies_in_the_users_own_folder_and_only_the_learner_can_read_it(home, monkeypatch):
    load()  # makes nothing
    assert not home.exists()
    before = os.umask(0)
    try:
        record_exercise("04_ddp", "my_ddp", passed=True, seconds=1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700 and modes(home) == {0o600}
    monkeypatch.delenv("BEYOND_ONE_GPU_HOME")
    assert progress.progress_path().is_absolute()
    assert progress.progress_path().parts[-2:] == ("beyond-one-gpu", "progress.json")


def test_two_processes_at_once_lose_no_update():
    count = "for i in range(40): progress.record_exercise('lab', '{}' + str(i % 4), passed=False, seconds=0)"
    running = [another_process(count.format(name)) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    records = load().labs["lab"]
    assert {name: record.tries for name, record in records.items()} == {f"{n}{i}": 10 for n in "ab" for i in range(4)}


def test_a_damaged_file_is_set_aside_with_one_line(tmp_path, monkeypatch, capsys):
    line = b'{"version": 2, "labs": {}, "guesses": {"l": {"x": {"unit": "s", %s}}}}'
    for number, damage in enumerate(
        (
            b"",
            b"\xff\xfe\x00",
            b'{"version": 0, "labs": {}, "guesses": {}}',
            b'{"version": 1, "labs": [], "ledger": {}}',
            b'{"version": 2, "labs": {"l": {"x": {"status": "passed", "tries": 2, "first_tried": 1}}}}',
            line % b'"guess": 1e999',
            line % b'"guess": NaN',
            line % b'"guess": 1, "author": 2',
            b"[" * 100_000,
            b" " * (progress.MAX_BYTES + 1),
        )
    ):
        home = tmp_path / str(number)
        home.mkdir()
        monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(home))
        (home / "progress.json").write_bytes(damage)
        if number % 2:  # the file is read first, or written first
            assert load() == Progress(), damage[:80]
        record_exercise("lab", "first", passed=True, seconds=0)
        assert list(load().labs["lab"]) == ["first"], damage[:80]
        [aside] = home.glob("progress.damaged-*.json")
        error = capsys.readouterr().err
        assert aside.read_bytes() == damage and error.count("\n") == 1 and str(aside) in error, damage[:80]


def test_a_newer_courses_file_is_left_alone(home, capsys):
    home.mkdir()
    newer = '{"version": 99, "something": "else"}'
    (home / "progress.json").write_text(newer)
    record_exercise("lab", "first", passed=True, seconds=0)
    assert list(load().labs["lab"]) == ["first"] and "newer version" in capsys.readouterr().err
    assert (home / "progress.json").read_text() == newer and not list(home.glob("*damaged*"))


def test_what_cannot_be_written_now_is_read_at_once_and_written_later(home, monkeypatch, capsys):
    """A full disk, a file that would grow too large, a lock that another process holds."""
    record_exercise("lab", "first", passed=True, seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        record_exercise("lab", "disk", passed=True, seconds=0)
    assert "No space left" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(progress, "MAX_BYTES", 500)
        record_exercise("lab", "size", passed=True, seconds=0)
    with monkeypatch.context() as patch, progress.FileLock(home / "progress.lock"):
        patch.setattr(progress, "LOCK_SECONDS", 0.2)
        record_exercise("lab", "lock", passed=True, seconds=0)
    assert list(progress.read(home / "progress.json").labs["lab"]) == ["first"]
    assert list(load().labs["lab"]) == ["first", "disk", "size", "lock"]
    record_exercise("lab", "last", passed=True, seconds=0)
    kept = progress.read(home / "progress.json").labs["lab"]
    assert {name: record.tries for name, record in kept.items()} == dict.fromkeys(
        ("first", "disk", "size", "lock", "last"), 1
    )
    assert capsys.readouterr().err == ""  # one warning is enough


def test_a_file_of_the_first_format_keeps_its_exercises_and_loses_what_no_reader_guessed(home):
    home.mkdir()
    exercise = {"status": "passed", "tries": 2, "first_tried": "2026-01-01T00:00:00+00:00"}
    old = {
        "version": 1,
        "labs": {"lab": {"first": exercise}},
        "ledger": {"l": {"x": {"name": "x", "unit": "s", "predicted": 1}}},
    }
    (home / "progress.json").write_text(json.dumps(old))
    record_guess("l", "y", GuessRecord("s", 3.0))
    record_guess("l", "z", GuessRecord("s", 3.0))
    record_guess("l", "z", None)
    now = progress.read(home / "progress.json")
    assert now.labs["lab"]["first"].tries == 2 and list(now.guesses["l"]) == ["y"] and now.guesses["l"]["y"].when


# --------------------------------------------------------------------------------------------- where the learner stands
def test_exercises_of_the_labs_count_and_the_first_open_one_is_next(capsys):
    (first, exercises), (second, _), *_ = LABS.items()
    names = [exercise.name for exercise in exercises]

    def passed(names) -> dict[str, ExerciseRecord]:
        return {name: ExerciseRecord("passed", 1, "2026-01-01T00:00:00+00:00") for name in names}

    not_yet = {names[1]: ExerciseRecord("not yet", 3, "2026-01-01T00:00:00+00:00")}
    guesses = {  # a guess counts once it is measured, and a skipped one never
        question: GuessRecord("GiB", guess, measured)
        for question, guess, measured in [
            ("a", 2.0, 2.2),
            ("b", 4.0, 1.0),
            ("not yet", 1.0, None),
            ("skipped", None, 1.0),
        ]
    }
    all_labs = {lab: passed(each.name for each in exercises) for lab, exercises in LABS.items()}
    for labs, count, expected in (
        ({}, 0, f"lessons/{first}.ipynb"),
        ({first: passed([names[0], names[2], "no such exercise"]) | not_yet}, 2, exercises[1].title),
        ({first: passed(names)}, len(names), f"lessons/{second}.ipynb"),
        (all_labs, len(names), "Every exercise"),
    ):
        done = Progress(labs=labs, guesses={first: guesses} if labs else {})
        standing = where_you_stand.standings(done)[0]
        assert (standing.passed, len(standing.lesson.exercises)) == (count, len(names)), expected
        step = where_you_stand.next_step(done)
        assert expected in str(step)
        page = where_you_stand.where_you_stand(done)._repr_html_()
        links = re.findall(r"href='([^']+)'", page)
        assert links[: -3 * len(LABS)] == ([f"../{step.path}"] if step.path else [])
        assert all((where_you_stand.contents.ROOT / "lessons" / link).is_file() for link in links)
        assert f"{count} of {len(names)} exercises passed" in page
    assert (standing.lesson.name, standing.guesses) == (first, "2, half of them within a factor of 4")
    record_exercise(first, names[0], passed=True, seconds=0.1)
    assert main(["progress"]) == 0
    printed = capsys.readouterr().out
    assert f"1 of {len(names)}" in printed and exercises[1].title in printed


def test_the_last_guesses_stand_beside_the_first_ones():
    def went(*factors: float | None) -> str:
        records = {
            str(i): GuessRecord("s", factor, None if factor is None else 1.0, f"2026-01-{i + 1:02}")
            for i, factor in enumerate(factors)
        }
        return where_you_stand.how_guesses_went(Progress(guesses={"l": dict(reversed(records.items()))}))

    assert "No guess" in went(None)
    assert "1, within a factor of 3" in went(3.0) and "2, half of them within a factor of 3" in went(1.0, 3.0)
    better = went(*[4.0] * 12, None, *[1.25] * 10)  # in the order of time, whatever the file's
    assert "last 10" in better and "1.3;" in better and "first 10" in better and "of 4." in better
    assert GuessRecord("s", 1e308, 1e-308).factor == GuessRecord("s", 5e-324, 1e308).factor == 1e9  # anybody's file
    assert GuessRecord("s", -1.0, 2.0).factor is None and GuessRecord("s", 0.0, 0.0).factor == 1.0
