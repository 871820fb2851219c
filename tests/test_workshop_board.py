"""The class's page: every progress file is somebody else's input."""

from __future__ import annotations

import json
import os
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from classroom.workshop import board, learners
from course_lib.notebook import contents
from course_lib.notebook.progress import ExerciseRecord, LedgerRecord, Progress

LABS = contents.labs()
LAB5 = "05_deepspeed_zero"
OLD = "2020-01-01T10:00:00+00:00"


class Read(HTMLParser):
    """What a browser would make of the page: its tags, and the text of each table row."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.rows, self._row = [], [], [], None
        self.feed(text)
        self.close()
        self.rows = [[cell.strip() for cell in row] for row in self.rows]

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *one) for one in attributes]
        if tag == "tr":
            self._row = []
            self.rows.append(self._row)
        elif tag in ("td", "th") and self._row is not None:
            self._row.append("")

    def handle_data(self, data):
        if self._row:
            self._row[-1] += data

    def row(self, name: str) -> list[str]:
        [found] = [row for row in self.rows if row[0] == name]
        return found


def learner(folder: Path, name: str, *tries: tuple[str, str, int], message: str = "off by 2", when: str = OLD) -> Path:
    """A progress file with (exercise of lab 5, status, tries)."""
    records = {exercise: ExerciseRecord(status, n, when, message=message) for exercise, status, n in tries}
    path = folder / name / "progress.json"
    path.parent.mkdir()
    path.write_text(Progress({LAB5: records}, {}).to_json())
    os.utime(path, (1.6e9, 1.6e9))
    return path


def table(folder: Path, order: str = "name") -> Read:
    return Read(board.render(str(folder), order))


def test_the_number_of_exercises_is_that_of_the_checks():
    from classroom.authoring.labs import find_lab

    checks = find_lab("04_ddp_accelerate").exercises.values()
    assert [(one.name, one.minutes) for one in LABS["04_ddp_accelerate"]] == [(one.name, one.minutes) for one in checks]
    assert LABS and all(LABS.values())


def test_a_row_tells_what_was_passed_tried_and_where_somebody_is_stuck(tmp_path):
    learner(tmp_path, "ada", ("partition", "passed", 9), ("reshard", "not yet", 5), ("choose_stage", "not yet", 4))
    learner(tmp_path, "bob", ("partition", "passed", 1), ("reshard", "passed", 1), ("choose_stage", "passed", 1))
    (tmp_path / "eve").mkdir()
    (tmp_path / "seats.txt").write_text("a list of the instructor's")
    page = table(tmp_path)
    ada = page.row("ada")
    assert (ada[5], ada[1], ada[9]) == ("1/72 tried", "0/8", f"1/{sum(map(len, LABS.values()))}2 tried")
    assert ada[10] == "Lab 5 · 5. A checkpoint for other ranks: 5 triesoff by 2"
    assert "days ago" in ada[11] and page.row("eve")[11] == "none yet"
    assert page.row("Median passed")[5] == "1"
    assert [row[0] for row in page.rows[1:-1]] == ["ada", "bob", "eve"]
    assert [row[0] for row in table(tmp_path, "passed").rows[1:-1]] == ["bob", "ada", "eve"]
    assert table(tmp_path, "silent").rows[1][0] == "eve" and table(tmp_path, "stuck").rows[1][0] == "ada"
    scopes = [value for tag, name, value in page.attributes if (tag, name) == ("th", "scope")]
    assert scopes.count("col") == 12 and scopes.count("row") == 4 and "caption" in page.tags


def test_the_last_sign_of_life_is_the_newest_that_is_not_in_the_future(tmp_path):
    path = learner(tmp_path, "ada", ("partition", "passed", 1), when="2999-01-01T00:00:00+00:00")
    assert learners.read("ada", path, LABS).last_sign == 1.6e9  # a later try changes the file's time alone
    path.write_text(Progress({}, {"05": {"x": LedgerRecord("x", "s", when="2021-01-01T00:00:00+00:00")}}).to_json())
    os.utime(path, (1.6e9, 1.6e9))
    assert learners.read("ada", path, LABS).last_sign == 1609459200
    ages = [board.ago(seconds) for seconds in (-5, 59, 61, 7200, 200_000)]
    assert ages == ["just now", "just now", "1 min ago", "2 h ago", "2 days ago"]


HOSTILE = {
    "ten megabytes": (b'{"a": "' + b"x" * 10 * 2**20, "larger than 4,194,304 bytes"),
    "deep": (b"[" * 100_000, "not a progress file: RecursionError"),
    "NaN": (b'{"version": 1, "labs": {}, "ledger": {"l": {"x": {"name": "x", "unit": "s", "predicted": NaN}}}}', "NaN"),
    "newer": (b'{"version": 99}', "newer version of the course"),
    "version": (b'{"version": "<script>"}', "unknown format '<script>'"),
    "no text": (b"\xff\xfe", "codec can't decode"),
    "digits": (b'{"version": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    "other types": (json.dumps({"version": 1, "labs": {LAB5: [1]}, "ledger": {}}).encode(), "not a progress file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_file_is_a_row_and_never_breaks_the_page(tmp_path, case):
    data, why = HOSTILE[case]
    learner(tmp_path, "ada", ("partition", "passed", 1))
    (tmp_path / "mallory.json").write_bytes(data)
    page = table(tmp_path)
    said = page.row("mallory")[1]
    assert said.startswith("cannot be read: ") and why in said and len(said) < 150
    assert page.row("ada")[5] == "1/7" and "script" not in page.tags


def test_links_and_pipes_are_refused_and_nobody_waits(tmp_path):
    folder = tmp_path / "class"
    for name in ("linked", "piped", "nested"):
        (folder / name).mkdir(parents=True)
    (folder / "linked" / "progress.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "piped" / "progress.json")
    (folder / "nested" / "progress.json").mkdir()
    page = table(folder)
    for name, why in {"linked": "a symbolic link", "piped": "no regular file", "nested": "Is a directory"}.items():
        assert page.row(name)[1].startswith(f"cannot be read: {why}"), page.row(name)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX permissions")
def test_a_file_without_permission_is_a_problem_of_its_learner():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the session's own folder is closed to another user
        os.chmod(folder, 0o755)
        path = learner(Path(folder), "ada", ("partition", "passed", 1))
        path.chmod(0o000)
        root = os.geteuid() == 0
        try:
            if root:  # root may read anything
                os.seteuid(65534)
            # nothing but the file is read as another user, who may not even enter the folder of this checkout
            assert "Permission denied" in learners.read("ada", path, LABS).problem
        finally:
            if root:
                os.seteuid(0)
            path.chmod(0o600)


def test_names_and_messages_are_shown_as_they_are_and_never_as_markup(tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    name = "<b onclick='x'>&\"\u202egnitaehc\u0007\u200b"
    path = learner(tmp_path, name, ("reshard", "not yet", 7), message=attack + "\udcff\u202e" + "z" * 3000)
    raw = json.loads(path.read_text())
    raw["labs"]["<script>lab</script>"] = {"<img>": raw["labs"][LAB5]["reshard"]}
    raw["labs"][LAB5]["<iframe>"] = raw["labs"][LAB5]["reshard"]
    path.write_text(json.dumps(raw))
    learner(tmp_path, "Zoë O'Neill " + "n" * 90, ("partition", "passed", 10**400))
    text = board.render(str(tmp_path))
    page = Read(text)
    assert not {"script", "img", "b onclick", "iframe", "link"} & set(page.tags)
    assert not [one for one in page.attributes if one[1].startswith("on") or one[1] in ("src", "style")]
    row = page.rows[1]
    assert row[0] == "<b onclick='x'>&\" gnitaehc"
    assert attack in row[10] and row[10].endswith("…") and len(row[10]) < 200
    assert row[11].endswith("2 tried that this course does not have")
    zoe = page.rows[2][0]
    assert zoe.startswith("Zoë O'Neill nn") and len(zoe) == learners.NAME_LENGTH and zoe.endswith("…")
    assert not set(text) & set("\u202e\u200b\u0007\udcff")


def test_a_pattern_names_learners_by_its_wildcard_part(tmp_path):
    for name in ("ada", "bob"):
        (tmp_path / name / "data").mkdir(parents=True)
    learner(tmp_path / "ada" / "data", "course", ("partition", "passed", 1))
    page = table(tmp_path / "*" / "data" / "course" / "progress.json")
    assert page.row("ada")[5] == "1/7" and page.row("bob")[11] == "none yet"
    with pytest.raises(ValueError, match="only one part may hold a wildcard"):
        board.render(str(tmp_path / "*" / "c*" / "progress.json"))
    with pytest.raises(ValueError, match="not a folder"):
        board.render(str(tmp_path / "nobody"))


def test_the_page_is_one_file_outside_the_class(tmp_path, capsys):
    (tmp_path / "class").mkdir()
    learner(tmp_path / "class", "ada", ("partition", "passed", 1))
    out = tmp_path / "board.html"
    assert board.main([str(tmp_path / "class"), "--once", "--out", str(out)]) == 0
    assert Read(out.read_text()).row("ada")[5] == "1/7" and "refresh" not in out.read_text()
    assert board.main([str(tmp_path / "class"), "--once", "--out", str(tmp_path / "class" / "b.html")]) == 2
    assert "only read" in capsys.readouterr().err and sorted(os.listdir(tmp_path / "class")) == ["ada"]
    assert board.main([str(tmp_path / "nobody"), "--out", str(out)]) == 2
    assert "not a folder" in capsys.readouterr().err
    assert board.main([str(tmp_path / "class"), "--every", "0"]) == 2


def test_the_page_is_written_again_until_ctrl_c(tmp_path, monkeypatch, capsys):
    (tmp_path / "class").mkdir()
    path = learner(tmp_path / "class", "ada", ("reshard", "not yet", 6))
    out, looks = tmp_path / "board.html", []

    def sleep(seconds):
        looks.append(Read(out.read_text()).row("ada")[5])
        path.write_text(Progress({LAB5: {"reshard": ExerciseRecord("passed", 7, OLD)}}).to_json())
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(board.time, "sleep", sleep)
    assert board.main([str(tmp_path / "class"), "--out", str(out), "--every", "7"]) == 0
    assert looks == ["0/71 tried", "1/7"] and 'http-equiv="refresh" content="7"' in out.read_text()
    assert "again every 7 s (Ctrl-C ends it)" in capsys.readouterr().out


def test_a_browser_shows_the_page_and_loads_it_again(tmp_path):
    from browser import chromium, shot

    (tmp_path / "class").mkdir()
    path = learner(tmp_path / "class", "ada", ("reshard", "not yet", 6), message="<img src=x onerror=document.title=1>")
    out = tmp_path / "board.html"
    out.write_text(board.render(str(tmp_path / "class"), every=1))
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1920, "height": 1080}, color_scheme="dark")
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(out.as_uri())
        page.wait_for_selector("text=6 tries")
        path.write_text(Progress({LAB5: {"reshard": ExerciseRecord("passed", 7, OLD)}}).to_json())
        out.write_text(board.render(str(tmp_path / "class"), every=1))
        page.wait_for_selector("tbody td >> text=1/7", timeout=30_000)
        assert page.title() == "The class: Beyond One GPU" and said == []
        shot(page, "workshop-board")
