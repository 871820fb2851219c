"""Context parallelism: every rank holds the whole model and a part of each sequence, and attention runs around a ring.

Everything else in a transformer treats tokens one by one, so only attention changes (Ring Attention, arXiv:2310.01889;
Megatron-core's and Llama 3's context parallelism). Each rank keeps activations of its own tokens only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import IGNORED, sample_batch
from course_lib.observe import observe
from course_lib.parallel.grid import Grid
from course_lib.training.command_line import run
from course_lib.training.gradients import all_reduce_gradients
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.sequence.ring_attention import positions, ring_attention, runs, scores_computed


def train(
    *,
    dp: int = 1,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    layout: str = "zigzag",
    layers: int = 4,
    hidden: int = 128,
    lr: float = 1e-3,
) -> Outcome:
    """Train the tiny Llama with each sequence split over ranks; the default process group must be up.

    Args:
        dp: groups that get sequences of their own; the ranks of one group, world size / dp of them, share a sequence.
        layout: "zigzag" or "contiguous": which runs of a sequence a rank holds, as in ``ring_attention.runs``.
        layers, hidden: of the tiny model.
        steps, global_batch, seq_len, lr: as in ``course_lib.training.ddp``.

    Returns:
        In ``extra``: coordinates ("dp", "cp"), positions (runs of this rank as [first, last + 1]), scores (query-key
        pairs that this rank computes for one head of one sequence, one figure a step of the ring), tokens (of this rank
        in one step).
    """
    ranks = dist.get_world_size()
    if dp < 1 or ranks % dp:
        raise ValueError(f"dp={dp} does not divide {ranks} ranks: give a divisor, 1 to have all share each sequence.")
    grid = Grid(dp=dp, cp=ranks // dp)
    micro_batch_size(steps=steps, global_batch=global_batch, ranks=dp)
    runs(0, grid.cp, seq_len, layout)
    device = rank_device()
    model = split_attention(tiny_llama(layers=layers, hidden=hidden).to(device))
    if seq_len > model.config.max_position_embeddings:
        raise ValueError(f"seq_len={seq_len}: the tiny model's longest is {model.config.max_position_embeddings}.")
    mesh = init_device_mesh(device.type, (grid.dp, grid.cp), mesh_dim_names=("dp", "cp"))
    at = grid.coordinates(dist.get_rank())
    ring = mesh["cp"].get_group()
    update = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    mine = positions(at["cp"], grid.cp, seq_len, layout).to(device)

    observation = observe(model, update)
    losses = []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len, rank=at["dp"], world_size=dp).to(device)
        with observation.step(tokens=len(batch) * len(mine)):
            # Shifted before the cut: the last token of a run is asked for the first one of the next, on another rank
            labels = F.pad(batch[:, 1:], (0, 1), value=IGNORED)[:, mine]
            logits = model(input_ids=batch[:, mine], position_ids=mine[None], ring=ring, layout=layout).logits
            # Ranks have unequally many labels (the sequence's last token has none), so each adds up, and all divide by
            # the whole batch's number
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = total / (global_batch * (seq_len - 1))
            loss.backward()
            all_reduce_gradients(model.parameters())
            update.step()
            update.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)  # for the report only
        losses.append(loss.item())
    return outcome(
        observation,
        losses,
        type(model).__name__,
        coordinates={"dp": at["dp"], "cp": at["cp"]},
        positions=[[part.start, part.stop] for part in runs(at["cp"], grid.cp, seq_len, layout)],
        scores=scores_computed(at["cp"], grid.cp, seq_len, layout),
        tokens=len(batch) * len(mine),
    )


def split_attention(model: Any) -> Any:
    """Have a transformers model's attention go round the ring; the model is changed and given back.

    Its ``forward`` then takes two more words, ``ring=`` (the process group) and ``layout=``, and needs ``position_ids``.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("ring", _attention)  # transformers' own way: a name, and what computes
    model.set_attn_implementation("ring")
    model.config.use_cache = False
    return model.train()


def _attention(module, query, key, value, attention_mask, *, scaling, ring, layout, **_: Any):
    """As transformers calls it: shapes (batch, heads, tokens, width), back as (batch, tokens, heads, width)."""
    assert attention_mask is None, "the ring's mask is causal, and follows from the positions"
    out = ring_attention(query, key, value, group=ring, scale=scaling, layout=layout)
    return out.transpose(1, 2).contiguous(), None


if __name__ == "__main__":
    run(train)
