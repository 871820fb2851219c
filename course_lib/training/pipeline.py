"""Pipeline parallelism by torch.distributed.pipelining: each rank computes some layers, and micro-batches pass through.

Huang et al. 2018, "GPipe" (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473): 1F1B and interleaved stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.observe.stages import StageRecorder
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome


class LlamaStage(torch.nn.Module):
    """Stage `index` of `stages`: tokens (batch, seq_len) or hidden states (batch, seq_len, hidden) in; the latter or logits out.

    Args:
        model: a whole LlamaForCausalLM; only this stage's modules are kept, under their own names.
        index, stages: the first stage has the embedding, the last the final norm and the head. Where layers do not divide,
            the first stages have one more.
    """

    def __init__(self, model: Any, index: int, stages: int) -> None:
        super().__init__()
        inner, (share, more) = model.model, divmod(len(model.model.layers), stages)
        if not share:
            raise ValueError(
                f"{len(inner.layers)} layers are fewer than the {stages} stages: take at least one for each."
            )
        start = index * share + min(index, more)
        self.numbers = range(start, start + share + (index < more))
        self.embed_tokens = inner.embed_tokens if index == 0 else None
        self.rotary_emb = inner.rotary_emb  # no parameters: every stage has its own
        self.layers = torch.nn.ModuleList(inner.layers[i] for i in self.numbers)
        self.norm, self.lm_head = (inner.norm, model.lm_head) if index == stages - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        rotary = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:  # without a mask the attention is causal
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next token: logits (batch, seq_len, vocab), tokens (batch, seq_len)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(
    schedule: Callable[..., Any] = Schedule1F1B,
    num_microbatches: int = 8,
    virtual_stages: int = 1,
    layers: int = 4,
    steps: int = 3,
    global_batch: int = 8,
    seq_len: int = 128,
    pace: float = 0,
) -> Outcome:
    """Train the tiny Llama in a pipeline over all ranks; the default process group must be up.

    Args:
        schedule: a class of torch.distributed.pipelining.
        num_microbatches: in one optimizer step.
        virtual_stages: parts of the model on each rank: 1, or more for an interleaved schedule.
        layers: of the tiny Llama.
        steps: optimizer steps.
        global_batch: sequences in one step.
        seq_len: tokens per sequence.
        pace: as `StageRecorder` takes it. Far above the computing, it lets a schedule show on a busy machine, too.

    Returns:
        In `extra`: timeline (`course_lib.parallel.simulate.Timeline` of all ranks in the last step).
    """
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), rank_device()
    micro_batch_size(steps, global_batch, gradient_accumulation_steps=num_microbatches)  # raises where they are unequal
    model, count = tiny_llama(layers=layers), ranks * virtual_stages
    mine = range(rank, count, ranks)  # rank 0 of four has stages 0 and 4 of eight
    parts = torch.nn.ModuleList(LlamaStage(model, i, count) for i in mine).to(device)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)
    stages = [PipelineStage(part, i, count, device) for part, i in zip(parts, mine, strict=True)]
    recorder = StageRecorder(stages, pace)  # for the picture, and the pace
    pipeline = schedule(stages if virtual_stages > 1 else stages[0], num_microbatches, loss_fn=token_loss)
    observation, losses = observe(parts, optimizer), []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len).to(device)
        parted, inputs = [], [batch] if rank == 0 else []
        targets = {"target": batch, "losses": parted} if rank == ranks - 1 else {}
        with observation.step(tokens=batch.numel()):
            pipeline.step(*inputs, **targets)  # all forwards and backwards, with their sends and receives
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.stack(parted).mean().detach() if parted else torch.zeros((), device=device)
        dist.broadcast(loss, src=ranks - 1)  # only to report it: the last stage alone has the loss
        losses.append(loss.item())
    return outcome(observation, losses, type(pipeline).__name__, timeline=recorder.timeline())


if __name__ == "__main__":
    run(train)
