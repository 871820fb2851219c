"""Read the progress of a class, from its files or from what it handed in by issue, and sum up where each learner stands.

Each file and each issue belongs to a learner, who may put anything in its place. So links are not followed, nobody waits
on a pipe, and no more is read than a progress file may hold.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from course_lib.notebook.contents import LabExercise
from course_lib.notebook.progress import MAX_BYTES, Progress
from course_lib.notebook.where_you_stand import within

NAME_LENGTH, MESSAGE_LENGTH, PROBLEM_LENGTH = 40, 100, 120
STUCK_TRIES = 5

Labs = Mapping[str, Sequence[LabExercise]]


@dataclass(frozen=True)
class Stuck:
    """An exercise tried at least STUCK_TRIES times and not passed; `message` is the start of the check's last answer."""

    lab: str
    title: str
    tries: int
    message: str


@dataclass(frozen=True)
class Learner:
    """Where one learner stands. Names and messages are cleaned by `printable`, not escaped."""

    name: str
    last_sign: str = ""  # when the file was last written
    problem: str = ""  # why there is nothing to read
    counts: Sequence[tuple[int, int, int]] = ()  # passed, tried and not passed, of: each lab, and at the end all labs
    stuck: Sequence[Stuck] = ()  # most tries first
    guesses: str = ""  # how many numbers they guessed, and how well


def read_class(given: Path, labs: Labs) -> list[Learner]:
    """The learners of a folder that holds NAME/progress.json for each, or of a file of issues, by name.

    Raises ValueError for a file that is not what ``gh issue list --json author,body`` writes, and OSError for a path
    that is not there.
    """
    if given.is_file():
        learners = from_issues(given, labs)
    else:
        folders = [folder for folder in given.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
        learners = [from_file(folder.name, folder / "progress.json", labs) for folder in folders]
    return sorted(learners, key=lambda learner: learner.name.casefold())


def from_file(name: str, file: Path, labs: Labs) -> Learner:
    """Read one learner's file; one that cannot be read is the learner's `problem`."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            state = os.fstat(opened.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("no regular file")
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES:,} bytes")
        written = datetime.fromtimestamp(state.st_mtime)
        return summary(name, Progress.from_json(data.decode("utf-8")), labs, f"{written:%d %b %H:%M}")
    except FileNotFoundError:
        return summary(name, Progress(), labs, "none yet")
    except (ValueError, OSError, OverflowError) as error:
        return unreadable(name, error)


def from_issues(file: Path, labs: Labs) -> list[Learner]:
    """One learner for each author; of each lab the newest block counts. An issue without one is a problem until the next."""
    try:
        issues = [(str(issue["author"]["login"]), str(issue["body"])) for issue in json.loads(file.read_bytes())]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what gh issue list --json author,body writes: {error!r}") from error
    handed_in: dict[str, Progress] = {}
    problems: dict[str, Exception] = {}
    for login, body in reversed(issues):  # gh writes the newest first
        done = handed_in.setdefault(login, Progress())
        problems.pop(login, None)
        try:
            _, fence, rest = body[:MAX_BYTES].partition("```json")
            if not fence:
                raise ValueError("an issue without the block that beyond class hand-in prints")
            done.labs.update(Progress.from_json(rest.partition("```")[0]).labs)
        except (ValueError, OSError) as error:
            problems[login] = error
    return [
        unreadable(login, problems[login]) if login in problems else summary(login, done, labs, "by issue")
        for login, done in handed_in.items()
    ]


def unreadable(name: str, error: Exception) -> Learner:
    """A learner of whom nothing is known but why."""
    reason = getattr(error, "strerror", None) or str(error)
    return Learner(printable(name, NAME_LENGTH), problem=f"cannot be read: {printable(reason, PROBLEM_LENGTH)}")


def summary(name: str, progress: Progress, labs: Labs, last_sign: str) -> Learner:
    """Sum up a progress file. Only exercises of `labs` count: a file may claim any others."""
    counts, stuck = [], []
    for lab, exercises in labs.items():
        records = [(one, progress.labs.get(lab, {}).get(one.name)) for one in exercises]
        not_passed = [(one, record) for one, record in records if record and record.status != "passed"]
        passed = sum(record is not None for _, record in records) - len(not_passed)
        counts.append((passed, len(not_passed), len(exercises)))
        stuck += [
            Stuck(lab, one.title, min(record.tries, 999), printable(record.message, MESSAGE_LENGTH))
            for one, record in not_passed
            if record.tries >= STUCK_TRIES
        ]
    counts.append(tuple(map(sum, zip(*counts, strict=True))))
    stuck.sort(key=lambda one: -one.tries)
    guesses = [guess for by_question in progress.guesses.values() for guess in by_question.values()]
    return Learner(printable(name, NAME_LENGTH), last_sign, "", counts, stuck, within(guesses))


def printable(text: str, length: int) -> str:
    """`text` on one line of at most `length` characters, without control, bidirectional and unpaired characters."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 20 * length]).split())
    return line if len(line) <= length else line[: length - 1] + "…"
