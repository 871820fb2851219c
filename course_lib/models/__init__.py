"""The models and texts that the course trains on: a tiny Llama, SmolLM2 from a Python package, and the hub's models."""

from course_lib.models.loading import (
    INSTALL,
    ModelNotAvailable,
    byte_tokenizer,
    llama,
    load,
    no_progress_bars,
    smollm2,
    tiny_llama,
)

__all__ = [
    "INSTALL",
    "ModelNotAvailable",
    "byte_tokenizer",
    "llama",
    "load",
    "no_progress_bars",
    "smollm2",
    "tiny_llama",
]
