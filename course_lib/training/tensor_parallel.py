"""Tensor parallelism by DTensor: each rank computes with its columns and rows of the blocks' matrices, on the same tokens.

Attention is cut by heads, the MLP by columns and then rows (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053). Norms,
embedding and head stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from course_lib.launch import rank_device
from course_lib.memory import shape_of
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.parallel import traffic
from course_lib.training.command_line import run
from course_lib.training.outcome import Outcome, outcome


def split(blocks: torch.nn.ModuleList, mesh: DeviceMesh, one_f: bool = True) -> None:
    """Split Llama's blocks in place over the ranks of a mesh of one dimension.

    Args:
        one_f: False leaves every matrix its own f: one all-reduce in backward for each of q, k and v, of gate and up.
    """
    traffic.check_tensor_parallel(shape_of(blocks[0].self_attn.config), mesh.size())  # or raises
    column, row, whole = ColwiseParallel(), RowwiseParallel(), Replicate()
    plan = {f"*.self_attn.{name}_proj": column for name in "qkv"} | {"*.self_attn.o_proj": row}
    plan |= {"*.mlp.gate_proj": column, "*.mlp.up_proj": column, "*.mlp.down_proj": row}
    if one_f:  # the input becomes a DTensor once, for all the matrices that read it
        keyword = {"hidden_states": whole}  # as transformers passes it to attention; to the MLP by position
        plan["*.self_attn"] = PrepareModuleInput(input_kwarg_layouts=keyword, desired_input_kwarg_layouts=keyword)
        plan["*.mlp"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
    parallelize_module(blocks, mesh, plan)


def train(split: Callable[..., None] = split, steps: int = 20, global_batch: int = 8, seq_len: int = 128) -> Outcome:
    """Train the tiny Llama, its blocks split over all ranks; the default process group must be up.

    Args:
        split: cuts the blocks of a model over a mesh, in place.
        steps: optimizer steps.
        global_batch: sequences in one step; every rank gets all of them.
        seq_len: tokens per sequence.

    Returns:
        In `extra`: local_elements (numbers of the weights on this rank).
    """
    device = rank_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tiny_llama().to(device)  # the same weights on every rank
    split(model.model.layers, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after the split, as with fully_shard
    observation, losses = observe(model, optimizer), []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len).to(device)  # the same one, too
        with observation.step(tokens=batch.numel()):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())  # no report is needed: every rank has it
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return outcome(observation, losses, type(model).__name__, local_elements=sum(w.numel() for w in weights))


if __name__ == "__main__":
    run(train)
