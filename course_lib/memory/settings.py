"""The settings of an estimate, checked, and what follows from them alone: which dtype each kind of tensor has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from course_lib.choices import (
    STRATEGIES,
    check_choice,
    check_combination,
    why_not_expert_parallel,
    why_not_tensor_parallel,
)
from course_lib.memory.blocks import Numerics
from course_lib.memory.cards import Card, card
from course_lib.memory.shapes import Shape
from course_lib.validation import check_counts, pick

BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's reduce_bucket_size


class RunSettings(NamedTuple):
    """The keyword arguments of `course_lib.memory.estimate`, which explains them; the card is no part of a run."""

    method: str = "full"
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    strategy: str = "single"
    offload: str = "none"
    step: str = "fused"
    device: str = "cuda"
    activation_checkpointing: str = "none"
    attention: str = "flash"
    loss: str = "eager"
    selective_keeps: str = "products"
    offload_activations: bool = False
    compile: bool = False
    optimizer_in_backward: bool = False
    use_cache: bool = False
    keeps_logits: int = 0
    train_embeddings: bool = False
    quantize_experts: bool = False
    transformers: int = 5
    lora_rank: int = 16
    lora_targets: str = "all"
    reshard_after_forward: bool = True
    wrap_embeddings: bool = False
    reduce_each_micro_batch: bool = False
    bucket_elements: int = BUCKET_ELEMENTS
    ranks: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int = 1
    seq_len: int = 2048
    num_microbatches: int = 1
    virtual_stages: int = 1
    eval_micro_batch_size: int = 0
    loading: str = "sharded"

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.ranks * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def run(self) -> Run:
        """The settings that do not depend on sizes and ranks, with what follows from them."""
        try:
            return _run(*self[:_CHOICES])
        except TypeError:  # a list, say, which no cache can look up
            raise ValueError("Choices are names and lora_rank a number, each a single value, not a list.") from None


_CHOICES = RunSettings._fields.index("ranks")  # fields before it depend neither on sizes nor on ranks
_COUNTS = [
    name
    for name in RunSettings._fields[_CHOICES:]
    if name not in ("sequence_parallel", "eval_micro_batch_size", "loading")
]


@dataclass(frozen=True, eq=False)  # compared by identity, which is quick: equal settings get the same one
class Run:
    """Settings by the names of `RunSettings`, then bytes per element:

    Attributes:
        stored, factors: weights that are not quantized; LoRA's factors.
        at_rest: weights between steps (FSDP's shards are fp32 where it computes in 16 bits).
        master: fp32 copies of trained weights beside them.
        state: one of Adam's two moments, or Muon's momentum.
        gradient: a gradient at rest.
        scaled: fp16 needs loss scaling.
        train_embeddings: embedding and output layer are trained beside LoRA's factors, in copies.
    """

    method: str
    optimizer: str
    strategy: str
    offload: str
    step: str
    device: str
    activation_checkpointing: str
    rank: int
    numerics: Numerics
    stored: int
    factors: int
    at_rest: int
    master: int
    state: int
    gradient: int
    scaled: bool
    optimizer_in_backward: bool
    selective_keeps: str
    offload_activations: bool
    transformers: int
    lora_targets: str
    use_cache: bool
    keeps_logits: int
    train_embeddings: bool
    quantize_experts: bool
    reshard_after_forward: bool
    wrap_embeddings: bool
    reduce_each_micro_batch: bool
    bucket_elements: int

    @property
    def full(self) -> bool:
        return self.method == "full"

    @property
    def shards(self) -> tuple[str, ...]:
        """What data-parallel ranks split among them: "optimizer", "gradients", "weights"."""
        return STRATEGIES[self.strategy].shards

    @property
    def zero_stage(self) -> int:
        """Of DeepSpeed; 0 for the other strategies."""
        return STRATEGIES[self.strategy].zero_stage


@lru_cache(maxsize=4096)
def _run(*choices: str | bool | int) -> Run:
    s = RunSettings(*choices)
    for name in RunSettings._fields[:_CHOICES]:
        if isinstance(RunSettings._field_defaults[name], str):
            check_choice(name, getattr(s, name))
    full = s.method == "full"
    if not full:
        check_counts(lora_rank=s.lora_rank)
    check_combination(method=s.method, optimizer=s.optimizer, strategy=s.strategy, offload=s.offload)
    check_counts(bucket_elements=s.bucket_elements)
    for name in RunSettings._fields[:_CHOICES]:
        if type(RunSettings._field_defaults[name]) is bool and type(getattr(s, name)) is not bool:
            raise ValueError(f"{name}={getattr(s, name)!r}: give True or False.")
    pick("transformers", s.transformers, (4, 5))
    pick("keeps_logits", s.keeps_logits, (0, 2, 4))
    if s.offload_activations and s.activation_checkpointing != "full":
        raise ValueError(
            "offload_activations moves what full checkpointing keeps: take activation_checkpointing='full'."
        )
    if s.train_embeddings and full:
        raise ValueError("train_embeddings is for lora and qlora: full training trains them anyway.")
    if s.optimizer_in_backward and (s.strategy != "single" or s.optimizer == "muon"):
        raise ValueError("optimizer_in_backward steps each tensor as its gradient comes: take strategy='single'.")
    if s.reduce_each_micro_batch and s.strategy != "fsdp":
        raise ValueError("reduce_each_micro_batch says when FSDP2 sends its gradients: take strategy='fsdp'.")
    deepspeed, sharding = STRATEGIES[s.strategy].zero_stage > 0, bool(STRATEGIES[s.strategy].shards)
    mixed, fsdp = s.precision.endswith("mixed"), s.strategy == "fsdp"
    compute = 4 if s.precision == "fp32" else 2
    autocast = mixed and not sharding
    stored = 4 if compute == 4 or (autocast and full) else 2
    factors = 4 if compute == 4 or autocast else 2
    at_rest, master = stored, 0
    if sharding and mixed:
        at_rest, master = (4, 0) if fsdp and full else (2, 4)
    elif deepspeed:
        master = 4  # DeepSpeed copies its partition in fp32 whatever its dtype
    if deepspeed and s.optimizer == "adamw_bf16" and s.precision.startswith("bf16"):
        master = 2  # it takes bf16_optimizer_states only with bf16_master_weights_and_grads
    if fsdp:
        master = 0  # the shards are the master copy
    same = {name: getattr(s, name) for name in RunSettings._fields if name in Run.__dataclass_fields__}
    return Run(
        **same,
        rank=0 if full else s.lora_rank,
        numerics=Numerics(
            s.method,
            compute,
            stored,
            factors,
            autocast,
            s.attention == "eager",
            loss=s.loss,
            compiled=s.compile,
            train_embeddings=s.train_embeddings,
            shifted_logits=s.transformers == 4,
            lora_targets=s.lora_targets,
            selective_keeps=s.selective_keeps,
        ),
        stored=stored,
        factors=factors,
        at_rest=at_rest,
        master=master,
        # DeepSpeed's belong to fp32 copies
        state=2 if s.optimizer == "adamw_bf16" or (s.precision == "bf16" and not deepspeed) else 4,
        gradient=4 if fsdp and mixed else (stored if full else factors),
        scaled=s.precision == "fp16-mixed",
    )


def check_sizes(shape: Shape, settings: RunSettings) -> None:
    """Check numbers of ranks, batch and length, and that the model divides as asked. Raises ValueError."""
    counts = [getattr(settings, name) for name in _COUNTS]
    if not all(type(count) is int and count > 0 for count in counts):
        check_counts(**dict(zip(_COUNTS, counts, strict=True)))
    if type(settings.sequence_parallel) is not bool:
        raise ValueError(f"sequence_parallel={settings.sequence_parallel!r}: give True or False.")
    if type(settings.eval_micro_batch_size) is not int or settings.eval_micro_batch_size < 0:
        raise ValueError(f"eval_micro_batch_size={settings.eval_micro_batch_size!r}: give a whole number, 0 for none.")
    check_choice("loading", settings.loading)
    if settings.virtual_stages > 1 and settings.pipeline_parallel == 1:
        raise ValueError(
            f"virtual_stages={settings.virtual_stages} share out a pipeline: with it give pipeline_parallel."
        )
    if settings.sequence_parallel and settings.tensor_parallel == settings.context_parallel == 1:
        raise ValueError("sequence_parallel splits over the tensor-parallel ranks: with it give tensor_parallel.")
    check_length(shape, settings.seq_len)
    _check_split(
        shape,
        settings.method,
        settings.optimizer,
        settings.strategy,
        settings.offload,
        settings.ranks,
        settings.tensor_parallel,
        settings.pipeline_parallel,
        settings.expert_parallel,
    )
    if settings.seq_len % settings.context_parallel:
        raise ValueError(f"seq_len={settings.seq_len} does not divide by context_parallel={settings.context_parallel}.")


@lru_cache(maxsize=4096)
def _check_split(
    shape: Shape, method: str, optimizer: str, strategy: str, offload: str, ranks: int, t: int, p: int, experts: int
) -> None:
    if reason := why_not_tensor_parallel(shape, t):
        raise ValueError(f"{shape.name}: {reason}")
    if p > shape.layers:
        raise ValueError(f"{shape.name} has {shape.layers} layers: too few for pipeline_parallel={p} stages.")
    check_combination(method=method, optimizer=optimizer, strategy=strategy, offload=offload, ranks=ranks, tp=t, pp=p)
    if reason := why_not_expert_parallel(shape.experts.number if shape.experts else 0, experts, strategy, ranks):
        raise ValueError(f"{shape.name}: {reason}")


def check_length(shape: Shape, seq_len: int) -> None:
    """Raises ValueError for a sequence that is longer than the model's table of positions."""
    if shape.positions and seq_len > shape.positions:
        raise ValueError(
            f"{shape.name} has {shape.positions:,} learned positions: seq_len={seq_len:,} is too long for it."
        )


def check_card(precision: str, on: str | Card) -> Card:
    """The card; raises ValueError where it cannot compute in the precision."""
    found = card(on)
    if precision.startswith("bf16") and not found.bf16:
        raise ValueError(f"A {found.name} has no bf16: take precision='fp16-mixed', or 'fp32'.")
    return found
