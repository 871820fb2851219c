"""An Axolotl YAML, read before it costs a GPU-hour: what it amounts to, and every mistake in it. No PyTorch needed."""

from course_lib.axolotl_check.checking import check
from course_lib.axolotl_check.findings import Finding
from course_lib.axolotl_check.gpus import Cluster, cluster
from course_lib.axolotl_check.report import Report
from course_lib.axolotl_check.yaml_lines import Document, read_yaml

__all__ = ["Cluster", "Document", "Finding", "Report", "check", "cluster", "read_yaml"]
