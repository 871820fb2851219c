"""The planner: which way to train a model on given machines, from arithmetic alone. Nothing here needs torch.

>>> answer = plan("llama-3.1-8b", "2x24GiB", global_batch=16, seq_len=2048)
>>> print(answer.best)
"""

from course_lib.planner.answer import Answer, Grid, NoPlan, Plan, Refusal, Settings
from course_lib.planner.constants import CONSTANTS, Constants
from course_lib.planner.costs import MFU_DEFINITION
from course_lib.planner.judging import Verdict, check_settings
from course_lib.planner.machines import Machines, machines
from course_lib.planner.procedure import Procedure, procedure
from course_lib.planner.search import plan

__all__ = [
    "CONSTANTS", "MFU_DEFINITION", "Answer", "Constants", "Grid", "Machines", "NoPlan", "Plan", "Procedure", "Refusal",
    "Settings", "Verdict", "check_settings", "machines", "plan", "procedure",
]  # fmt: skip
