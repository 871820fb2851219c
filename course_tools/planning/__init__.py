"""The planner: which way to train a model on given machines, from arithmetic alone. Nothing here needs torch.

>>> answer = plan("llama-3.1-8b", "2x24GiB", seq_len=2048)
>>> print(answer.best)
"""

from course_tools.planning.answer import Answer, Grid, NoPlan, Plan, Refusal, Settings
from course_tools.planning.constants import CONSTANTS, HALF_WITHIN, HELD_OUT, NINE_OF_TEN_WITHIN, Constants
from course_tools.planning.costs import MFU_DEFINITION
from course_tools.planning.judging import Verdict, check_settings
from course_tools.planning.machines import Machines, machines
from course_tools.planning.planner import plan
from course_tools.planning.procedure import Procedure, procedure

__all__ = [
    "CONSTANTS",
    "HALF_WITHIN",
    "HELD_OUT",
    "MFU_DEFINITION",
    "NINE_OF_TEN_WITHIN",
    "Answer",
    "Constants",
    "Grid",
    "Machines",
    "NoPlan",
    "Plan",
    "Procedure",
    "Refusal",
    "Settings",
    "Verdict",
    "check_settings",
    "machines",
    "plan",
    "procedure",
]
