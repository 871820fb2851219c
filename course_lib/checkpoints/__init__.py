"""Checkpoints that outlive the cluster's shape: saved at 4 ranks, loaded at 1, 2 or 3, whole or not there.

>>> save("runs/tiny", step, model=model, optimizer=optimizer, extra={"seed": 0})   # on every rank; engine=… for DeepSpeed
>>> extra = load("runs/tiny", model=model, optimizer=optimizer)                     # the newest whole one
>>> to_hugging_face("runs/tiny", "tiny-hf", model.config)                           # one process, for from_pretrained
"""

from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.folder import Found, latest, survey
from course_lib.checkpoints.hugging_face import to_hugging_face, weights
from course_lib.checkpoints.loading import load
from course_lib.checkpoints.manifest import Manifest
from course_lib.checkpoints.saving import save, save_async
from course_lib.checkpoints.wholeness import verify

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
