"""What the checks of lab 7 share: the lab itself, and how long one launch may take."""

from __future__ import annotations

from course_checks.harness import Lab

lab = Lab("07_axolotl", title="Axolotl, tracking, resuming")

# seconds for one launch; Axolotl's imports alone take ten on a quiet machine, and three times that on a busy one
TIMEOUT, AXOLOTL_TIMEOUT = 60.0, 150.0
