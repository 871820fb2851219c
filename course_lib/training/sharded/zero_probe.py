"""Imported in the server that ranks are forked from: DeepSpeed asks the compiler once what it could build, for all."""

from deepspeed.ops import __compatible_ops__ as compatible_ops

__all__ = ["compatible_ops"]
