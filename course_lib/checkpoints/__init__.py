"""Checkpoints of training on many ranks: save at 4 ranks, load at 1, 2 or 3.

>>> save("runs/tiny", step, model=model, optimizer=optimizer, extra={"seed": 0})   # on every rank
>>> extra = load("runs/tiny", model=model, optimizer=optimizer)                     # the newest complete one

A checkpoint is complete or not there, whenever a save is killed, and its checksums show damage before the model is
touched. Damage, not malice: load only checkpoints that you trust, for DCP unpickles its own metadata.
"""

from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.folder import latest
from course_lib.checkpoints.saving import load, save

__all__ = ["CheckpointError", "latest", "load", "save"]
