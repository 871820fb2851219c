"""The class commands: pace of a lesson, what a class needs of one box, a lab back to its start without losing work."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from refusals import assert_refused

from classroom.authoring import labs, notes
from classroom.workshop import class_needs, pace, preflight, reset
from course_lib.notebook import contents, progress
from course_lib.notebook.contents import Section
from course_lib.units import GIB
from course_tools.doctor.findings import OK, PROBLEM, Finding

ROOT = Path(contents.ROOT)
GENERATOR = reset.render
WORK = b'{"cells": "an evening of work"}'


def test_minutes_are_shared_out_by_cost_and_sum_up():
    assert pace.share(10, [1, 1, 2]) == [3, 3, 4] and pace.share(3, [0, 0, 0]) == [1, 1, 1]
    for row in contents.map_rows():
        steps = pace.plan(contents.sections(contents.find(row.number, "lessons")), row.minutes)
        assert pace.taken(steps) == row.minutes


def test_sections_are_dropped_in_the_notes_order_with_what_stands_below_them():
    sections = [Section("t", 1, 200), Section("a", 2, 200), Section("below a", 3, 200), Section("b", 2, 200)]
    skips = [notes.Skip("a", "known"), notes.Skip("b", "later")]
    for limit, expected in [(40, "tabb"), (39, "t--b"), (20, "t--b"), (19, "t---"), (None, "tabb")]:
        kept = [step.skipped is None for step in pace.plan(sections, 40, skips, limit)]
        assert kept == [letter != "-" for letter in expected], limit


def test_pace_of_a_lesson_ends_in_time_and_tells_what_it_skips(capsys):
    assert pace.main(["5", "--minutes", "65", "--start", "9:30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    times = [line[:5] for line in lines if line[2:3] == ":"]
    assert times[0] == "09:30" and times == sorted(times)
    assert [line for line in lines if "skip " in line]
    [total] = [line for line in lines if " skipped" in line and " of the " in line]
    assert int(total.split()[0]) <= 65 and pace.clock(570 + int(total.split()[0])) in total
    assert pace.main(["5", "--minutes", "20"]) == 1, "too short even with all of it skipped"
    assert pace.main([]) == 0 and notes.main(["5"]) == 0
    for wrong in (["9"], ["4", "--start", "25:00"], ["4", "--minutes", "0"]):
        assert pace.main(wrong) == 2, wrong


def test_a_note_that_cannot_be_understood_is_refused(tmp_path):
    for name in ("lessons", "labs"):
        (tmp_path / name).symlink_to(ROOT / name)
    note = notes.note_path(5, tmp_path)
    note.parent.mkdir(parents=True)

    def read_with(text: str):
        note.write_text(text)
        return pace.lesson(5, None, None, tmp_path)

    assert_refused(
        [
            (lambda: read_with("# no front"), ValueError, note.name),
            (lambda: read_with("---\nskip_first: [a]\n---\n"), ValueError, "skip_first"),
            (lambda: read_with('---\nskip_first: [{section: "no such"}]\n---\n'), ValueError, "no such"),
            (lambda: read_with('---\nlab_core: ["not there"]\n---\n'), ValueError, "not there"),
            (lambda: pace.share(2, [1, 1, 1]), ValueError, "3"),
        ]
    )


def test_what_a_class_needs_of_one_box():
    rows = [
        (class_needs.cores(16, 2), PROBLEM, ""),
        (class_needs.cores(16, 32), OK, ""),
        (class_needs.memory(16, 31 * GIB), PROBLEM, "15 learners"),
        (class_needs.memory(16, 96 * GIB), OK, ""),
        (class_needs.disk(16, 20 * GIB, cuda=False), PROBLEM, ""),
        (class_needs.disk(16, 72 * GIB, cuda=False), OK, ""),
        (class_needs.shared_memory(16, GIB, 4), PROBLEM, "--shm-size=2g"),
        (class_needs.shared_memory(16, GIB, 0), OK, ""),
        (class_needs.processes(16, None, 1000, 2), PROBLEM, "--pids-limit 3264"),
        (class_needs.processes(16, None, None, 2), OK, ""),
        (class_needs.gpus(16, 0, ""), OK, ""),
        (class_needs.gpus(16, 4, "/no/such/folder"), PROBLEM, "/no/such/folder"),
    ]
    for finding, level, words in rows:
        assert finding.level == level and words in f"{finding.says} {finding.means} {finding.mend}", finding
        assert finding.mend or level != PROBLEM, finding


def test_the_preflight_knows_a_containers_limits_and_fails_with_a_problem(tmp_path, monkeypatch, capsys):
    whole = preflight.cores_here(tmp_path), preflight.memory_here(tmp_path)
    files = {"cpu.max": ("50000 100000", "max 100000"), "memory.max": (str(GIB), "max"), "pids.max": ("512", "max")}
    for moment, expected in enumerate([(0.5, GIB, 512), (*whole, None)]):
        for name, contents_of in files.items():
            (tmp_path / name).write_text(contents_of[moment] + "\n")
        here = preflight.cores_here(tmp_path), preflight.memory_here(tmp_path), preflight.tasks_here(tmp_path)
        assert here == expected
    monkeypatch.setattr(preflight, "examine", lambda: iter([Finding(OK, "Python", "3.11")]))
    monkeypatch.setattr(class_needs, "cores", lambda *_: Finding(PROBLEM, "class: cores", "few", "Slow.", "More."))
    assert preflight.main(["--learners", "3", "--json"]) == 1
    assert [finding["about"] for finding in json.loads(capsys.readouterr().out)][:2] == ["Python", "class: cores"]
    assert preflight.main(["--learners", "0"]) == 2


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A copy of the course with three labs: worked in, at its start, missing; and progress in two of them."""
    monkeypatch.setattr(reset, "render", lambda path: f"pristine {Path(path).stem}\n")
    (tmp_path / "labs").mkdir()
    (tmp_path / "solutions").mkdir()
    for name in ("03_c", "04_d", "05_e"):
        (tmp_path / "solutions" / f"{name}.ipynb").write_text("a solution")
    (tmp_path / "labs" / "03_c.ipynb").write_bytes(WORK)
    (tmp_path / "labs" / "04_d.ipynb").write_text("pristine 04_d\n")
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "home"))
    progress._store.cache_clear()
    for lab in ("03_c", "04_d"):
        progress.record_exercise(lab, "one", passed=True, seconds=1)
        progress.record_guess(lab, "how much?", progress.GuessRecord("s", 3.0))
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_reset_lab_is_the_generators_and_the_work_is_kept(course):
    lab, before = course / "labs" / "03_c.ipynb", files(course)
    assert reset.main(["--dry-run", "--progress", "--root", str(course)]) == 0
    assert files(course) == before and GENERATOR is labs.render
    changed, kept = reset.reset_labs(["03_c", "04_d", "05_e"], course)
    assert changed == ["03_c", "05_e"] and lab.read_bytes() == b"pristine 03_c\n"
    lab.write_bytes(b"typed afterwards, into the same file")  # must not reach what is kept
    assert files(kept) == {"03_c.ipynb": WORK}
    _, again = reset.reset_labs(["03_c"], course)
    assert again != kept and files(kept) == {"03_c.ipynb": WORK}
    (course / "labs" / "05_e.ipynb").unlink()
    (course / "labs" / "05_e.ipynb").symlink_to("/etc/passwd")
    assert reset.main(["--root", str(course)]) == reset.main(["--lab", "9", "--root", str(course)]) == 2


def test_progress_is_forgotten_only_when_asked_and_kept_aside(course):
    path = course / "home" / "progress.json"
    before = path.read_bytes()
    assert reset.main(["--lab", "3", "--root", str(course)]) == 0 and path.read_bytes() == before
    assert reset.main(["--lab", "3", "--progress", "--root", str(course)]) == 0
    assert list(progress.load().labs) == list(progress.load().guesses) == ["04_d"]
    [aside] = path.parent.glob("progress.kept-*.json")
    assert aside.read_bytes() == before


@pytest.mark.parametrize("failing", range(6))
def test_nothing_is_lost_when_the_disk_is_full_at_any_moment(course, monkeypatch, failing):
    """The n-th write or exchange fails, for every n."""
    (course / "labs" / "04_d.ipynb").write_bytes(WORK + b"4")
    calls = []

    def full(real):
        def call(*args, **kwargs):
            calls.append(real)
            if len(calls) == failing + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full(getattr(os, name)))
    code = reset.main(["--lab", "03", "04", "--root", str(course)])
    monkeypatch.undo()
    assert len(calls) > failing and code == 1
    left = files(course / "labs")
    for name, work in (("03_c", WORK), ("04_d", WORK + b"4")):
        assert left[f"{name}.ipynb"] in (work, f"pristine {name}\n".encode())
        assert [data for path, data in left.items() if path.endswith(f"{name}.ipynb") and data == work], name
    assert not [path for path in left if path.endswith(".part")]
