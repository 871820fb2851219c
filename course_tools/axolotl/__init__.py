"""Axolotl from a notebook: one base YAML, small overlays, its own trainer on real ranks, and what each rank held.

>>> make_inputs("runs/axolotl")                                   # a tiny model and real text, nothing downloaded
>>> run = train(merged("base.yml", "fsdp2.yml"), ranks=2)
>>> run.losses, run.witness[0]["wrapper"], run.witness[0]["local_elements"]
"""

from course_tools.axolotl.inputs import make_inputs
from course_tools.axolotl.overlays import laid_over, merged, write
from course_tools.axolotl.running import AxolotlRun, preprocess, train, warm_axolotl

__all__ = [
    "AxolotlRun",
    "laid_over",
    "make_inputs",
    "merged",
    "preprocess",
    "train",
    "warm_axolotl",
    "write",
]
