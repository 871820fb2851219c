"""FSDP2: each rank keeps some rows of every weight, of its gradient and of its moments, and gathers a block to compute it.

`fully_shard` makes a unit of each block, and one of what is left. A unit is gathered by one all-gather before it computes,
and one reduce-scatter after its backward leaves each rank the gradients of its rows (Rajbhandari et al. 2020, "ZeRO",
arXiv:1910.02054, stage 3; Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome


def all_ranks() -> DeviceMesh:
    """Return all ranks in one row, on the devices that they train on: CPU ranks on a machine with a GPU, too."""
    return init_device_mesh(rank_device().type, (dist.get_world_size(),))


def shard(model: Any, *, bf16: bool = False) -> Any:
    """Shard a transformers model in place over all ranks: a unit for each block, and one for the rest.

    Args:
        model: on any device, also "meta"; a decoder with its blocks in `model.model.layers`.
        bf16: gather and compute in bf16; the shards stay fp32, and gradients are summed in fp32.
    """
    mesh, policy = all_ranks(), MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)  # what is left: embedding, last norm, head


def train(
    build: Callable[[], Any] = tiny_llama,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float = inf,
    bf16: bool = False,
) -> Outcome:
    """Train under FSDP2; the default process group must be up.

    Args:
        build: makes the model on each rank, as `shard` takes it; frozen weights are sharded, too.
        steps: optimizer steps.
        global_batch: sequences in one step, over all ranks and micro-batches.
        seq_len: tokens per sequence.
        gradient_accumulation_steps: micro-batches per rank and step; gradients stay whole until the last.
        max_grad_norm: largest norm of the whole model's gradient.
        bf16: as in `shard`.

    Returns:
        In `extra`: local_elements (of the weights, on this rank) and gradient_norms (of each step, before clipping).
    """
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    micro_batch_size(steps, global_batch, world_size, gradient_accumulation_steps)  # raises where shares are unequal
    model = shard(build().to(device), bf16=bf16)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)  # after sharding, so that its moments are shards, too
    local_elements = sum(p.to_local().numel() for p in model.parameters())  # raises if a weight is not sharded
    observation, losses, norms = observe(model, optimizer), [], []
    for step in range(steps):
        share = sample_batch(step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size)
        micro_batches = share.to(device).chunk(gradient_accumulation_steps)
        with observation.step(tokens=share.numel()):
            total = torch.zeros((), device=device)
            for i, micro_batch in enumerate(micro_batches, start=1):
                model.set_requires_gradient_sync(i == len(micro_batches))
                loss = model(input_ids=micro_batch, labels=micro_batch).loss / len(micro_batches)
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)  # a DTensor: no rank has the whole gradient
            norms.append(norm.full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # only to report the loss of the whole batch
        losses.append(total.item() / world_size)
    return outcome(observation, losses, type(model).__name__, local_elements=local_elements, gradient_norms=norms)


if __name__ == "__main__":
    run(train)
