"""Checkpoints of sharded training: save at 4 ranks, load at 1, 2 or 3.

>>> save("runs/tiny", step, model=model, optimizer=optimizer, extra={"seed": 0})   # on every rank
>>> extra = load("runs/tiny", model=model, optimizer=optimizer)                     # the newest complete one
>>> to_hugging_face("runs/tiny", "tiny-hf", model.config)                           # one process, for from_pretrained

A checkpoint is complete or not there, whenever a save is killed, and damage is noticed by its checksums. Damage, not
malice: load only checkpoints that you trust, for DCP unpickles its own metadata.
"""

from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.folder import Found, latest, survey
from course_lib.checkpoints.hugging_face import to_hugging_face, weights
from course_lib.checkpoints.loading import load
from course_lib.checkpoints.manifest import Manifest, verify
from course_lib.checkpoints.saving import save, save_async

__all__ = [
    "CheckpointError",
    "Found",
    "Manifest",
    "latest",
    "load",
    "save",
    "save_async",
    "survey",
    "to_hugging_face",
    "verify",
    "weights",
]
