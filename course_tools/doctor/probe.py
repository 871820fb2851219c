"""Run code in a Python process of its own: a package that hangs, crashes or prints on import harms nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from course_tools.doctor.findings import PROBLEM, Finding

SECONDS = 14.0


@dataclass(frozen=True)
class Answer:
    """`values`: what the process printed last, as JSON. `failed`: why there is nothing, in words; empty otherwise.

    `slow`: it failed only by not answering in time, which says more about the machine than about the code.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    slow: bool = False

    def finding(self, about: str, means: str, mend: str) -> Finding:
        """Return the finding of a probe that failed; after a slow one, only that nothing is known yet."""
        if self.slow:
            means = "Whether it works here is not known: the machine is busy with something else, or its disk is slow."
            mend = "Ask again when it is quieter: beyond doctor"
        return Finding(PROBLEM, about, self.failed, means, mend)


def probe(code: str, *, seconds: float | None = None, **environment: str) -> Answer:
    """Run `code` in this Python, in a process group of its own, and read the JSON that it prints last.

    Args:
        code: ends by printing one line of JSON, a mapping.
        seconds: after which it is killed, with all that it started; None for SECONDS.
        environment: variables to add.
    """
    seconds = SECONDS if seconds is None else seconds
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
        return Answer(failed=f"it did not answer within {seconds:.0f} seconds", slow=True)
    if process.returncode < 0:
        return Answer(failed=f"the process died of {signal.Signals(-process.returncode).name}")
    lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
    if process.returncode:
        return Answer(failed=lines[-1] if lines else f"the process ended with exit code {process.returncode}")
    try:
        return Answer(json.loads(out.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return Answer(failed="it printed nothing that can be read")
