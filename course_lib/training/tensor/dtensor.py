"""Tensor parallelism with PyTorch's DTensor: a plan says how each layer is split, ``parallelize_module`` does the rest.

The model's code stays Hugging Face's. Weights become DTensors, and the plan's styles communicate as Megatron-LM's layers
do (Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_lib.training.tensor.divisibility import check_split

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # each rank computes some of the outputs
ROWS = ("o_proj", "down_proj")  # each rank takes some of the inputs; the ranks' results are summed
NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def shard_tensors(
    model: Any, mesh: DeviceMesh, *, sequence_parallel: bool = False, gather_logits: bool = True
) -> nn.Module:
    """Cut a Hugging Face Llama over the ranks of a mesh of one dimension, in place; the same model comes back.

    Embedding and output layer are cut by vocabulary, attention by heads, the MLP by columns and then rows; norms stay
    whole on every rank. A stage of a pipeline will do as well: only the layers that are there are cut, by their names.
    Every rank must hold the same weights, and feed the same batch.

    Args:
        model: with ``config``, and layers under transformers' names.
        mesh: of one dimension, such as ``mesh["tp"]``.
        sequence_parallel: between the matrices each rank holds its part of the sequence: a DTensor, so this is for a
            whole model, not for stages that hand plain tensors on.
        gather_logits: True gives every rank all the logits as a plain tensor, for any loss; False leaves them cut by
            vocabulary, for ``torch.distributed.tensor.parallel.loss_parallel``.
    """
    check_split(model.config, mesh.size())
    parallelize_module(model, mesh, plan(model, sequence_parallel=sequence_parallel, gather_logits=gather_logits))
    embedding, head = _tied(model)
    if head is not None:  # each was replaced by a DTensor of its own: one matrix again
        head.weight = embedding.weight
    for weight in model.parameters():
        weight.register_hook(partial(_own_part, weight.placements[0]))
    return model


def _own_part(placement: Placement, gradient: DTensor) -> DTensor:
    """DTensor computes an embedding's gradient with all rows on every rank: keep only those of this rank's weights."""
    if placement.is_shard() and gradient.placements[0].is_replicate():
        return gradient.redistribute(placements=[placement])
    return gradient


def plan(model: nn.Module, *, sequence_parallel: bool, gather_logits: bool) -> dict[str, ParallelStyle]:
    """Name of a module -> how it is cut, and what is sent before and after it."""
    between = Shard(1) if sequence_parallel else Replicate()  # (batch, sequence, hidden) between the matrices
    local = not sequence_parallel
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in COLUMNS:
            styles[name] = ColwiseParallel(input_layouts=Replicate())
        elif last in ROWS:
            styles[name] = RowwiseParallel(output_layouts=between, use_local_output=local)
        # Once for all the matrices that read it. Without these two, each of q, k, v, gate and up would have the
        # gradient of its own input summed over the ranks: 5 all-reduces a layer in the backward pass in place of 2.
        elif last == "self_attn":
            styles[name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        elif last == "mlp":
            styles[name] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        elif last in NORMS:
            styles[name] = SequenceParallel() if sequence_parallel else Whole()
        elif last == "embed_tokens" and isinstance(module, nn.Embedding):
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=local)
        elif last == "lm_head" and isinstance(module, nn.Linear):
            styles[name] = ColwiseParallel(
                input_layouts=between,
                output_layouts=Replicate() if gather_logits else Shard(-1),
                use_local_output=gather_logits,
            )
    return styles


class Whole(ParallelStyle):
    """The whole module on every rank, its weights as DTensors all the same: fused optimizers and the clipping of
    gradients take a model of plain tensors or one of DTensors, not a mixture. Sends nothing."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, weight in list(part.named_parameters(recurse=False)):
                whole = DTensor.from_local(weight.data, mesh, [Replicate()], run_check=False)
                part.register_parameter(key, nn.Parameter(whole, requires_grad=weight.requires_grad))

        def as_dtensor(part: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
            return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:])

        def as_tensor(part: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, replicate, as_dtensor, as_tensor)


def _tied(model: Any) -> tuple[Any, Any]:
    """(embedding, output layer) where both are here and share one matrix; else (None, None)."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return None, None
    found = dict(model.named_modules())
    embedding = next((m for name, m in found.items() if name.endswith("embed_tokens")), None)
    head = next((m for name, m in found.items() if name.endswith("lm_head")), None)
    return (embedding, head) if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) else (None, None)
