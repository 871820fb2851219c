"""A plan of `course_tools.planning` as the files that run it: Accelerate, DeepSpeed, FSDP2, Axolotl. No PyTorch.

>>> best = plan("llama-3.1-8b", "2x24GiB", global_batch=16, seq_len=2048).plans[0]
>>> targets_of(best)
>>> write(best, "axolotl", "run")     # then: axolotl train run/axolotl.yml ...
"""

from course_tools.planning.files.writing import TARGETS, files, targets_of, why_not, write

__all__ = ["TARGETS", "files", "targets_of", "why_not", "write"]
