"""3D parallelism: pipeline stages, tensor parallelism inside each, and FSDP2 over what that leaves, on one device mesh.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.pipeline import LlamaStage, token_loss
from course_lib.training.tensor_parallel import split


def part_of(model: Any, mesh: DeviceMesh, device: torch.device) -> LlamaStage:
    """Return this rank's part of a Llama: its stage, of that its columns and rows, and of those its shard."""
    part = LlamaStage(model, mesh.get_local_rank("pp"), mesh["pp"].size()).to(device)
    if mesh["tp"].size() > 1:
        split(part.layers, mesh["tp"])
    for unit in (*part.layers, part):  # kept gathered: the pipeline would gather again for each micro-batch
        fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False)
    return part


def clip(parameters: list[torch.nn.Parameter], mesh: DeviceMesh, max_norm: float) -> float:
    """Scale the gradients so that the norm over the whole model is at most `max_norm`; return the norm before."""
    norms = [p.grad.norm() for p in parameters]  # of some on ("dp", "tp"), of others on "dp": they do not stack
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square, group=mesh.get_group("pp"))  # the other stages' layers
    for p in parameters:
        p.grad.mul_((max_norm / square.sqrt()).clamp(max=1))
    return square.sqrt().item()


def train(
    pp: int = 2,
    dp: int = 2,
    tp: int = 2,
    clip: Callable[..., float] = clip,
    num_microbatches: int = 2,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
) -> Outcome:
    """Train the tiny Llama on a grid of pp x dp x tp ranks; the default process group must be up.

    Args:
        pp, dp, tp: ranks along each axis; any of them may be 1.
        clip: clips the gradients over all ranks: (parameters, mesh, largest norm) -> the norm before.
        num_microbatches: of each data-parallel rank's share of the batch; at least pp.
        steps: optimizer steps.
        global_batch: sequences in one step, over all ranks.
        seq_len: tokens per sequence.

    Returns:
        In `extra`: local_elements (of the weights, on this rank) and norms (of each step's gradient).
    """
    device = rank_device()
    micro_batch_size(steps, global_batch, dp, num_microbatches)  # raises where shares are unequal
    mesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    part = part_of(tiny_llama(), mesh, device)
    parameters = list(part.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    stage = PipelineStage(part, mesh.get_local_rank("pp"), pp, device, group=mesh.get_group("pp"))
    pipeline = Schedule1F1B(stage, num_microbatches, loss_fn=token_loss)
    observation, losses, norms = observe(part, optimizer), [], []
    for step in range(steps):
        place = {"rank": mesh.get_local_rank("dp"), "world_size": dp}  # ranks along "tp" and "pp" share a batch
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len, **place).to(device)
        parted, inputs = [], [batch] if stage.is_first else []
        targets = {"target": batch, "losses": parted} if stage.is_last else {}
        with observation.step(tokens=batch.numel()):
            pipeline.step(*inputs, **targets)
            norms.append(clip(parameters, mesh, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.stack(parted).mean().detach() if parted else torch.zeros((), device=device)
        dist.all_reduce(loss)  # only to report it: the last stages have it, tp times each
        losses.append(loss.item() / dp / tp)
    local_elements = sum(p.to_local().numel() for p in parameters)  # raises if a weight is not sharded
    return outcome(observation, losses, type(part).__name__, local_elements=local_elements, norms=norms)


if __name__ == "__main__":
    run(train)
