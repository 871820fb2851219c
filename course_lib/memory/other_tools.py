"""What other estimators answer, and what each of them leaves out: replays of their published formulas, in bytes."""

from __future__ import annotations

from typing import Any

from course_lib.memory.presets import shape_of
from course_lib.memory.shapes import Shape
from course_lib.validation import pick, positive


def deepspeed_zero2_bytes(parameters: int, gpus: int, *, offload: bool = False, documentation: bool = False) -> int:
    """Bytes a GPU by DeepSpeed's `estimate_zero2_model_states_mem_needs`: 2P + 18P/N, with offload 2P.

    `documentation`: 4P + 16P/N, which its page on memory still showed after the code had changed (2024): gradients whole on
    every GPU there, partitioned and in fp32 as well in the code.

    Left out: activations and logits, the two buckets of 500 million elements (`reduce_bucket_size`,
    `allgather_bucket_size`), the CUDA context, what the allocator cannot use again. With offload also the gradients, which
    pass through the GPU on their way to the host.

    Source: deepspeed/runtime/zero/stage_1_and_2.py and docs/code-docs/source/memory.rst.
    """
    positive(parameters=parameters, gpus=gpus)
    if offload:
        return int(2 * parameters)
    if documentation:
        return int(4 * parameters + 16 * parameters / gpus)
    return int(2 * parameters + 18 * parameters / gpus)


def deepspeed_zero3_bytes(parameters: int, largest: int, gpus: int, *, offload: str = "none") -> int:
    """Bytes a GPU by DeepSpeed's `estimate_zero3_model_states_mem_needs`: 4 x largest + 18P/N.

    Args:
        parameters: P, of the whole model. gpus: N.
        largest: parameters of the module that owns the most by itself: in a language model the embedding, or one matrix of
            an MLP.
        offload: "optimizer", states and gradients on the host: 4 x largest + 2P/N; "all": 4 x largest.

    Left out: activations and logits; parameters gathered ahead and not yet let go (`stage3_prefetch_bucket_size`, and
    `stage3_max_live_parameters`, which lets a billion stay); the reduce bucket; the CUDA context; waste. So it answers
    0.12 GiB for a model of 2.85 billion parameters, whatever the batch.

    Source: deepspeed/runtime/zero/stage3.py.
    """
    positive(parameters=parameters, largest=largest, gpus=gpus)
    pick("offload", offload, ("none", "optimizer", "all"))
    share = {"none": 18, "optimizer": 2, "all": 0}[offload]
    return int(4 * largest + int(share * parameters / gpus))


def deepspeed_largest(model: str | Shape | Any) -> int:
    """The `largest` that DeepSpeed reads off a model: parameters of the module that owns the most by itself."""
    shape = shape_of(model)
    return max(shape.vocab * shape.hidden, *(rows * columns for rows, columns in shape.block_matrices.values()))


# accelerate: share of the fp32 size
_ACCELERATE = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}


def accelerate_inference_bytes(model: str | Shape | Any, dtype: str = "float32") -> int:
    """Bytes by `accelerate estimate-memory`, "Total Size": transformers' AutoModel in `dtype`, weights and buffers.

    (It prints units of 1024 and calls them KB, MB, GB.)

    Left out: the output layer, since AutoModel builds the model without one (a tied one is the embedding); the constants
    of 8-bit and 4-bit types, and that embedding and norms stay in 16 bits there; the KV cache; activations; CUDA.

    Source: accelerate/commands/estimate.py, gather_data.
    """
    pick("dtype", dtype, tuple(_ACCELERATE))
    shape = shape_of(model)
    buffers = 0 if shape.positions else shape.head_dim  # rotary frequencies, kept twice
    return 4 * (shape.parameters - shape.head_parameters + buffers) // _ACCELERATE[dtype]


def accelerate_adam_parts(model: str | Shape | Any, dtype: str = "float32") -> dict[str, int]:
    """The parts behind "Training using Adam" of `accelerate estimate-memory`, bytes; empty for 8 and 4 bits (it says N/A)."""
    pick("dtype", dtype, tuple(_ACCELERATE))
    whole = accelerate_inference_bytes(model)
    if dtype == "float32":
        return {"model": whole, "gradients": whole, "optimizer": 2 * whole, "step": 4 * whole}
    if dtype == "float16":
        return {"model": whole, "gradients": whole + whole // 2, "optimizer": 2 * whole, "step": 2 * whole}
    return {}


def accelerate_adam_bytes(model: str | Shape | Any, dtype: str = "float32") -> int | None:
    """Bytes by `accelerate estimate-memory`, "Training using Adam": the *largest* of the parts, not their sum.

    In fp32 the largest is its "step", 16 bytes a parameter, which happens to be the sum. In 16 bits it is 8 bytes a
    parameter, though its own parts, weights, gradients and states, are there together and make 18. For 8 and 4 bits it
    says N/A: None here.

    Left out: the output layer (AutoModel again), activations, logits, CUDA. It says "for a batch size of 1", yet no
    length of a sequence goes into it.

    Source: accelerate/commands/estimate.py, estimate_training_usage and estimate_command.
    """
    return max(accelerate_adam_parts(model, dtype).values(), default=None)
