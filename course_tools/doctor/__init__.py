"""What this machine can do for the course, found out before a lesson does: ``beyond doctor``.

Everything here runs on a bare Python from 3.8 on: it has to say that a Python is too old, or that PyTorch is missing or
broken, so it imports nothing of the kind. What may hang or crash is asked of a process of its own (`asking`).
"""

from course_tools.doctor.examining import examine
from course_tools.doctor.findings import Finding

__all__ = ["Finding", "examine"]
