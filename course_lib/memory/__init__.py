"""The arithmetic of GPU memory: what a training step needs, from the model's widths. Pure functions, no PyTorch."""

from course_lib.memory.breakdown import Breakdown
from course_lib.memory.cards import CARDS, Card, card
from course_lib.memory.estimate import estimate
from course_lib.memory.presets import PRESETS
from course_lib.memory.shapes import Shape, shape_of

__all__ = ["CARDS", "PRESETS", "Breakdown", "Card", "Shape", "card", "estimate", "shape_of"]
