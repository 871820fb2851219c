"""Find out what this machine can run of the course before a lesson does: ``beyond doctor``.

Importing this needs only the standard library and Python 3.8: it must be able to say that Python is too old, or that
PyTorch is missing.
"""

from course_tools.doctor.examining import examine
from course_tools.doctor.findings import Finding

__all__ = ["Finding", "examine"]
