"""Find the progress files of a class, and sum up where each learner stands.

Each file belongs to a learner, who may put anything in its place. So links are not followed, nobody waits on a pipe, and
no more is read than a progress file may hold.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from course_lib.notebook.contents import LabExercise
from course_lib.notebook.progress import MAX_BYTES, Progress
from course_lib.notebook.where_you_stand import within

MOST_LEARNERS = 500
NAME_LENGTH, MESSAGE_LENGTH = 40, 100
STUCK_TRIES = 5
CLOCK_AHEAD = 60.0  # seconds that a learner's clock may be ahead of ours

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
    """Where one learner stands. Names and messages are cleaned by `printable`, not escaped.

    Attributes:
        name: what the folder or the file is called.
        problem: why the file cannot be read; empty otherwise.
        counts: for each lab, exercises (passed, tried and not passed).
        stuck: exercises the learner is stuck at, most tries first.
        guesses: how many numbers they guessed, and how well.
        unknown: recorded exercises that this course does not have.
        last_sign: seconds since 1970 of the last try that we know of; None where there is none.
    """

    name: str
    problem: str = ""
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stuck: tuple[Stuck, ...] = ()
    guesses: str = ""
    unknown: int = 0
    last_sign: float | None = None

    @property
    def passed(self) -> int:
        """Exercises passed in all labs."""
        return sum(passed for passed, _ in self.counts.values())


ORDERS = {
    "name": lambda learner: learner.name.casefold(),
    "passed": lambda learner: (-learner.passed, learner.name.casefold()),
    "stuck": lambda learner: (-max((one.tries for one in learner.stuck), default=0), learner.name.casefold()),
    "silent": lambda learner: (learner.last_sign or 0.0, learner.name.casefold()),
}
"""How to sort a class; `stuck` and `silent` bring those to the top who may need somebody."""


def find_files(given: str) -> tuple[Path, list[tuple[str, Path]]]:
    """Find each learner's progress file below a folder, or by a pattern such as '/home/*/progress.json'.

    Args:
        given: a folder that holds a folder with progress.json for each learner, or files such as ada.json; or a pattern
            whose one part with a wildcard is the learner's name.

    Returns:
        The folder that holds the class, and (learner's name, file, which may not exist yet) by name.

    Raises:
        ValueError: the folder is not there, or more than one part of the pattern has a wildcard.
        OSError: the folder cannot be listed.
    """
    path = Path(given).expanduser().absolute()
    parts = [] if path.exists() else [i for i, part in enumerate(path.parts) if any(letter in part for letter in "*?[")]
    if len(parts) > 1:
        raise ValueError(f"{given}: only one part may hold a wildcard, the one that is the learner's name")
    folder = Path(*path.parts[: parts[0]]) if parts else path
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the one that holds a folder or a file for each learner")
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if parts:
        below = Path(*path.parts[parts[0] + 1 :])
        names = fnmatch.filter(names, path.parts[parts[0]])
        found = [(name, folder / name / below) for name in names]
    else:
        found = [(name, folder / name / "progress.json") for name in names if (folder / name).is_dir()]
        found += [(name.removesuffix(".json"), folder / name) for name in names if name.endswith(".json")]
    return folder, sorted(found)[:MOST_LEARNERS]


def read(name: str, file: Path, labs: Labs) -> Learner:
    """Read one learner's file; a file that cannot be read is the learner's `problem`."""
    shown_name = printable(name, NAME_LENGTH) or "(a name that cannot be shown)"
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            state = os.fstat(opened.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("no regular file")
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES:,} bytes")
        return summary(shown_name, Progress.from_json(data.decode("utf-8")), labs, state.st_mtime)
    except FileNotFoundError:  # nothing tried yet
        return summary(shown_name, Progress(), labs)
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.ELOOP:
            reason = "a symbolic link, which is not followed"
        return Learner(shown_name, problem=f"cannot be read: {printable(reason, 120)}")


def summary(name: str, progress: Progress, labs: Labs, changed: float | None = None) -> Learner:
    """Sum up a progress file. Only exercises of `labs` count: a file may claim any others.

    Args:
        changed: when the file was last written. Later tries of an exercise change nothing else in it, so copy the files
            of a class together with their times.
    """
    counts, stuck, known = {}, [], 0
    for lab, exercises in labs.items():
        records = [(one, progress.labs.get(lab, {}).get(one.name)) for one in exercises]
        tried = [(one, record) for one, record in records if record is not None]
        not_passed = [(one, record) for one, record in tried if record.status != "passed"]
        counts[lab] = (len(tried) - len(not_passed), len(not_passed))
        known += len(tried)
        stuck += [
            Stuck(lab, one.title, min(record.tries, 999), printable(record.message, MESSAGE_LENGTH))
            for one, record in not_passed
            if record.tries >= STUCK_TRIES
        ]
    every = [record for records in progress.labs.values() for record in records.values()]
    times = [when for record in every for when in (record.first_tried, record.first_passed)]
    guesses = [guess for by_question in progress.guesses.values() for guess in by_question.values()]
    times += [guess.when for guess in guesses]
    seconds = [one for one in map(_seconds, times) if one is not None and one <= time.time() + CLOCK_AHEAD]
    if changed is not None:
        seconds.append(changed)
    stuck.sort(key=lambda one: -one.tries)
    return Learner(name, "", counts, tuple(stuck), within(guesses), len(every) - known, max(seconds, default=None))


def medians(learners: Sequence[Learner], labs: Labs) -> list[float]:
    """The class's median of exercises passed in each lab, and in all of them together; unreadable files do not count."""
    readable = [learner for learner in learners if not learner.problem]
    by_lab = [statistics.median([one.counts[lab][0] for one in readable] or [0]) for lab in labs]
    return [*by_lab, statistics.median([one.passed for one in readable] or [0])]


def printable(text: str, length: int) -> str:
    """`text` on one line of at most `length` characters, without control, bidirectional and unpaired characters."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 20 * length]).split())
    return line if len(line) <= length else line[: length - 1] + "…"


def _seconds(text: str | None) -> float | None:
    """A time as the progress file writes it, in seconds since 1970; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError, OSError):
        return None
