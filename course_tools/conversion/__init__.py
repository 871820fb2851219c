"""Convert checkpoints between Hugging Face and TP×PP training, bit for bit, in both directions.

>>> split("llama-hf", "llama-tp2-pp2", tp=2, pp=2, layout="megatron")   # Hugging Face folder -> shards
>>> merge("llama-tp2-pp2", "llama-again")                               # and back, also from what Megatron saved
>>> shards = split_state(model.state_dict(), model.config, tp=2, pp=2)  # the same on tensors: {(tp rank, stage): state}
>>> model.load_state_dict(merge_state(shards, model.config, layout="hugging_face"))

Every model with Llama's tensors, whatever it is called. ``pieces`` says what each shard is made of; everything else
follows from that. Tensors only get other names and places: what a model computes with them (Granite's factors, Gemma's
scaled embedding) is up to the settings of the program that trains it. ``beyond convert split|merge`` does it from a shell.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from course_tools.conversion.pieces import LAYOUTS

if TYPE_CHECKING:
    from course_tools.conversion.folders import merge, split
    from course_tools.conversion.tensors import merge_state, split_state

__all__ = ["LAYOUTS", "merge", "merge_state", "split", "split_state"]


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch when it is first used, so that ``beyond convert --help`` does not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "tensors" if name.endswith("_state") else "folders"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
