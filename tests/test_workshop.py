"""The class commands: pace of a lesson and a track, what a class needs of one box, a lab reset without losing work, hand-in."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from refusals import assert_refused

from classroom.authoring import labs, plans
from classroom.workshop import hand_in, pace, preflight, reset
from course_lib.notebook import contents, progress
from course_lib.notebook.contents import Section
from course_lib.units import GIB
from course_tools.doctor.findings import OK, PROBLEM, Finding

ROOT = Path(contents.ROOT)
GENERATOR = reset.render
WORK = b'{"cells": "an evening of work"}'
ROWS = {row.number: row for row in contents.map_rows()}
TRACKS = plans.tracks()


def test_minutes_are_shared_out_by_cost_and_sum_up():
    assert plans.share(10, [1, 1, 2]) == [3, 3, 4]
    for row in ROWS.values():
        assert plans.taken(plans.lesson(row)) == row.minutes


def test_sections_are_dropped_in_the_notes_order_with_what_stands_below_them():
    sections = [Section("t", 1, 200), Section("a", 2, 200), Section("below a", 3, 200), Section("b", 2, 200)]
    skips = [plans.Skip("a", "known"), plans.Skip("b", "later")]
    for limit, expected in [(40, "tabb"), (39, "t--b"), (20, "t--b"), (19, "t---"), (None, "tabb")]:
        kept = [not step.skipped for step in plans.shorten(sections, 40, skips, limit)]
        assert kept == [letter != "-" for letter in expected], limit


def clock_times(printed: str) -> list[int]:
    """The minutes since midnight at which its lines begin."""
    return [int(h) * 60 + int(m) for h, m in re.findall(r"^(\d\d):(\d\d) ", printed, re.MULTILINE)]


def test_pace_of_a_lesson_ends_in_time_and_tells_what_it_skips(capsys):
    assert pace.main(["5", "--minutes", "65", "--start", "9:30"]) == 0
    lesson, lab = capsys.readouterr().out.split("The lab, ")
    times = clock_times(lesson)
    assert times[0] == 570 and times == sorted(times) and times[-1] <= 570 + 65
    assert "  skip  " in lesson and len(clock_times(lab)) == len(ROWS[5].exercises)
    assert pace.main(["5", "--minutes", "20"]) == 1, "too short even with all of it skipped"
    for wrong in (["9"], ["0"], ["4", "--start", "25:00"], [], ["--track", "no-such"], ["4", "--track", "one-day"]):
        assert pace.main(wrong) == 2, wrong


def test_a_tracks_clock_times_are_those_of_its_parts(capsys, monkeypatch):
    for name, track in TRACKS.items():
        assert pace.main(["--track", name, "--start", "13:00"]) == 0, f"{name} does not fit its own end"
        sessions = re.split(r"^(?:Day|Week) \d$", capsys.readouterr().out, flags=re.MULTILINE)[1:]
        for parts, printed in zip(track.sessions, sessions, strict=True):
            ends = [13 * 60 + sum(part.minutes for part in parts[:n]) for n in range(len(parts) + 1)]
            assert clock_times(printed) == ends
            assert all(part.title in printed and all(title in printed for title in part.dropped) for part in parts)
    monkeypatch.setattr(plans, "tracks", lambda: {"cohort": plans.Track("cohort", "", "", "week", 1, track.sessions)})
    assert pace.main(["--track", "cohort"]) == 1


def test_a_learners_path_takes_as_long_as_its_parts():
    titles = [("A title", 1), ("1. a", 2), ("below a", 3), ("2. b", 2), ("Sources", 2)]
    steps = [
        plans.Step(Section(title, level), minutes)
        for (title, level), minutes in zip(titles, (1, 2, 4, 8, 16), strict=True)
    ]
    assert plans.by_section(steps) == {1: 2 + 4, 2: 8}
    paths = {title: (takes, minutes) for title, takes, _, minutes in plans.paths()}
    takes, minutes = paths["I have an hour"]
    assert 45 <= minutes <= 65 and "sections 1, 2, 4, 5, 6" in takes and "section 10" in takes
    takes, minutes = paths["One GPU"]
    whole = sum(ROWS[n].minutes + plans.core_minutes(ROWS[n]) for n in (1, 2))
    assert whole < minutes < whole + ROWS[7].minutes and takes.count("](../labs/") == 2


def test_short_lessons_reach_their_minutes_by_what_their_notes_drop():
    for track in tomllib.loads((ROOT / "lessons" / "course.toml").read_text(encoding="utf-8"))["tracks"]:
        steps = [step for session in track["sessions"] for step in session]
        parts = [part for session in TRACKS[track["name"]].sessions for part in session]
        for step, part in zip(steps, parts, strict=True):
            assert part.minutes == step.get("minutes", part.minutes), (track["name"], step)
            if part.kind == "lesson":
                assert {skip.section for skip in plans.note(step["lesson"]).skip_first} >= set(part.dropped)
    [core] = [part for part in TRACKS["cohort"].sessions[4] if part.kind == "lab"]
    named = plans.note(5).lab_core
    assert core.minutes == sum(one.minutes for one in ROWS[5].exercises if one.title in named) > 0
    assert [part.title[0] for session in TRACKS["cohort"].sessions for part in session[:1]] == list("12345678")


def test_a_note_or_a_track_that_cannot_be_understood_is_refused(tmp_path):
    for name in ("labs", "solutions"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "lessons", tmp_path / "lessons", ignore=shutil.ignore_patterns("deeper", "runs", "pictures"))
    note, course = tmp_path / "site/instructors/05_deepspeed_zero.md", tmp_path / "lessons/course.toml"
    note.parent.mkdir(parents=True)
    lessons = course.read_text(encoding="utf-8").split("[[tracks]]")[0]

    def read(skip: str = "[]", core: str = "[]", step: str = "{ lesson = 5 }"):
        note.write_text(f"---\nskip_first: {skip}\nlab_core: {core}\n---\n")
        track = f'[[tracks]]\nname = "t"\ntitle = ""\nwho = ""\nsession = ""\nminutes = 1\nsessions = [[{step}]]\n'
        course.write_text(lessons + track)
        return plans.tracks(tmp_path)

    assert read()["t"].sessions[0][0].minutes == ROWS[5].minutes

    def take(part: str):
        path = f'[[paths]]\ntitle = ""\nwords = ""\ntake = [{part}]\n'
        course.write_text(lessons.split("[[paths]]")[0] + path)
        return plans.paths(tmp_path)

    assert take("{ lesson = 5 }")[0][3] == ROWS[5].minutes
    assert_refused(
        [
            (lambda: read("[a]"), ValueError, note.name),
            (lambda: read('[{section: "no such", because: "x"}]'), ValueError, "no such"),
            (lambda: read(core='["not there"]', step="{ lab = 5 }"), ValueError, "not there"),
            (lambda: read(step="{ lesson = 9 }"), ValueError, "9"),
            (lambda: take("{ lesson = 9 }"), ValueError, "9"),
            (lambda: take("{ lesson = 5, sections = [99] }"), ValueError, "99"),
            (lambda: read(step='{ lab = 5, exercise = "nobody" }'), ValueError, "nobody"),
            (lambda: plans.share(2, [1, 1, 1]), ValueError, "3"),
        ]
    )


def test_what_a_class_needs_of_one_box(tmp_path):
    rows = [
        (preflight.cores(16, 2), PROBLEM, ""),
        (preflight.cores(16, 32), OK, ""),
        (preflight.memory(16, 31 * GIB), PROBLEM, "15 learners"),
        (preflight.memory(16, 96 * GIB), OK, ""),
        (preflight.disk(16, 20 * GIB, cuda=False), PROBLEM, ""),
        (preflight.disk(16, 72 * GIB, cuda=False), OK, ""),
        (preflight.gpus(16, 0, ""), OK, ""),
        (preflight.gpus(16, 4, str(tmp_path)), OK, "4 for 16"),
        (preflight.gpus(16, 4, "/no/such/folder"), PROBLEM, "/no/such/folder"),
    ]
    for finding, level, words in rows:
        assert finding.level == level and words in f"{finding.says} {finding.means} {finding.mend}", finding
        assert finding.mend or level != PROBLEM, finding


def test_the_preflight_knows_a_containers_limits_and_fails_with_a_problem(tmp_path, monkeypatch, capsys):
    whole = preflight.cores_here(tmp_path), preflight.memory_here(tmp_path)
    files = {"cpu.max": ("50000 100000", "max 100000"), "memory.max": (str(GIB), "max")}
    for moment, expected in enumerate([(0.5, GIB), whole]):
        for name, contents_of in files.items():
            (tmp_path / name).write_text(contents_of[moment] + "\n")
        assert (preflight.cores_here(tmp_path), preflight.memory_here(tmp_path)) == expected
    monkeypatch.setattr(preflight, "examine", lambda: iter([Finding(OK, "Python", "3.11")]))
    monkeypatch.setattr(preflight, "cores", lambda *_: Finding(PROBLEM, "class: cores", "few", "Slow.", "More."))
    assert preflight.main(["--learners", "3"]) == 1
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "Python" in first and "class: cores" in second
    assert preflight.main(["--learners", "0"]) == 2


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A copy of the course with three labs: worked in, at its start, missing; and progress in two of them."""
    monkeypatch.setattr(reset, "render", lambda path: f"pristine {Path(path).stem}\n")
    monkeypatch.setattr(reset, "ROOT", tmp_path)
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
    lab = course / "labs" / "03_c.ipynb"
    assert GENERATOR is labs.render
    changed, kept = reset.reset_labs(["03_c", "04_d", "05_e"], course)
    assert changed == ["03_c", "05_e"] and lab.read_bytes() == b"pristine 03_c\n"
    lab.write_bytes(b"typed afterwards, into the same file")  # must not reach what is kept
    assert files(kept) == {"03_c.ipynb": WORK}
    _, again = reset.reset_labs(["03_c"], course)
    assert again != kept and files(kept) == {"03_c.ipynb": WORK}
    (course / "labs" / "05_e.ipynb").unlink()
    (course / "labs" / "05_e.ipynb").symlink_to("/etc/passwd")
    assert reset.main([]) == reset.main(["--lab", "9"]) == 2


def test_progress_is_forgotten_only_when_asked_and_kept_aside(course):
    path = course / "home" / "progress.json"
    before = path.read_bytes()
    assert reset.main(["--lab", "3"]) == 0 and path.read_bytes() == before
    assert reset.main(["--lab", "3", "--progress"]) == 0
    assert list(progress.load().labs) == list(progress.load().guesses) == ["04_d"]
    [aside] = path.parent.glob("progress.kept-*.json")
    assert aside.read_bytes() == before and aside.stat().st_mode & 0o777 == 0o600


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
    code = reset.main(["--lab", "03", "--lab", "4"])
    monkeypatch.undo()
    assert len(calls) > failing and code == 1
    left = files(course / "labs")
    for name, work in (("03_c", WORK), ("04_d", WORK + b"4")):
        assert left[f"{name}.ipynb"] in (work, f"pristine {name}\n".encode())
        assert [data for path, data in left.items() if path.endswith(f"{name}.ipynb") and data == work], name
    assert not [path for path in left if path.endswith(".part")]


def test_what_is_handed_in_is_what_the_board_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path))
    progress._store.cache_clear()
    assert hand_in.main(["5"]) == hand_in.main(["9"]) == 2, "nothing tried, no such lab"
    progress.record_exercise("05_deepspeed_zero", "sharded_step", passed=True, seconds=1)
    for _ in range(2):
        message = "```json\n```"  # must not end the block
        progress.record_exercise("05_deepspeed_zero", "reshard", passed=False, seconds=1, message=message)
    progress.record_exercise("04_ddp_accelerate", "repaired", passed=True, seconds=1)
    assert hand_in.main(["5"]) == 0
    said = capsys.readouterr().out
    assert "ZeRO" in said and "1 of 7" in said and "3 tries" in said and "04_ddp" not in said
    assert [line for line in said.splitlines() if line.startswith("```")] == ["```json", "```"]
    assert progress.Progress.from_json(said.split("```")[1].removeprefix("json")).labs == {
        "05_deepspeed_zero": progress.load().labs["05_deepspeed_zero"]
    }


def test_the_form_for_handing_in_is_one_that_github_takes():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/hand_in.yml").read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "title", "labels", "body"} and form["labels"] == ["hand-in"]
    assert [part["type"] for part in form["body"]] == ["markdown", "input", "textarea", "textarea", "textarea"]
    assert len({part["id"] for part in form["body"][1:] if part["attributes"]["label"]}) == 4
    assert "render" not in str(form), "the block brings a fence of its own"
