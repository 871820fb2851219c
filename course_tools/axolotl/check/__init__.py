"""An Axolotl YAML, read before it costs a GPU-hour: what it amounts to, and every mistake in it. No PyTorch needed."""

from course_tools.axolotl.check.checking import check
from course_tools.axolotl.check.document import Document, read_yaml
from course_tools.axolotl.check.findings import Finding
from course_tools.axolotl.check.report import Report

__all__ = ["Document", "Finding", "Report", "check", "read_yaml"]
