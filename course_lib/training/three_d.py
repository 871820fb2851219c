"""3D parallelism: pipeline stages, tensor parallelism inside each stage, and data parallelism over copies or shards of that.

Each axis of one named device mesh has its PyTorch tool: ``torch.distributed.pipelining`` along "pp", DTensor's plan along
"tp", ``fully_shard`` along "dp" (or one all-reduce of the gradients). Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from course_lib.launch import rank_device
from course_lib.models import load, tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.parallel.grid import Grid
from course_lib.training.command_line import run
from course_lib.training.gradients import all_reduce_gradients, local
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.pipeline.stage import LlamaStage, split_layers, token_loss
from course_lib.training.tensor.divisibility import check_split
from course_lib.training.tensor.dtensor import shard_tensors
from course_lib.validation import pick

AXES = ("pp", "dp", "tp")  # slowest first: neighbours in rank are neighbours along tp
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def train(
    *,
    dp: int = 2,
    pp: int = 2,
    tp: int = 2,
    model: str = "tiny",
    schedule: str = "1f1b",
    shard_data: bool = True,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    num_microbatches: int = 2,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    lr: float = 1e-3,
) -> Outcome:
    """Train a Llama on a grid of dp x pp x tp ranks; the default process group must be up.

    Args:
        dp, pp, tp: ranks along each axis; any of them may be 1.
        model: as in ``course_lib.models.load``; every rank reads it whole on the host, and keeps its part.
        schedule: of the pipeline: "1f1b" or "gpipe".
        shard_data: True shards weights, gradients and optimizer state along dp (FSDP2); False keeps copies, whose
            gradients are averaged as DDP's are.
        num_microbatches: into which a stage's share of the batch is cut.
        layers, hidden, heads, kv_heads: of the tiny model.
        steps, global_batch, seq_len, lr: as in ``course_lib.training.ddp``.

    Returns:
        In ``extra``: coordinates (of this rank), axes (axis -> the ranks of this rank's group along it), stage_layers
        (numbers of the blocks it holds), local_elements and total_elements (numbers it holds, and of the whole model),
        placements (how the first block's q_proj lies, as text), shapes (of this weight: whole and local).
    """
    pick("schedule", schedule, SCHEDULES)
    grid = Grid(dp=dp, pp=pp, tp=tp).check(dist.get_world_size())
    micro_batch_size(steps=steps, global_batch=global_batch, ranks=dp, gradient_accumulation_steps=num_microbatches)
    if model == "tiny":
        numbers = split_layers(layers, pp)
        whole = tiny_llama(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads)
    else:
        whole = load(model)[0]
        numbers = split_layers(whole.config.num_hidden_layers, pp)
    if pp > 1 and whole.config.tie_word_embeddings:
        raise ValueError(
            f"{model} ties its output layer to the embedding, which lie on different stages: take pp=1, or a model that "
            "does not tie them."
        )
    check_split(whole.config, tp)
    total_elements = sum(p.numel() for p in whole.parameters())

    device = rank_device()
    mesh = init_device_mesh(device.type, tuple(getattr(grid, axis) for axis in AXES), mesh_dim_names=AXES)
    at = dict(zip(AXES, mesh.get_coordinate(), strict=True))
    part = split(whole, mesh, numbers[at["pp"]], device, shard_data=shard_data)
    del whole  # a rank keeps its part alone
    update = torch.optim.AdamW(part.parameters(), lr=lr, fused=True)
    stage = PipelineStage(part, at["pp"], pp, device, group=mesh["pp"].get_group())
    pipeline = SCHEDULES[schedule](stage, n_microbatches=num_microbatches, loss_fn=token_loss)

    observation = observe(part, update)
    losses = []
    for step in range(steps):
        # One batch for all ranks of a dp coordinate: those of a tp group compute on the same tokens, each its heads
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len, rank=at["dp"], world_size=dp).to(device)
        with observation.step(tokens=batch.numel()):
            parts: list[torch.Tensor] = []
            pipeline.step(  # cuts the batch, runs forward and backward passes, sends and receives in between
                *([batch] if stage.is_first else []),
                **({"target": batch, "losses": parts} if stage.is_last else {}),
                return_outputs=False,
            )
            if not shard_data and dp > 1:
                all_reduce_gradients(part.parameters(), mesh["dp"].get_group(), mean=True)  # what DDP does
            update.step()
            update.zero_grad()
        counted = stage.is_last and at["tp"] == 0  # the others know no loss, or the same one
        loss = torch.stack(parts).mean().detach() if counted else torch.zeros((), device=device)
        dist.all_reduce(loss)  # for the report only
        losses.append(loss.item() / dp)
    return outcome(
        observation,
        losses,
        type(part).__name__,
        coordinates=at,
        axes={axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in AXES},
        stage_layers=list(numbers[at["pp"]]),
        total_elements=total_elements,
        **held(part, numbers[at["pp"]][0]),
    )


def split(model: Any, mesh: DeviceMesh, layers: range, device: torch.device, *, shard_data: bool) -> LlamaStage:
    """This rank's part of a Llama: first its stage, then its columns and rows, then its shard of those.

    The order matters: ``fully_shard`` cuts what tensor parallelism has left, so that it gathers along dp alone.
    """
    part = LlamaStage(model, layers).to(device).train()
    if mesh["tp"].size() > 1:
        shard_tensors(part, mesh["tp"])
    if shard_data and mesh["dp"].size() > 1:
        # Gathered once a step and kept for all micro-batches: the pipeline would ask for them again with each
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    return part


def held(part: LlamaStage, first: int) -> dict[str, Any]:
    """What this rank really holds, read off the parameters themselves."""
    weight = part.layers[str(first)].self_attn.q_proj.weight
    return {
        "local_elements": sum(local(p).numel() for p in part.parameters()),
        "placements": str(getattr(weight, "placements", "whole")),
        "shapes": [list(weight.shape), list(local(weight).shape)],
    }


if __name__ == "__main__":
    run(train)
