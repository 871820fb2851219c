"""Turn what the ranks left behind into one report that names the rank, the line and who waited for whom."""

from __future__ import annotations

import glob
import json
import linecache
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.launch.checkout import CHECKOUT
from course_lib.launch.output import ranks_in_words
from course_lib.launch.rank import Failure
from course_lib.observe.collectives import UNTOLD, Pulse, Reading

_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(key)) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")
)
_ROOT = os.path.realpath(CHECKOUT) + os.sep
_COURSE = tuple(_ROOT + package + os.sep for package in ("course_lib", "course_tools", "course_checks", "classroom"))
_MACHINERY = tuple(_ROOT + room for room in ("course_lib/launch", "course_lib/observe", "course_checks"))
_STACK_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_STACK_HEADER = re.compile(r"^\[ranks? [^]]*\] (Extension modules: |(Current t|T)hread 0x)")
SHOWN = 10  # lines of output in the report of a launch that showed none


class LaunchError(Exception):
    """A report made to be read: a notebook shows it instead of a stack through the launcher."""

    def _render_traceback_(self) -> list[str]:  # IPython's hook
        return [f"{type(self).__name__}: {self}"]

    def show_output(self, lines: Iterable[str]) -> None:
        """Put the last lines of a launch that showed none into the report; of a stack only lines of the learner's."""
        found = ((line, _STACK_LINE.search(line)) for line in lines if not _STACK_HEADER.search(line))
        shown = [line for line, call in found if call is None or nearest_line([(call["file"], 0, "")])]
        if shown:
            self.args = ("\n".join([str(self), "", "The last lines that the ranks printed:", *shown[-SHOWN:]]),)


class RankFailed(LaunchError, RuntimeError):
    """A rank raised, or died.

    Attributes:
        rank: the rank that failed first for a reason of its own.
        cause_type: class name of what it raised (``"ZeroDivisionError"``), or the signal that ended it (``"SIGKILL"``).
        cause_message: the exception's own text.
        where: the learner's line, ``"cell [7], line 3: `x = y / 0`"``; empty when no line of the learner's took part.
    """

    def __init__(self, report: str, rank: int, cause_type: str, cause_message: str, where: str) -> None:
        super().__init__(report)
        self.rank, self.cause_type, self.cause_message, self.where = rank, cause_type, cause_message, where

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.rank, self.cause_type, self.cause_message, self.where)


class RanksHung(LaunchError, TimeoutError):
    """The ranks did not finish in time; the message says who waits where for whom."""


def is_learners(path: str) -> bool:
    """True for a notebook cell or a file that belongs to neither Python, nor a package, nor the course."""
    if path.startswith("<") and not path.startswith(("<cell", "<ipython")):
        return False
    real = os.path.realpath(path)
    return not real.startswith((*_LIBRARIES, *_COURSE)) and "site-packages" not in real


def place(path: str, line: int) -> str:
    """``cell [7], line 3: `x = y / 0` `` for a cell, ``train.py, line 3: …`` for a file."""
    name = os.path.basename(path)
    if "ipykernel_" in path or path.startswith("<"):
        number = _cell_number(path)
        name = f"cell [{number}]" if number else "your cell"
    linecache.checkcache(path)  # a script may have been edited since it was last read
    source = linecache.getline(path, line).strip()
    return f"{name}, line {line}" + (f": `{source}`" if source else "")


def _cell_number(path: str) -> int | None:
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return getattr(shell.compile, "_filename_map", {}).get(path) if shell is not None else None


def own_line(frames: list[tuple[str, int, str]]) -> tuple[str, int] | None:
    """The innermost frame (frames: outermost first) that the learner wrote."""
    return next(((path, line) for path, line, _ in reversed(frames) if is_learners(path)), None)


def nearest_line(frames: list[tuple[str, int, str]]) -> tuple[str, int] | None:
    """The learner's innermost line, else the innermost line of one of the course's training programs."""
    course = (
        (path, line)
        for path, line, _ in reversed(frames)
        if os.path.realpath(path).startswith(_COURSE) and not os.path.realpath(path).startswith(_MACHINERY)
    )
    return own_line(frames) or next(course, None)


# ---------------------------------------------------------------------------------------------- a rank that failed
def read_failures(folder: str) -> list[Failure]:
    """What ranks wrote before they ended, in the order in which they wrote it."""
    failures = []
    for path in sorted(glob.glob(f"{folder}/error*"), key=lambda p: os.stat(p).st_mtime_ns):
        with open(path) as file:
            failures.append(Failure(**json.load(file)))
    return failures


def failed(folder: str, ranks: int, exit_codes: dict[int, int]) -> Exception:
    """The exception for a launch in which not every rank returned.

    A rank that raised for a reason of its own comes before one that lost a peer; a rank that a signal ended comes
    before both kinds of the latter.
    """
    failures = read_failures(folder)
    own = [f for f in failures if not f.lost_peer]
    reported = {f.rank for f in failures}
    killed = {r: code for r, code in exit_codes.items() if r not in reported and not _has_result(folder, r)}
    if own:
        return _raised(folder, ranks, own[0])
    if killed:
        rank, code = next(iter(killed.items()))
        return _died(folder, ranks, rank, code)
    if failures:
        return _left_alone(folder, ranks, failures)
    return RankFailed(f"The agent ended without a result; exit codes by rank: {exit_codes}.", 0, "unknown", "", "")


def _raised(folder: str, ranks: int, failure: Failure) -> Exception:
    if failure.kind == "result":
        return TypeError(
            f"rank {failure.rank} returned a {failure.type} that cannot travel back to the notebook "
            f"({failure.message}). Return plain values or tensors: numbers, lists, dicts, a state_dict()."
        )
    own, nearest = own_line(failure.frames), nearest_line(failure.frames)
    lines = [f"rank {failure.rank} raised {failure.type}: {failure.message}"]
    if failure.kind == "arrival":
        lines = [f"rank {failure.rank} could not load your function: {failure.type}: {failure.message}"]
    if nearest:
        lines.append(f"    at {place(*nearest)}")
    lines += _taken_down(folder, ranks, failure.rank)
    lines += ["", _short_traceback(failure)]
    where = place(*own) if own else ""
    return RankFailed("\n".join(lines), failure.rank, failure.type, failure.message, where)


def _died(folder: str, ranks: int, rank: int, code: int) -> RankFailed:
    if code < 0:
        name = signal.Signals(-code).name
        why = {
            "SIGKILL": " (most often the system ran out of memory and chose this process)",
            "SIGSEGV": " (a crash in compiled code; its stack is in what it printed)",
            "SIGABRT": " (compiled code gave up; its reason is in what it printed)",
        }.get(name, "")
        text, kind = f"rank {rank} was ended by {name}{why}", name
    else:
        text, kind = f"rank {rank} ended itself with exit code {code} before it returned", "SystemExit"
    return RankFailed("\n".join([text, *_taken_down(folder, ranks, rank)]), rank, kind, text, "")


def _left_alone(folder: str, ranks: int, failures: list[Failure]) -> RankFailed:
    """Every failure is a lost peer: somebody returned while others were still in a collective."""
    first = failures[0]
    gone = [r for r in range(ranks) if _has_result(folder, r)]
    kind = _pulse(folder, first.rank).kind or "a collective"
    own, nearest = own_line(first.frames), nearest_line(first.frames)
    at = f" ({place(*nearest)})" if nearest else ""
    waiting = ranks_in_words(f.rank for f in failures)
    text = f"{waiting} waited in {kind}{at}"
    if gone:
        text += f"; {ranks_in_words(gone)} never got there: the function had already returned. Every rank must make "
        text += "the same collective calls in the same order."
    else:
        text += f" and lost the connection: {first.message}"
    text = "\n".join([text, *_mismatch(folder, ranks)])
    return RankFailed(text, first.rank, first.type, first.message, place(*own) if own else "")


def _taken_down(folder: str, ranks: int, cause: int) -> list[str]:
    victims = [r for r in range(ranks) if r != cause and not _has_result(folder, r)]
    if not victims:
        return []
    waiting: dict[str, list[int]] = {}
    for rank in victims:
        pulse = _pulse(folder, rank)
        waiting.setdefault(f"waiting in {pulse.kind}" if pulse.begun > pulse.ended else "at work", []).append(rank)
    parts = [f"{ranks_in_words(group)} ({state})" for state, group in waiting.items()]
    return ["It took down " + " and ".join(parts) + ".", *_mismatch(folder, ranks)]


def _short_traceback(failure: Failure) -> str:
    """The traceback from the first line on that the learner (or a training program) wrote."""
    keep = [i for i, (path, _, _) in enumerate(failure.frames) if nearest_line([failure.frames[i]])]
    frames = failure.frames[keep[0] :] if keep else failure.frames
    lines = [f"Traceback of rank {failure.rank}, outermost call first:"]
    for path, line, function in frames:
        source = linecache.getline(path, line).strip()
        lines.append(f'  File "{path}", line {line}, in {function}')
        if source:
            lines.append(f"    {source}")
    return "\n".join([*lines, f"{failure.type}: {failure.message}"])


def _has_result(folder: str, rank: int) -> bool:
    return os.path.exists(f"{folder}/result{rank}")


def _pulse(folder: str, rank: int) -> Reading:
    path = f"{folder}/pulse{rank}"
    return Pulse.read(path) if os.path.exists(path) and os.path.getsize(path) else Reading()


def _mismatch(folder: str, ranks: int, *, kinds: bool = True) -> list[str]:
    """A sentence when ranks differ in the size or, with `kinds`, in the kind of the same call of the same group."""
    calls: dict[tuple[int, int], dict[int, Reading]] = {}
    for rank in range(ranks):
        pulse = _pulse(folder, rank)
        if pulse.number:
            calls.setdefault((pulse.group, pulse.number), {})[rank] = pulse
    for call in calls.values():
        first = min(call.items())[1]
        what, said = "different collectives, where all must call one", {r: p.kind for r, p in call.items()}
        differ = kinds and len(set(said.values())) > 1
        if not differ and first.same_size and {p.kind for p in call.values()} == {first.kind}:
            what = f"{first.kind} with different shapes or dtypes"
            said = {r: f"{p.shapes} of {p.bytes:,} bytes" for r, p in call.items()}
            differ = len({p.bytes for p in call.values()}) > 1  # shapes alone may differ: what travels is numbers
        if differ:
            by_rank = (f"{ranks_in_words(r for r in said if said[r] == s)} {s}" for s in dict.fromkeys(said.values()))
            return [f"Ranks called {what}: {', '.join(by_rank)}."]
    return []


# ------------------------------------------------------------------------------------------------- ranks that hang
@dataclass
class _Stuck:
    rank: int
    waits_in: str  # kind of collective, or "" when it is not in one
    at: str


def hung(folder: str, ranks: int, timeout: float) -> RanksHung:
    """The report for a launch that ran into its timeout; the ranks' stacks have been written to the folder."""
    stuck = [_read_stuck(folder, rank) for rank in range(ranks) if not _has_result(folder, rank)]
    returned = [rank for rank in range(ranks) if _has_result(folder, rank)]
    waiting: dict[tuple[str, str], list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    for rank in stuck:
        if rank.waits_in:
            waiting.setdefault((rank.waits_in, rank.at), []).append(rank.rank)
        else:
            elsewhere.setdefault(rank.at, []).append(rank.rank)
    sentences = [
        f"{ranks_in_words(group)} {_verb(group, 'wait')} in {kind} ({at})" for (kind, at), group in waiting.items()
    ]
    for at, group in elsewhere.items():
        never = "never got there: it is" if len(group) == 1 else "never got there: they are"
        sentences.append(f"{ranks_in_words(group)} {never if waiting else 'is' if len(group) == 1 else 'are'} in {at}")
    if returned:
        never = "never got there: the function has returned" if waiting else "already returned"
        sentences.append(f"{ranks_in_words(returned)} {never}")
    report = f"no result after {timeout:g} s. " + ";\n".join(sentences) + "."
    return RanksHung("\n".join([report, *_mismatch(folder, ranks, kinds=False)]))


def _verb(group: list[int], verb: str) -> str:
    return verb + ("s" if len(group) == 1 else "")


def _read_stuck(folder: str, rank: int) -> _Stuck:
    path = f"{folder}/stack{rank}"
    text = open(path).read() if os.path.exists(path) else ""
    # faulthandler writes the innermost call first
    frames = [(m["file"], int(m["line"]), m["function"]) for m in _STACK_LINE.finditer(text)][::-1]
    pulse = _pulse(folder, rank)
    in_torch = any(os.sep + os.path.join("torch", "distributed") + os.sep in path for path, _, _ in frames)
    in_backward = any(path.endswith(os.path.join("torch", "autograd", "graph.py")) for path, _, _ in frames)
    waits = pulse.kind if pulse.begun > pulse.ended or (in_torch and pulse.kind in UNTOLD) else ""
    if waits and in_backward:
        waits += ", inside backward()"
    line = nearest_line(frames)
    at = place(*line) if line else "a library, with no line of yours on the stack" if frames else "its start-up"
    return _Stuck(rank, waits, at)
