"""Models that the case studies need beside the presets of `course_lib.memory`."""

from __future__ import annotations

import difflib
from typing import Any

from course_lib.memory import PRESETS, Shape, shape_of
from course_lib.memory.shapes import gpt

# LLM-jp-13B v1.0: a GPT-2 of 40 layers, as its config.json on the Hugging Face hub has it; the vocabulary of 50,570 is
# padded to a multiple of 128, as Megatron-DeepSpeed trained it. MT-NLG's little sister of 22B: table 3 of arXiv:2205.05198.
MODELS: dict[str, Shape] = {
    "llm-jp-13b": gpt(40, 5120, 40, 50688, 2048, "llm-jp-13b"),
    "korthikanti-22b": gpt(48, 6144, 64, 51200, 2048, "korthikanti-22b"),
}
ALSO = {"llm-jp-13b-v1.0": "llm-jp-13b", "gpt-3": "gpt3-175b", "gpt-3-175b": "gpt3-175b", "megatron-1t": "megatron-1008b",
        "gpt-1t": "megatron-1008b"}  # fmt: skip


def model_shape(model: Any) -> Shape:
    """As `course_lib.memory.shape_of`, with the names of this module.

    Raises:
        ValueError: a name that nobody knows (the nearest are offered), or something that has no widths.
    """
    if not isinstance(model, str):
        return shape_of(model)
    name = model.strip().lower().rpartition("/")[2]
    name = ALSO.get(name, name)
    if name in MODELS:
        return MODELS[name]
    try:
        return shape_of(name)
    except ValueError:
        near = difflib.get_close_matches(name, [*PRESETS, *MODELS, *ALSO], 3, 0.4) or ["llama-3.1-8b", "qwen3-0.6b"]
        raise ValueError(
            f"No model is called {model!r}: the nearest are {', '.join(near)}. Widths or a configuration will do too."
        ) from None
