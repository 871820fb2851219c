"""Bytes that one rank holds at rest when data-parallel ranks share a model: to the byte, with roundings and padding.

The layouts are read off the code that makes them and were held against the storages of real ranks: DeepSpeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py) and PyTorch 2.13's fully_shard (_fsdp_param.py).
`state_bytes` has the papers' formulas, which know neither rounding nor copies; `estimate` the peak of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from course_lib.choices import OFFLOADS, check_combination
from course_lib.memory.settings import BUCKET_ELEMENTS
from course_lib.memory.units import Tensor, as_tensors, units_of
from course_lib.validation import pick, positive

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")
ALIGNMENT = 2  # DeepSpeed's nccl_start_alignment_factor: stages 1 and 2 pad to a multiple of it times the ranks
HELD = ("parameters", "gradients", "optimizer_state", "master", "buckets", "gathered")  # these add up to "total"
STEP = 4  # torch.optim.AdamW counts its steps in a number of its own for each tensor, 4 bytes


def resident_bytes(
    units: str | Sequence[Sequence[Tensor | Sequence[int]]],
    *,
    strategy: str,
    ranks: int,
    rank: int = 0,
    precision: str = "fp32",
    optimizer: str = "adamw",
    reshard_after_forward: bool | int = True,
    offload: str = "none",
    trainable: Sequence[Sequence[bool]] | None = None,
    shard_ranks: int | None = None,
    gradients: bool = True,
    buffers: int = 0,
    bucket_elements: int = BUCKET_ELEMENTS,
    persist_elements: int = 0,
) -> dict[str, int]:
    """Bytes on one rank under torch.optim.AdamW, after the last backward pass and before the optimizer's step.

    Args:
        units: shapes of the parameters, a list for each unit, in the order of ``model.parameters()``, as `units_of` gives
            them; or the name of a preset.
        strategy: "ddp" is PyTorch's; "zero1" to "zero3" DeepSpeed's stages, with one group of parameters; "fsdp" is
            fully_shard.
        ranks: that train together. rank: which one; ranks are not equal where rows or elements do not divide.
        precision: "fp32"; "bf16", "fp16" (zero: 16-bit weights and fp32 master copies; ddp and fsdp: everything in 16
            bits); "bf16-mixed", "fp16-mixed" (ddp and fsdp: weights in fp32, computed with in 16 bits).
        optimizer: "adamw"; "adamw_bf16" (zero1 to zero3 in bf16): master copies and moments of 2 bytes instead of 4, DeepSpeed's
            bf16_master_weights_and_grads with bf16_optimizer_states.
        reshard_after_forward: fsdp's reshard_after_forward. It changes what is there between the forward and the backward pass and
            nothing at rest; taken so that one set of settings serves all.
        offload: "optimizer" (zero1 to zero3): master copies, moments and gradients on the host; "all" (zero3, fsdp):
            weights as well.
        trainable: for each parameter of each unit whether it is trained; None leaves it to the units.
        shard_ranks: ranks that share one copy of the model (fsdp's hybrid sharding); None: all.
        gradients: False tells the bytes between the steps: most gradients are gone then, but not those of zero3, which
            keeps its buffer, and not offloaded ones.
        buffers: bytes of the model's buffers and quantization constants, whole on every rank; part of "parameters".
        bucket_elements: zero3's reduce_bucket_size: it holds one such bucket from its start to its end.
        persist_elements: zero3's stage3_param_persistence_threshold: tensors up to this size stay gathered. DeepSpeed's
            own default is 100,000, which leaves a small model whole on every rank.

    Returns:
        What is held: "parameters", "gradients", "optimizer_state" (moments and step counters), "master" (fp32 copies
        that are stepped), "buckets" (DDP's, zero3's, and offload's copies on their way), "gathered" (persistent copies),
        and their sum "total". Of that total: "padding" (bytes of elements that no parameter has), "rounding" (gradients
        kept beyond the slice, because zero1 and zero2 keep whole each tensor that a slice's border cuts), "host" (bytes
        on the host, where there is another place to be).

    >>> resident_bytes([[(3, 4)]], strategy="zero1", ranks=2)["optimizer_state"]  # 2 moments of 6 elements, one counter
    52
    """
    positive(ranks=ranks)
    shards = ranks if shard_ranks is None else shard_ranks
    _check(strategy, ranks, rank, precision, optimizer, offload, shards)
    tensors = as_tensors(units_of(units) if isinstance(units, str) else units, trainable)
    stage = int(strategy[-1]) if strategy.startswith("zero") else -1
    if stage >= 0:  # DeepSpeed casts every weight to the run's precision
        tensors = [tensor._replace(element=0) for tensor in tensors]
    elif precision.endswith("-mixed"):
        tensors = [t if t.trainable or t.element else t._replace(element=2) for t in tensors]
    state = 2 if optimizer == "adamw_bf16" else 4
    element = 4 if precision == "fp32" or (precision.endswith("-mixed") and stage < 0) else 2
    if strategy == "fsdp":
        found = _fsdp(tensors, shards, rank % shards, element)
        found["host"] = _sum(found) if offload == "all" else 0
    elif stage == 3:
        found = _zero3(tensors, ranks, rank, element, state, offload, bucket_elements, persist_elements)
    elif stage > 0:
        found = _zero12(tensors, ranks, rank, element, state, offload)
    else:
        found = _whole(tensors, element)
    pad = found.pop("gradient_padding")
    if not gradients and stage != 3 and not (stage > 0 and offload != "none"):
        found["host"] -= found["gradients"] if found["host"] else 0
        found["padding"] -= pad
        found["gradients"] = found["rounding"] = 0
    found["parameters"] += buffers
    return {**{name: found[name] for name in HELD}, "total": _sum(found)} | {
        name: found[name] for name in ("padding", "rounding", "host")
    }


def _sum(found: dict[str, int]) -> int:
    return sum(found[name] for name in HELD)


def _empty() -> dict[str, int]:
    return dict.fromkeys((*HELD, "padding", "rounding", "host", "gradient_padding"), 0)


def _moments(elements: int, each: int, counters: int) -> int:
    return 2 * each * elements + STEP * counters


def _whole(tensors: list[Tensor], element: int) -> dict[str, int]:
    """Every rank has everything, and DDP's buckets, as large as the gradients."""
    trained = [tensor for tensor in tensors if tensor.trainable]
    found = _empty()
    found["parameters"] = _bytes(tensors, element, lambda tensor: tensor.elements)
    found["gradients"] = _bytes(trained, element, lambda tensor: tensor.elements)
    found["buckets"] = found["gradients"]
    found["optimizer_state"] = 2 * found["gradients"] + STEP * len(trained)
    return found


def _zero12(tensors: list[Tensor], ranks: int, rank: int, element: int, state: int, offload: str) -> dict[str, int]:
    """Trained weights lie in one flat tensor, cut into equal slices; each rank steps a master copy of its slice.

    Both stages keep, of the gradients, every tensor that reaches into the slice, whole.
    """
    trained = [tensor for tensor in tensors if tensor.trainable]
    elements, found = sum(tensor.elements for tensor in trained), _empty()
    flat = _up(elements, ALIGNMENT * ranks)
    mine = flat // ranks
    first, last = rank * mine, (rank + 1) * mine
    pad = max(0, last - max(first, elements))  # of this slice
    found["parameters"] = element * flat
    found["parameters"] += _bytes([t for t in tensors if not t.trainable], element, lambda tensor: tensor.elements)
    found["master"] = state * mine
    found["optimizer_state"] = _moments(mine, state, 1)
    found["padding"] = element * (flat - elements) + 3 * state * pad
    if offload == "none":
        kept = start = 0
        for tensor in trained:
            end = start + tensor.elements
            kept += tensor.elements if start < last and end > first else 0
            start = end
        found["gradients"] = element * (kept + pad)
        found["rounding"] = element * (kept + pad - mine)
        found["gradient_padding"] = element * pad
    else:  # gradients in fp32 beside the master copy; weights on their way back; a tensor's gradient on its way there
        largest = element * max((tensor.elements for tensor in trained), default=0)
        found["gradients"] = 4 * mine
        found["buckets"] = element * mine + 2 * largest
        found["gradient_padding"] = 4 * pad
        found["padding"] += element * pad
        found["host"] = _sum(found) - found["parameters"] - largest
    found["padding"] += found["gradient_padding"]
    return found


def _zero3(
    tensors: list[Tensor],
    ranks: int,
    rank: int,
    element: int,
    state: int,
    offload: str,
    bucket_elements: int,
    persist: int,
) -> dict[str, int]:
    """Every tensor is padded and cut by itself, so that a rank has a slice of each: ranks are equal but for padding."""
    trained, found = [tensor for tensor in tensors if tensor.trainable], _empty()

    def slice_of(tensor: Tensor) -> int:
        return _up(tensor.elements, ranks) // ranks

    def pad_of(tensor: Tensor) -> int:
        each = slice_of(tensor)
        return each - max(0, min(each, tensor.elements - rank * each))

    mine, pad = sum(map(slice_of, trained)), sum(map(pad_of, trained))
    found["parameters"] = _bytes(tensors, element, slice_of)
    found["master"] = state * mine
    found["optimizer_state"] = _moments(mine, state, 1)
    found["gradients"] = (element + (4 if offload != "none" else 0)) * mine  # offload: in fp32 as well, for the step
    found["buckets"] = element * bucket_elements
    small = [tensor for tensor in tensors if tensor.elements <= persist]
    found["gathered"] = _bytes(small, element, lambda tensor: ranks * slice_of(tensor))
    found["gradient_padding"] = found["gradients"] // mine * pad if mine else 0
    found["padding"] = _bytes(tensors, element, pad_of) + 3 * state * pad + found["gradient_padding"]
    found["padding"] += found["gathered"] - _bytes(small, element, lambda tensor: tensor.elements)
    if offload != "none":
        found["host"] = found["master"] + found["optimizer_state"] + found["gradients"]
        found["host"] += found["parameters"] if offload == "all" else 0
    return found


def _fsdp(tensors: list[Tensor], shards: int, shard: int, element: int) -> dict[str, int]:
    """Rows are dealt out: every rank has room for as many as the first, the last ranks have fewer, or none.

    The room is there for weights and gradients, which travel in it; moments have the rows that are there.
    """
    trained, found = [tensor for tensor in tensors if tensor.trainable], _empty()

    def room(tensor: Tensor) -> int:
        rows = tensor.shape[0] if tensor.shape else 1
        return -(-rows // shards) * (tensor.elements // rows if rows else 0)

    def there(tensor: Tensor) -> int:
        return max(0, min(room(tensor), tensor.elements - shard * room(tensor)))

    found["parameters"] = _bytes(tensors, element, room)
    found["gradients"] = _bytes(trained, element, room)
    found["optimizer_state"] = 2 * _bytes(trained, element, there) + STEP * len(trained)
    found["gradient_padding"] = found["gradients"] - _bytes(trained, element, there)
    found["padding"] = found["parameters"] - _bytes(tensors, element, there) + found["gradient_padding"]
    return found


def _bytes(tensors: Sequence[Tensor], element: int, elements: Callable[[Tensor], int]) -> int:
    return sum((tensor.element or element) * elements(tensor) for tensor in tensors)


def _up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def _check(strategy: str, ranks: int, rank: int, precision: str, optimizer: str, offload: str, shards: int) -> None:
    pick("strategy", strategy, STRATEGIES)
    pick("precision", precision, PRECISIONS)
    in_bf16 = strategy in ("zero1", "zero2", "zero3") and precision == "bf16"
    pick("optimizer", optimizer, ("adamw", "adamw_bf16") if in_bf16 else ("adamw",))
    pick("offload", offload, OFFLOADS)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is none of the {ranks} ranks: give 0 to {ranks - 1}.")
    if precision.endswith("-mixed") and strategy.startswith("zero"):
        raise ValueError(
            f"precision={precision!r} is not DeepSpeed's: give 'bf16' or 'fp16', it keeps fp32 copies then."
        )
    if shards != ranks and strategy != "fsdp":
        raise ValueError(f"shard_ranks is fsdp's: under {strategy} all {ranks} ranks share, or none.")
    if shards < 1 or ranks % shards:
        raise ValueError(f"shard_ranks={shards} does not divide {ranks} ranks.")
    check_combination(strategy=strategy, optimizer=optimizer, offload=offload)
