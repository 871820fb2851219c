"""Where the learner stands: counts against the labs' own exercises, and what comes next."""

from __future__ import annotations

from course_lib.notebook import contents, where_you_stand
from course_lib.notebook.progress import ExerciseRecord, LedgerRecord, Progress, record_exercise
from course_tools.__main__ import main

LABS = contents.labs()
FIRST, *OTHERS = LABS


def passed(names) -> dict[str, ExerciseRecord]:
    return {name: ExerciseRecord("passed", 1, "2026-01-01T00:00:00+00:00") for name in names}


def row(done: Progress, lesson: str) -> dict[str, str]:
    return next(each for each in where_you_stand.rows(done) if each["lesson"] == lesson)


def test_a_new_learner_begins_with_lesson_1():
    assert [each["lesson"] for each in where_you_stand.rows(Progress())] == list(LABS) and len(LABS) == 8
    assert row(Progress(), FIRST)["exercises passed"] == f"0 of {len(LABS[FIRST])}"
    assert where_you_stand.next_step(Progress()) == f"Next: lesson 1, lessons/{FIRST}.ipynb."


def test_only_exercises_of_the_lab_count_and_the_first_open_one_is_next():
    names = [exercise.name for exercise in LABS[FIRST]]
    records = passed([names[0], names[2], "no such exercise"])
    records[names[1]] = ExerciseRecord("not yet", 3, "2026-01-01T00:00:00+00:00")
    done = Progress(labs={FIRST: records})
    assert row(done, FIRST)["exercises passed"] == f"2 of {len(names)}"
    assert LABS[FIRST][1].title in where_you_stand.next_step(done)
    assert f"labs/{FIRST}.ipynb" in where_you_stand.next_step(done)


def test_after_a_whole_lab_comes_the_next_lesson_and_after_all_nothing():
    done = Progress(labs={FIRST: passed(exercise.name for exercise in LABS[FIRST])})
    assert where_you_stand.next_step(done) == f"Next: lesson 2, lessons/{OTHERS[0]}.ipynb."
    everything = Progress(labs={lab: passed(one.name for one in exercises) for lab, exercises in LABS.items()})
    assert where_you_stand.next_step(everything) == "Every exercise of the course is passed."


def test_predictions_are_counted_once_measured_and_a_predicted_0_has_no_percentage():
    lines = {
        "a": LedgerRecord("a", "GiB", 2.0, 2.2),
        "b": LedgerRecord("b", "GiB", 2.0, 1.0),
        "c": LedgerRecord("c", "", 0.0, 3.0),
        "not yet": LedgerRecord("not yet", "s", 1.0),
        "not predicted": LedgerRecord("not predicted", "s", None, 1.0),
    }
    told = row(Progress(ledger={FIRST: lines}), FIRST)
    assert (told["predictions measured"], told["off by (median)"]) == ("3", "30 %")


def test_the_command_prints_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path))
    record_exercise(FIRST, LABS[FIRST][0].name, passed=True, seconds=0.1)
    assert main(["progress"]) == 0
    said = capsys.readouterr().out
    assert f"1 of {len(LABS[FIRST])}" in said and LABS[FIRST][1].title in said
