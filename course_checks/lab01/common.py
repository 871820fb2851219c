"""Lab 1 itself."""

from course_checks.harness import Lab

lab = Lab("01_gpu_memory", title="Out of memory")
