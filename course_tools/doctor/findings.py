"""A finding of the doctor: what was looked at, how it is, what that means for which lesson, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """A sentence about this machine.

    Attributes:
        level: "ok"; "note": the lessons run, something differs; "problem": something will not run.
        about: what was looked at, two words.
        says: what was found.
        means: what that is for which lesson; empty if nothing follows from it.
        mend: what to type or to do; empty if there is nothing to fix.
    """

    level: str
    about: str
    says: str
    means: str = ""
    mend: str = ""
