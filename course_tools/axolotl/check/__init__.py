"""An Axolotl YAML, read before it costs a GPU-hour: what it amounts to, and every mistake in it. No PyTorch needed."""

from course_tools.axolotl.check.checking import check
from course_tools.axolotl.check.findings import Finding
from course_tools.axolotl.check.gpus import Cluster, cluster
from course_tools.axolotl.check.report import Report
from course_tools.axolotl.check.yaml_lines import Document, read_yaml

__all__ = ["Cluster", "Document", "Finding", "Report", "check", "cluster", "read_yaml"]
