"""One rank of an FSDP2 run of a Llama of any size, on a laptop: nothing is allocated and nothing is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from course_lib.memory import Shape
from course_lib.models import llama
from course_lib.observe.fake import CountedStep, count_step, fake_ranks, fake_tensors
from course_lib.training.finetune.activation_checkpointing import set_checkpointing
from course_lib.training.finetune.building import add_adapters, build_optimizer, dtypes, trainable
from course_lib.training.sharded.fsdp_sharding import blocks, make_mesh, mixed_precision, shard


def fake_fsdp(
    shape: Shape,
    *,
    ranks: int,
    method: str = "full",
    precision: str = "bf16-mixed",
    activation_checkpointing: str = "none",
    reshard_after_forward: bool = True,
    ends: bool = False,
    micro_batch_size: int = 1,
    seq_len: int = 2048,
) -> CountedStep:
    """Count one step of the Llama of these widths on rank 0 of `ranks`, each with its own micro-batch.

    Args:
        shape: for instance `PRESETS["llama-3.1-70b"]`; `dataclasses.replace(shape, layers=4)` is quicker, and every
            further block adds the same.
        method: "full" or "lora". precision, reshard_after_forward: as in `course_lib.training.sharded.fsdp_sharding.shard`.
        ends: make units of the embedding and of the output layer, too, so that they are gathered one at a time.
        micro_batch_size: sequences. seq_len: tokens a sequence.

    Raises:
        ValueError: a choice that does not exist; "qlora", whose kernels know no fake tensors.
        RuntimeError: a real process group is up.
    """
    if method == "qlora":
        raise ValueError("method='qlora': bitsandbytes' kernels need real tensors; take estimate(method='qlora').")
    with fake_ranks(ranks):
        mesh, kinds = make_mesh("", "cpu"), dtypes(method, precision)
        with torch.device("meta"):  # not as fake tensors: PEFT moves its layers about, and those do not move
            model = llama(shape, dtype=kinds.weights)
            if method == "lora":
                model = add_adapters(model, 16, 32, kinds.trained, seed=0)
        set_checkpointing(model.train(), activation_checkpointing)
        with fake_tensors():
            _become_fake(model)
            if ends:
                for end in (model.get_input_embeddings(), model.get_output_embeddings()):
                    fully_shard(end, mesh=mesh, mp_policy=mixed_precision(precision))
            shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, precision=precision)
            optimizer = build_optimizer(trainable(model), "adamw", 1e-4)
            return count_step(
                model, optimizer, torch.zeros(micro_batch_size, seq_len, dtype=torch.long), blocks(model)[0]
            )


def _become_fake(model: torch.nn.Module) -> None:
    """Give a model on "meta" the tensors on CPU that the context makes, fake ones under `fake_tensors`; ties stay."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        made[id(tensor)] = torch.nn.Parameter(made[id(tensor)], requires_grad=tensor.requires_grad)
                if tensor is not None:
                    tensors[name] = made[id(tensor)]
