"""Lab 7 itself; an exercise registers with it."""

from __future__ import annotations

from course_checks.harness import Lab

lab = Lab("07_axolotl", title="Axolotl, saving, resuming")
