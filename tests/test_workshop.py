"""The class commands: their table, the pace of a lesson, what a class needs of one box."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from classroom.authoring import notes
from classroom.workshop import class_needs, command, pace, preflight
from course_lib.notebook import contents
from course_lib.notebook.contents import Section
from course_lib.units import GIB
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

ROOT = Path(contents.ROOT)
NOTE_5 = """---
skip_first:
  - {section: "## 5. Bytes by stage", because: "lesson 1 counted them"}
  - {section: "9. Offload", because: "no machine here needs it"}
lab_core: ["1. Bytes a rank, stage by stage", "## 5. A checkpoint for other ranks"]
---
# Lesson 5, from the front

Ask first.
"""


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """The course's notebooks with one instructor's note, on lesson 5."""
    for name in ("lessons", "labs", "solutions"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "site" / "instructors").mkdir(parents=True)
    (tmp_path / "site" / "instructors" / "05_deepspeed_zero.md").write_text(NOTE_5)
    for function in (pace.overview, pace.lesson, notes.read, notes.note_path):
        monkeypatch.setattr(function, "__defaults__", (*function.__defaults__[:-1], tmp_path))
    return tmp_path


def test_every_command_is_there_and_has_its_help():
    for module, _ in command.COMMANDS.values():
        assert importlib.util.find_spec(module), module
    done = subprocess.run([sys.executable, "-m", "course_tools", "class", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and all(name in done.stdout for name in command.COMMANDS) and "torch" not in done.stderr
    for name in ("preflight", "board", "reset", "pace", "notes"):
        with pytest.raises(SystemExit, match="0"):
            command.main([name, "--help"])
    assert command.main(["bord"]) == 2


def test_minutes_are_shared_out_by_cost_and_sum_up():
    assert pace.share(10, [1, 1, 2]) == [3, 3, 4]
    assert pace.share(3, [0, 0, 0]) == [1, 1, 1]
    with pytest.raises(ValueError, match="state at least 3"):
        pace.share(2, [1, 1, 1])
    assert pace.cost(Section("x", 2, words=400, lines=20, cells=3, figures=2)) == 2 + 1 + 1 + 2
    for row in contents.map_rows():
        steps = pace.plan(contents.sections(contents.find(row.number, "lessons")), row.minutes)
        assert pace.taken(steps) == row.minutes and len(steps) > 8
        assert sum(one.minutes for one in contents.exercises(contents.find(row.number, "labs"))) == row.lab_minutes


def test_sections_are_dropped_in_the_notes_order_with_what_stands_below_them():
    sections = [Section("t", 1, 200), Section("a", 2, 200), Section("below a", 3, 200), Section("b", 2, 200)]
    skips = [notes.Skip("a", "known"), notes.Skip("b", "later")]
    kept = [
        [step.skipped is None for step in pace.plan(sections, 40, skips, limit)] for limit in (40, 39, 20, 19, None)
    ]
    assert kept == [
        [True] * 4,
        [True, False, False, True],
        [True, False, False, True],
        [True, False, False, False],
        [True] * 4,
    ]
    with pytest.raises(ValueError, match="'c', which is no heading"):
        pace.plan(sections, 40, [notes.Skip("c", "")])


def test_pace_of_a_lesson_with_a_note(course, capsys):
    assert pace.main(["5", "--minutes", "65", "--start", "9:30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("09:30  ") and lines[0].endswith("Lesson 5: ZeRO")
    assert any("skip  5. Bytes by stage" in line for line in lines) and any(
        "skip    Who holds what" in line for line in lines
    )
    assert "because lesson 1 counted them" in "\n".join(lines) and not any("skip  9." in line for line in lines)
    times = [line[:5] for line in lines if line[:1].isdigit() and line[2:3] == ":"]
    assert times == sorted(times)
    [total] = [line for line in lines if "of the 75 skipped" in line]
    needed = int(total.split()[0])
    assert needed <= 65 and f"the lab from {pace.clock(570 + needed)}" in total
    assert sum(int(line[7:10]) for line in lines[: lines.index(total)] if line[0] == "0" or line[:2] == "10") == needed
    assert "* 1. Bytes a rank" in "\n".join(lines) and lines[-1] == "40 minutes for the core alone"
    assert pace.main(["5", "--minutes", "20"]) == 1 and "minutes too long" in capsys.readouterr().out
    assert pace.main(["5", "--minutes", "105"]) == 0 and "30 min left for questions." in capsys.readouterr().out


def test_pace_before_a_note_is_written(course, capsys):
    assert pace.main(["4", "--minutes", "45"]) == 1
    told = capsys.readouterr().out
    assert "60 minutes" in told and "not written yet" in told
    assert pace.main(["4"]) == 0
    assert pace.main([]) == 0 and capsys.readouterr().out.count("Lesson ") == 9
    for wrong in (["9"], ["4", "--start", "25:00"], ["4", "--minutes", "0"]):
        assert pace.main(wrong) == 2 and capsys.readouterr().err.count("\n") == 1
    assert notes.main(["4"]) == 1 and notes.main(["9"]) == 2
    capsys.readouterr()
    assert notes.main(["5"]) == 0 and capsys.readouterr().out == "# Lesson 5, from the front\n\nAsk first.\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# no front", "must begin with its YAML"),
        ("---\nlab_core: [\n---\n", "its YAML is not"),
        ("---\nskip_first: [a]\n---\n", "its YAML is not"),
        ('---\nskip_first: [{section: "no such", because: x}]\n---\n', "no heading of the lesson"),
        ('---\nlab_core: ["no such"]\n---\n', "no heading of the lab"),
    ],
)
def test_a_note_that_cannot_be_understood_is_one_sentence(course, capsys, text, why):
    (course / "site" / "instructors" / "05_deepspeed_zero.md").write_text(text)
    assert pace.main(["5"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (class_needs.cores(16, 2), PROBLEM, "groups of 8"),
        (class_needs.cores(16, 16), NOTE, "1 per learner"),
        (class_needs.cores(16, 32), OK, ""),
        (class_needs.memory(16, 31 * GIB), PROBLEM, "at most 15 learners"),
        (class_needs.memory(16, 64 * GIB), NOTE, "at most 10 learners at once"),
        (class_needs.memory(16, 96 * GIB), OK, ""),
        (class_needs.disk(16, 20 * GIB, cuda=False), PROBLEM, "saving will fail"),
        (class_needs.disk(16, 72 * GIB, cuda=False), OK, ""),
        (class_needs.disk(16, 72 * GIB, cuda=True), NOTE, "one copy"),
        (class_needs.shared_memory(16, GIB, 4), PROBLEM, "--shm-size=2g"),
        (class_needs.shared_memory(16, GIB, 0), OK, "64 MiB per learner"),
        (class_needs.shared_memory(16, 2 * GIB, 4), OK, ""),
        (class_needs.shared_memory(16, None, 4), OK, ""),
        (class_needs.processes(16, None, 1000, 2), PROBLEM, "--pids-limit 3264"),
        (class_needs.processes(16, 50, None, 2), PROBLEM, "ulimit -u 204"),
        (class_needs.processes(16, 1000, None, 2), NOTE, "an account of their own"),
        (class_needs.processes(16, None, None, 2), OK, "no limit"),
        (class_needs.gpus(16, 0, ""), OK, "nobody waits"),
        (class_needs.gpus(16, 4, ""), NOTE, "4 at once with one each, 2 with two each; in turns of one"),
        (class_needs.gpus(2, 1, ""), NOTE, "a run with two does not fit"),
        (class_needs.gpus(16, 4, "/no/such/folder"), PROBLEM, "gpus init /no/such/folder --gpus 4"),
        (class_needs.gpus(16, 4, "/tmp"), OK, "lent through /tmp"),
        (class_needs.gpus(2, 4, ""), OK, "two each"),
    ],
)
def test_what_a_class_needs(finding: Finding, level: str, words: str):
    assert finding.level == level and words in " ".join((finding.says, finding.means, finding.mend)), finding
    assert bool(finding.mend) or finding.level != PROBLEM


def test_a_container_is_told_by_its_limits(tmp_path):
    whole = preflight.cores_here(tmp_path), preflight.memory_here(tmp_path)
    assert whole[0] >= 1 and whole[1] > GIB and preflight.tasks_here(tmp_path) is None
    for name, text in (("cpu.max", "50000 100000"), ("memory.max", "1073741824"), ("pids.max", "512")):
        (tmp_path / name).write_text(text + "\n")
    assert (preflight.cores_here(tmp_path), preflight.memory_here(tmp_path), preflight.tasks_here(tmp_path)) == (
        0.5,
        GIB,
        512,
    )
    for name, text in (("cpu.max", "max 100000"), ("memory.max", "max"), ("pids.max", "max")):
        (tmp_path / name).write_text(text + "\n")
    assert (preflight.cores_here(tmp_path), preflight.memory_here(tmp_path)) == whole and preflight.tasks_here(
        tmp_path
    ) is None


def test_the_preflight_tells_the_doctors_findings_and_the_classs(monkeypatch, capsys):
    monkeypatch.setattr(preflight, "examine", lambda: iter([Finding(OK, "Python", "3.11")]))
    monkeypatch.setattr(
        preflight.class_needs, "cores", lambda *_: Finding(PROBLEM, "class: cores", "few", "Slow.", "More.")
    )
    assert preflight.main(["--learners", "3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["about"] for one in found][:2] == ["Python", "class: cores"] and len(found) == 7
    monkeypatch.setattr(preflight, "for_a_class", lambda learners: iter([Finding(OK, "class: cores", f"{learners}")]))
    assert preflight.main(["--learners", "3"]) == 0
    assert "this box carries 3 learners" in capsys.readouterr().out
    assert preflight.main(["--class-only"]) == 0 and "Python" not in capsys.readouterr().out
    assert preflight.main(["--learners", "0"]) == preflight.main(["--learners", "x"]) == 2
    monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", "many")
    assert preflight.main([]) == 2
