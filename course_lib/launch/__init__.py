"""Start real ranks from a notebook cell.

>>> run = launch(train_step, ranks=4, timeout=60, lr=3e-4)
>>> run.results[2]       # what rank 2 returned
>>> run.collectives      # every collective: rank, kind, bytes, seconds
"""

from course_lib.launch.agent import warm, warm_on_cpu
from course_lib.launch.failures import RankFailed, RanksHung
from course_lib.launch.group import process_group, rank_device
from course_lib.launch.run import Run, launch

__all__ = ["RankFailed", "RanksHung", "Run", "launch", "process_group", "rank_device", "warm", "warm_on_cpu"]
