"""A finding of the doctor, and how it tries what may hang or crash: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
SECONDS = 14.0  # for one import


@dataclass(frozen=True)
class Finding:
    """A sentence about this machine."""

    level: str  # OK; NOTE: the lessons run, something differs; PROBLEM: something will not run
    about: str  # what was looked at, two words
    says: str  # what was found
    means: str = ""  # what follows for which lesson
    mend: str = ""  # what to type or to do


@dataclass(frozen=True)
class Answer:
    """What a process printed last, or why it printed nothing."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    slow: bool = False  # no answer in time: that says more about the machine than about the code

    def finding(self, about: str, means: str, mend: str) -> Finding:
        """Return the finding of a process that failed."""
        if self.slow:
            means, mend = "Whether it works is not known: the machine is busy, or its disk slow.", "Ask again later."
        return Finding(PROBLEM, about, self.failed, means, mend)


def probe(code: str, *, seconds: float | None = None, **environment: str) -> Answer:
    """Run `code` in this Python, in a process group of its own, and read the JSON object that it prints last.

    After `seconds` (by default SECONDS) it is killed, with all that it started. `environment` has variables to add.
    """
    seconds = seconds or SECONDS
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Answer(failed=f"no answer within {seconds:.0f} seconds", slow=True)
    if process.returncode < 0:
        return Answer(failed=f"the process died of {signal.Signals(-process.returncode).name}")
    if process.returncode:
        lines = (err or out).split("\n")
        return Answer(failed=next((line for line in reversed(lines) if line.strip()), f"code {process.returncode}"))
    try:
        return Answer(json.loads(out.strip().split("\n")[-1]))
    except ValueError:
        return Answer(failed="it printed nothing that can be read")
