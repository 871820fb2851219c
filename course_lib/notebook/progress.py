"""One private JSON file per learner: which exercises passed, and what was guessed and measured.

The file lies in the user's own data folder (`BEYOND_ONE_GPU_HOME` moves it), mode 0600. Several notebooks may write at
once: every change is read, made and written back under a lock, and the new file replaces the old one in one step. Where
the folder cannot be written, one line says so and the changes stay in this process: a notebook never stops for them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from filelock import FileLock
from platformdirs import user_data_dir
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from course_lib.files import write_atomically
from course_lib.units import MIB

VERSION = 2
"""Format 1 held predictions that the lessons had filled in: its exercises are read, its predictions are not."""
MAX_BYTES = 4 * MIB
"""A progress file larger than this is not ours: it is not read, and we never write one."""
LOCK_SECONDS = 5.0
_EXACTLY = ConfigDict(extra="forbid", allow_inf_nan=False)  # a field that no version had is damage


@dataclass(config=_EXACTLY)
class ExerciseRecord:
    """The best result of one exercise. `tries` counts up to and including the first pass; times are UTC, ISO 8601."""

    status: str
    tries: int
    first_tried: str
    first_passed: str | None = None
    seconds: float | None = None
    message: str = ""


@dataclass(config=_EXACTLY)
class GuessRecord:
    """What a reader typed for one question, in `unit`. `guess` None: skipped; `measured` None: not measured yet."""

    unit: str
    guess: float | None
    measured: float | None = None
    when: str = ""

    @property
    def factor(self) -> float | None:
        """How far off the guess was, as a factor of 1 to 1e9. None where nothing was guessed or measured, or one is 0."""
        if self.guess is not None and self.guess == self.measured:
            return 1.0
        if not self.guess or not self.measured or (self.guess < 0) != (self.measured < 0):
            return None
        ratio = self.guess / self.measured
        return max(ratio, 1 / ratio) if 1e-9 < ratio < 1e9 else 1e9


@dataclass(config=_EXACTLY)
class Progress:
    """`labs[lab][exercise]` and `guesses[lesson][question]`, each in the order of the first time."""

    labs: dict[str, dict[str, ExerciseRecord]] = field(default_factory=dict)
    guesses: dict[str, dict[str, GuessRecord]] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Progress:
        """Raises ValueError for a text that is not a progress file, and OSError for a newer course's file."""
        try:
            raw = json.loads(text)
        except RecursionError as error:
            raise ValueError("not a progress file") from error
        version = raw.get("version") if isinstance(raw, dict) else None
        if type(version) is int and version > VERSION:
            raise OSError(f"it was written by a newer version of the course (format {version}, known: {VERSION})")
        if version == 1:
            raw = {"labs": raw.get("labs", {})}
        elif version != VERSION:
            raise ValueError("not a progress file")
        return _FILE.validate_python(raw)


_FILE = TypeAdapter(Progress)


def progress_path() -> Path:
    """Where this learner's progress lies: `$BEYOND_ONE_GPU_HOME/progress.json`, or the user's data folder."""
    folder = os.environ.get("BEYOND_ONE_GPU_HOME") or user_data_dir("beyond-one-gpu")
    return Path(folder).expanduser().absolute() / "progress.json"


def read(path: Path) -> Progress:
    """Read one progress file, without a lock (it is only ever replaced whole); no file is an empty progress.

    Raises ValueError when the file is damaged or above MAX_BYTES bytes, OSError when it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Progress()
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes")
    return Progress.from_json(data)


class Store:
    """One progress file, and the changes that could not be written to it yet."""

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[Callable[[Progress], None]] = []
        self._guard = threading.Lock()
        self._warned = False

    def load(self) -> Progress:
        """What the file holds, with this process's unwritten changes. Never raises: says in one line what was wrong."""
        with self._guard:
            try:
                try:
                    progress = read(self.path)
                except ValueError:
                    with self._lock():
                        progress = self._read_or_set_aside()
            except OSError as error:
                self._warn(error)
                progress = Progress()
            for change in self._pending:
                change(progress)
            return progress

    def update(self, change: Callable[[Progress], None]) -> None:
        """Read, `change(progress)`, write back, as one step among all processes. Keeps the change where that fails."""
        with self._guard:
            self._pending.append(change)
            try:
                with self._lock():
                    progress = self._read_or_set_aside()
                    for pending in self._pending:
                        pending(progress)
                    self._write(progress.to_json())
            except OSError as error:
                self._warn(error)
            except BaseException:
                self._pending.pop()
                raise
            else:
                self._pending.clear()

    def _lock(self) -> FileLock:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileLock(self.path.with_name("progress.lock"), timeout=LOCK_SECONDS, mode=0o600)

    def _read_or_set_aside(self) -> Progress:
        try:
            return read(self.path)
        except ValueError as error:
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            copy = self.path.with_name(f"progress.damaged-{now}.json")
            os.replace(self.path, copy)
            _say(f"Your progress file was damaged ({str(error)[:200]}); it is now {copy}, and a new one begins.")
            return Progress()

    def _write(self, text: str) -> None:
        if len(text.encode("utf-8")) > MAX_BYTES:
            raise OSError(f"it would grow above {MAX_BYTES:,} bytes")
        write_atomically(self.path, text, durable=True, mode=0o600)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _say(
                f"Your progress cannot be kept in {self.path} ({error}); this notebook goes on with it in memory. "
                "To keep it, set BEYOND_ONE_GPU_HOME to a folder that you can write."
            )


def _say(line: str) -> None:
    print(" ".join(line.split()), file=sys.stderr)


@cache
def _store(path: Path) -> Store:
    return Store(path)


def load() -> Progress:
    """This learner's progress, with what this process could not write."""
    return _store(progress_path()).load()


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_exercise(lab: str, exercise: str, *, passed: bool, seconds: float, message: str = "") -> None:
    """Count one try of `lab`'s `exercise` that took `seconds` s; a pass stays a pass whatever comes after."""
    when, message = now(), message[:500]

    def change(progress: Progress) -> None:
        records = progress.labs.setdefault(lab, {})
        record = records.setdefault(exercise, ExerciseRecord(status="not yet", tries=0, first_tried=when))
        if record.status == "passed":
            return
        record.tries += 1
        record.seconds, record.message = round(float(seconds), 3), message
        if passed:
            record.status, record.first_passed = "passed", when

    _store(progress_path()).update(change)


def record_guess(lesson: str, question: str, record: GuessRecord | None) -> GuessRecord | None:
    """Keep what was guessed, or forget it (None: an emptied box); returns what is kept now.

    A guess whose measurement was seen stays as it is, in whichever notebook that was; one in another unit does not count.
    """
    wanted = replace(record, when=now()) if record else None
    kept = wanted

    def change(progress: Progress) -> None:
        nonlocal kept
        guesses = progress.guesses.setdefault(lesson, {})
        old = guesses.get(question)
        kept = old if old and old.measured is not None and wanted and old.unit == wanted.unit else wanted
        guesses.pop(question, None)
        if kept:
            guesses[question] = replace(kept)

    _store(progress_path()).update(change)
    return kept
