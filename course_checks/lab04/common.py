"""What the checks of lab 4 share: the lab itself, tolerances, and reading a run's collectives."""

from __future__ import annotations

from course_checks.harness import Lab

lab = Lab("04_ddp_accelerate", title="DDP with Accelerate")
