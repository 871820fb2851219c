"""`estimate`: bytes on a GPU for a training step, from the model's widths and the settings of the run."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from course_lib.memory.breakdown import Breakdown
from course_lib.memory.cards import Card
from course_lib.memory.phases import sizes, stage, step_breakdown
from course_lib.memory.presets import shape_of
from course_lib.memory.settings import RunSettings, check_card, check_sizes
from course_lib.memory.shapes import Shape


def estimate(
    model: str | Shape | dict[str, Any] | Any, *, card: str | Card | None = None, **settings: Any
) -> Breakdown:
    """Bytes on the fullest GPU during a training step in its steady state (from the second step on).

    Which tensors exist, and for how long, is read off the code that runs: transformers' modelling code in eager mode
    under PyTorch's autograd, PEFT and bitsandbytes for the adapters, DeepSpeed and FSDP2 for the sharding. Compiled or
    hand-fused kernels need less.

    Args:
        model: a preset ("llama-3.1-8b"), a transformers configuration or model, or widths (a Shape or a mapping).
        method: "full"; "lora" (frozen weights in the 16-bit type, factors in fp32); "qlora" (blocks' matrices in NF4
            with double quantization, the rest as in lora).
        precision: "bf16-mixed", "fp16-mixed": fp32 weights under autocast, for "zero*" and "fsdp" 16-bit weights with
            fp32 master copies; "bf16": everything in bf16; "fp32".
        optimizer: "adamw" (two states in the weights' dtype); "adamw_bf16" (its two states in bf16, as torchtitan hands
            them to the fused kernel); "adamw8bit"; "paged_adamw8bit" (its states may move to the host when memory is
            short: counted as not on the GPU; on a CPU it is adamw8bit); "muon" (torch.optim.Muon, with one state in the
            weights' dtype, for the blocks' matrices or LoRA's factors, and adamw for the rest); "sgd" (no momentum).
        strategy: how data-parallel ranks share the states; "fsdp" is FSDP2. (FSDP1 is counted alike: of one training that
            torchtitan published both ways it needed 4 % more.)
        ranks: data-parallel ranks.
        tensor_parallel: ranks that share each matrix. The GPUs in all are the product of all ranks' numbers.
        pipeline_parallel: stages; the fullest one is reported, under the 1F1B schedule.
        context_parallel: ranks that share a sequence, and the states with the data-parallel ones.
        expert_parallel: of a mixture of experts, data-parallel ranks that hold one copy of the experts together, as in
            torchtitan; the router is taken to be fair.
        sequence_parallel: norms and residuals are split along the sequence, too (arXiv:2205.05198).
        micro_batch_size: sequences in one forward pass.
        seq_len: tokens per sequence.
        num_microbatches: forward passes in one optimizer step (gradient accumulation, or a pipeline's micro-batches).
        virtual_stages: stages that each pipeline rank holds, under the interleaved 1F1B schedule.
        activation_checkpointing: "full" keeps each block's input; "selective" also what `selective_keeps` says.
        selective_keeps: outputs of attention and of all matrix "products", as this course and Axolotl do;
            "half_of_products", as torchtitan; or "all_but_scores", as Megatron-LM, where only eager attention is computed
            again (arXiv:2205.05198).
        offload_activations: what full checkpointing keeps lies on the host.
        attention: "flash" never writes the scores out; "eager" does.
        loss: "eager" writes all logits out, once more in fp32; "half" stays in 16 bits, as F.cross_entropy does in a loop of
            one's own; "compiled" keeps the 16-bit logits alone; "chunked" computes the cross-entropy of an eighth of the
            tokens at a time; "fused" output layer and loss together, a chunk at a time, as Liger, CCE and torch's
            linear_cross_entropy do.
        compile: each block is compiled, as torchtitan and torchtune do it, and with loss="chunked" each chunk's loss.
        optimizer_in_backward: each tensor is stepped as its gradient comes, and the gradient goes (one GPU).
        use_cache: the model keeps keys and values of all layers until the loss is there, as transformers do by default.
            Seen where checkpointing is torch's or FSDP's; transformers' own turns it off.
        keeps_logits: bytes of each logit that your loop still holds in backward because a variable has the model's output: 2 in
            `out = model(...); out.loss.backward()`; 4 where they were cast to fp32; 0 where nobody has them.
        train_embeddings: embedding and output layer are trained beside LoRA's factors (PEFT's modules_to_save).
        quantize_experts: under QLoRA a mixture's experts are in NF4, too, as with Axolotl's quantize_moe_experts; bitsandbytes alone
            leaves them in 16 bits.
        transformers: major version; 4 copies the logits once more, without their last row.
        eval_micro_batch_size: sequences in a batch of evaluation between two steps, where the logits are written out; 0:
            there is none.
        loading: "whole": each process reads the whole checkpoint into the host's memory, and under QLoRA quantizes it on its
            card; "card": and puts it there whole, to be sharded; "sharded": one process of a machine reads it, or tensors go straight to the card.
        offload: "optimizer" (zero1, zero2, zero3): states and gradients on the host; "all" (zero3, fsdp): parameters as
            well. FSDP2 has nothing between "none" and "all".
        lora_rank: of each matrix that has an adapter.
        lora_targets: "all" linear layers of a block, or those of "attention" alone.
        step: which of PyTorch's AdamWs: "fused" (no temporary, the choice of transformers' Trainer and of this course),
            "foreach" (torch.optim.AdamW's own on CUDA: one state-sized temporary), "loop" (its own on the CPU: two of
            the largest tensor).
        device: "cuda" or "cpu": bitsandbytes' CPU step unpacks 8-bit states, five fp32 tensors of the largest size.
        card: a card's name; only checked for what it cannot do.
        reshard_after_forward: "fsdp": a block's gathered weights go after its forward pass; False: they stay until its
            backward pass.
            "zero3": every tensor goes after its use (stage3_max_reuse_distance 0, as in this course's programs); False:
            DeepSpeed's default, by which up to 10^9 elements stay gathered: of a smaller model all.
        wrap_embeddings: "fsdp": embedding and output layer are units of their own, as in torchtitan and torchtune; False: the
            root's, gathered all along, as where a wrap policy names the blocks alone.
        reduce_each_micro_batch: "fsdp": gradients are reduce-scattered after every micro-batch, as in torchtitan and prime-rl, and
            their sums are shards; False: they stay whole on every rank until the last micro-batch, in fp32 under mixed
            precision, as under ``set_requires_gradient_sync(False)`` and Accelerate's ``no_sync``.
        bucket_elements: "zero1" to "zero3": reduce_bucket_size. DeepSpeed allocates such a bucket however small the model:
            its 500 million elements are 1 GB in 16 bits and 2 GB in fp32.

    Held against real steps: one device (tests/test_memory_measured.py), and two ranks under ddp, zero1, zero2, zero3 and
    fsdp (benchmarks/sharding.py): the peak within 5 %. With an offloaded optimizer
    the peak is within 8 %; frozen or offloaded weights under these strategies were not measured at their peak.

    Sources: ZeRO, arXiv:1910.02054 (states); Korthikanti et al., arXiv:2205.05198 (activations); QLoRA, arXiv:2305.14314
    (NF4); Zhao et al., arXiv:2304.11277, section 3.2.1 (gathered units).
    """
    run = RunSettings(**settings)
    breakdown = breakdown_of(model if type(model) is Shape else shape_of(model), run)
    if card is not None:
        check_card(run.precision, card)
    return breakdown


# The settings have one home, RunSettings; whoever asks for help, or makes options of a command of them, sees them here.
_OWN = inspect.signature(estimate).parameters
_SETTINGS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=RunSettings.__annotations__[name]
    )
    for name, default in RunSettings._field_defaults.items()
]
estimate.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_OWN["model"], *_SETTINGS, _OWN["card"]], return_annotation=Breakdown
)


def breakdown_of(shape: Shape, settings: RunSettings) -> Breakdown:
    """What `estimate` answers. Raises ValueError as it does, but for the card."""
    run = settings.run
    check_sizes(shape, settings)
    if run.optimizer_in_backward and settings.num_microbatches > 1:
        raise ValueError("optimizer_in_backward gives each gradient up at once: with it take num_microbatches=1.")
    # those that work on one sequence together hold the same weights, and shard them among them, too
    shards = settings.ranks * (1 if settings.strategy == "single" else settings.context_parallel)
    t, p, m = settings.tensor_parallel, settings.pipeline_parallel, settings.num_microbatches
    earlier = min(m - 1, 2)  # from the third on, micro-batches are alike
    size, evaluated = sizes(shape, settings, run.rank), None
    if settings.eval_micro_batch_size:
        evaluated = sizes(shape, settings._replace(micro_batch_size=settings.eval_micro_batch_size), run.rank)
    if p == 1:
        whole = stage(run, shape, shards, t, shape.layers, True, True, earlier, settings.expert_parallel)
        return _with_loading(step_breakdown(whole, size, 1, evaluated), shape, settings)
    layers = -(-shape.layers // p)
    ends = (
        step_breakdown(
            stage(run, shape, shards, t, layers, first, not first, earlier, settings.expert_parallel),
            size,
            in_flight(p, m, settings.virtual_stages, first),
            evaluated,
        )
        for first in (True, False)
    )
    return max(ends, key=lambda end: end.peak)


def _with_loading(step: Breakdown, shape: Shape, settings: RunSettings) -> Breakdown:
    """Without sharded loading every card may hold the whole model for a while; bitsandbytes quantizes on the card."""
    on_card = settings.loading == "card" or (settings.loading == "whole" and settings.method == "qlora")
    if not on_card or "weights" not in settings.run.shards:
        return step
    alone = {"method": settings.method, "precision": settings.precision, "lora_rank": settings.lora_rank}
    whole = estimate(shape, **alone).weights
    phases = step.phases | {"loading": whole}
    if whole <= step.peak:
        return replace(step, phases=phases)
    parts = {name: whole if name == "weights" else 0 for name in step.at_peak}
    return replace(step, phases=phases, peak=whole, peak_phase="loading", at_peak=parts)


def uncounted(shape: Shape, settings: RunSettings) -> tuple[str, ...]:
    """Sentences about what these settings can need beyond the estimate; none where all is counted."""
    found = []
    by_peft = shape.experts and not shape.experts.bias and not shape.experts.rows
    if by_peft and settings.method != "full" and settings.lora_targets == "all":
        found.append(
            "Adapters are counted beside linear layers. PEFT's all-linear adapts the experts, too, and makes a copy of their "
            "weights for it: name attention's matrices as target_modules, and take lora_targets='attention'."
        )
    if shape.experts and settings.expert_parallel > 1:
        found.append(
            "Expert parallelism is computed and untried: no program of this course runs it, and its router is taken to be "
            "fair, where a rank with popular experts gets more tokens."
        )
    if settings.context_parallel > 1:
        found.append(
            "What the exchange of keys and values, or of heads, holds on its way is not counted: a published run over 4 "
            "ranks needed 50 % more."
        )
    if shape.experts and settings.compile:
        found.append("Compiled blocks are known here of plain models, not of mixtures of experts.")
    return tuple(found)


def in_flight(stages: int, num_microbatches: int, virtual_stages: int, first: bool) -> float:
    """Micro-batches whose activations the first or the last pipeline rank holds at a time, under (interleaved) 1F1B.

    With p ranks and v virtual stages each, p + (p - 1) / v on the first rank and (v p - p + 1) / v on the last, in units of
    all its layers, never more than there are micro-batches; with v = 1 that is p and 1.

    Source: arXiv:2205.05198, section 4.2.3 (factor 1 + (p - 1) / (p v)).
    """
    p, v = stages, virtual_stages
    if not first:
        return min(num_microbatches, (v * p - p + 1) / v)
    return min(num_microbatches, p + (p - 1) / v if v > 1 else p)
