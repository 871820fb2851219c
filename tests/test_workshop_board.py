"""The class's page: every progress file is somebody else's input."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path

from refusals import assert_refused

from classroom.authoring.labs import find_lab
from classroom.workshop import board, hand_in, learners
from course_lib.notebook import contents
from course_lib.notebook.progress import ExerciseRecord, GuessRecord, Progress

LABS = contents.labs()
LAB5 = "05_deepspeed_zero"
OLD = "2020-01-01T10:00:00+00:00"


class Page(HTMLParser):
    """What a browser would make of the page: its tags, and the text of each table row."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.rows = [], [], []
        self.feed(text)
        self.close()
        self.rows = [[cell.strip() for cell in row] for row in self.rows]

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        [row] = [row for row in self.rows if row[0] == name]
        return row


def learner(folder: Path, name: str, *tries: tuple[str, str, int], message: str = "off by 2", when: str = OLD) -> Path:
    """A progress file with (exercise of lab 5, status, tries)."""
    records = {exercise: ExerciseRecord(status, n, when, message=message) for exercise, status, n in tries}
    path = folder / name / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text(Progress({LAB5: records}, {LAB5: {"x": GuessRecord("s", 3.0, 4.0, OLD)}}).to_json())
    os.utime(path, (1.6e9, 1.6e9))
    return path


def page_of(given: Path) -> Page:
    return Page(board.render(given))


def test_the_board_counts_the_exercises_that_the_checks_have():
    for lab, exercises in LABS.items():
        checks = find_lab(lab).exercises.values()
        assert [(one.name, one.minutes) for one in exercises] == [(check.name, check.minutes) for check in checks], lab


def test_a_row_tells_what_was_passed_tried_and_where_somebody_is_stuck(tmp_path):
    learner(tmp_path, "ada", ("sharded_step", "passed", 9), ("reshard", "not yet", 5), ("choose", "not yet", 4))
    learner(tmp_path, "bob", ("sharded_step", "passed", 1), ("reshard", "passed", 1), ("choose", "passed", 1))
    (tmp_path / "eve").mkdir()
    page = page_of(tmp_path)
    ada = page.row("ada")
    assert ada[5].startswith("1/7") and ada[1] == "0/6"
    assert "Resharding a checkpoint" in ada[11] and "5 tries" in ada[11] and "off by 2" in ada[11]
    assert ada[10] == "1, within a factor of 1.4" and page.row("eve")[10] == ""
    assert page.row("eve")[12] == "none yet" and "Sep" in ada[12]
    assert [row[0] for row in page.rows[1:-1]] == ["ada", "bob", "eve"]
    assert page.rows[-1][5] == "1" and page.rows[-1][9] == "1", "the median of 1, 3 and 0"


def test_a_damaged_file_is_a_row_and_the_others_are_read(tmp_path):
    damaged = {
        "ten megabytes": b'{"version": 2, "labs": {}, "guesses": {}}' + b" " * 10 * 2**20,
        "deep": b"[" * 100_000,
        "NaN": b'{"version": 2, "labs": {}, "guesses": {"l": {"x": {"unit": "s", "guess": NaN}}}}',
        "newer": b'{"version": 99}',
        "markup": b'{"version": "<script>"}',
        "no text": b"\xff\xfe",
        "digits": b'{"version": ' + b"9" * 5000 + b"}",
        "other types": json.dumps({"version": 2, "labs": {LAB5: [1]}, "guesses": {}}).encode(),
    }
    ada = learner(tmp_path, "ada", ("sharded_step", "passed", 1))
    for name, data in damaged.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_bytes(data)
    for name in ("link", "pipe", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "progress.json").symlink_to(ada)  # somebody else's work
    os.mkfifo(tmp_path / "pipe" / "progress.json")  # nobody waits for who writes to it
    (tmp_path / "folder" / "progress.json").mkdir()
    page = page_of(tmp_path)
    for name in (*damaged, "link", "pipe", "folder"):
        said = page.row(name)[1]
        assert said.startswith("cannot be read") and len(said) < 150, name
    assert page.row("ada")[5] == "1/7" and "script" not in page.tags


def test_names_and_messages_are_shown_as_they_are_and_never_as_markup(tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    name = "<b onclick='x'>&\"\u202egnitaehc\u0007\u200b"
    path = learner(tmp_path, name, ("reshard", "not yet", 7), message=attack + "\udcff\u202e" + "z" * 3000)
    raw = json.loads(path.read_text())
    raw["labs"]["<script>lab</script>"] = {"<img>": raw["labs"][LAB5]["reshard"]}
    raw["labs"][LAB5]["<iframe>"] = raw["labs"][LAB5]["reshard"]
    path.write_text(json.dumps(raw))
    learner(tmp_path, "Zoë O'Neill " + "n" * 90, ("sharded_step", "passed", 10**400))
    text = board.render(tmp_path)
    page = Page(text)
    assert not {"script", "img", "b onclick", "iframe", "link"} & set(page.tags)
    assert not [part for part in page.attributes if part[1].startswith("on") or part[1] in ("src", "style")]
    row = page.rows[1]
    assert row[0] == "<b onclick='x'>&\" gnitaehc" and attack in row[11] and len(row[11]) < 200
    assert page.rows[2][0].startswith("Zoë O'Neill nn") and len(page.rows[2][0]) == learners.NAME_LENGTH
    assert not set(text) & set("\u202e\u200b\u0007\udcff")


def block(*tries: tuple[str, str, int], lab: str = LAB5) -> str:
    """An issue's body as the form makes it, with the line ends that GitHub gives it."""
    records = {exercise: ExerciseRecord(status, n, OLD) for exercise, status, n in tries}
    row = next(row for row in contents.map_rows() if row.name == lab)
    text = hand_in.block(row, Progress({lab: records}))
    question = '```json\n{"zero_optimization": {"stage": 4}}\n```'  # of the learner's own
    return f"### The block\n\n{text}\n\n### One question\n\n{question}".replace("\n", "\r\n")


def test_a_class_that_hands_in_by_issue_is_read_newest_block_first(tmp_path):
    issues = tmp_path / "issues.json"
    newest_first = [
        ("bob", "I have no block yet"),
        ("ada", block(("reshard", "passed", 3), ("choose", "not yet", 6))),
        ("eve<b>", '```json\n{"version": 2, "labs": [NaN]}\n```'),
        ("ada", block(("ring", "passed", 1), lab="03_collectives")),
        ("ada", block(("sharded_step", "passed", 1), ("reshard", "not yet", 1))),
        ("bob", block(("reshard", "passed", 1))),
        ("ada", "a mistake of mine"),
        ("deep", "```json\n" + "[" * 100_000),
        ("huge", "```json\n" + "9" * 5 * 2**20),
    ]
    issues.write_text(json.dumps([{"author": {"login": login}, "body": body} for login, body in newest_first]))
    page = page_of(issues)
    assert [row[0] for row in page.rows[1:-1]] == ["ada", "bob", "deep", "eve<b>", "huge"]
    ada = page.row("ada")
    assert ada[3].startswith("1/6") and ada[5].startswith("1/7") and "1 tried" in ada[5] and "6 tries" in ada[11]
    for name in ("bob", "deep", "eve<b>", "huge"):
        assert page.row(name)[1].startswith("cannot be read") and len(page.row(name)[1]) < 150, name
    for text in ("[1]", "no JSON", '[{"author": {}, "body": ""}]'):
        issues.write_text(text)
        assert_refused([(lambda: board.render(issues), ValueError, "issues.json")])
    assert_refused([(lambda: board.render(tmp_path / "nobody"), OSError, "nobody")])


def test_the_page_is_written_outside_the_class_again_and_again_until_ctrl_c(tmp_path, monkeypatch):
    group, out, seen = tmp_path / "class", tmp_path / "board.html", []
    path = learner(group, "ada", ("reshard", "not yet", 6))

    def sleep(seconds):
        seen.append(Page(out.read_text()).row("ada")[5])
        path.write_text(Progress({LAB5: {"reshard": ExerciseRecord("passed", 7, OLD)}}).to_json())
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(board.time, "sleep", sleep)
    assert board.main([str(group), "--out", str(out)]) == 0
    assert [cell[:3] for cell in seen] == ["0/7", "1/7"] and 'http-equiv="refresh" content="5"' in out.read_text()
    assert board.main([str(group), "--once", "--out", str(out)]) == 0 and "refresh" not in out.read_text()
    for wrong in ([str(group), "--out", str(group / "b.html")], [str(tmp_path / "nobody"), "--out", str(out)]):
        assert board.main(["--once", *wrong]) == 2, wrong
    assert os.listdir(group) == ["ada"], "a class's folder is only read"
