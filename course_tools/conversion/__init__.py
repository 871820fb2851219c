"""Convert checkpoints between Hugging Face and TP×PP training, bit for bit, in both directions.

>>> split("llama-hf", "llama-tp2-pp2", tp=2, pp=2, layout="megatron")   # Hugging Face folder -> shards
>>> merge("llama-tp2-pp2", "llama-again")                               # and back; `seal` first, where training wrote them
>>> shards = split_state(model.state_dict(), model.config, tp=2, pp=2)  # the same on tensors: {(tp rank, stage): state}
>>> model.load_state_dict(merge_state(shards, model.config, layout="hugging_face"))

Llama, Qwen2 and Qwen3, with grouped queries and tied embeddings. ``pieces`` says what each shard is made of, in the
two layouts; everything else follows from that. ``beyond convert split|merge|seal`` does it from a shell.
"""

from course_tools.conversion.architecture import Architecture
from course_tools.conversion.folders import merge, seal, split
from course_tools.conversion.pieces import LAYOUTS, Piece, pieces
from course_tools.conversion.tensors import join, merge_state, separate, split_state

__all__ = [
    "LAYOUTS",
    "Architecture",
    "Piece",
    "join",
    "merge",
    "merge_state",
    "pieces",
    "seal",
    "separate",
    "split",
    "split_state",
]
