"""Find out what this machine can run of the course before a lesson does: ``beyond doctor``.

Everything here runs on a bare Python from 3.8 on, because it has to say that Python is too old, or that PyTorch is
missing or broken. What may hang or crash runs in a process of its own (`probe`).
"""

from course_tools.doctor.examining import examine
from course_tools.doctor.findings import Finding

__all__ = ["Finding", "examine"]
