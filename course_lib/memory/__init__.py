"""The arithmetic of GPU memory: what a training step needs, from the model's widths. Pure functions, no PyTorch."""

from course_lib.memory.breakdown import Breakdown
from course_lib.memory.cards import CARDS, Card, card
from course_lib.memory.compute import flops_per_token
from course_lib.memory.estimate import estimate
from course_lib.memory.fitting import largest_micro_batch, longest_sequence
from course_lib.memory.host import Host, host_memory
from course_lib.memory.presets import PRESETS, shape_of
from course_lib.memory.shapes import Shape
from course_lib.memory.sharded import resident_bytes
from course_lib.memory.states import state_bytes

__all__ = [
    "CARDS",
    "PRESETS",
    "Breakdown",
    "Card",
    "Host",
    "Shape",
    "card",
    "estimate",
    "flops_per_token",
    "host_memory",
    "largest_micro_batch",
    "longest_sequence",
    "resident_bytes",
    "shape_of",
    "state_bytes",
]
