"""Imported once by the server that ranks are forked from: DeepSpeed then asks the compiler what it could build only once."""

from deepspeed.ops import __compatible_ops__ as compatible_ops

__all__ = ["compatible_ops"]
