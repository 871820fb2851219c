"""The 1F1B pipeline schedule over plain send and receive: all forward and backward passes of one optimizer step.

The order is that of `course_lib.parallel.schedules.orders("1f1b", …)` (Narayanan et al. 2021, arXiv:2006.09503)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def one_f_one_b(
    stage: torch.nn.Module,
    micro_batches: Sequence[torch.Tensor],
    loss_fn: Loss,
    *,
    hidden: int,
    record: Callable[[str, int], AbstractContextManager],
) -> list[torch.Tensor]:
    """Add the gradients of the mean loss over the micro-batches to this rank's stage.

    Args:
        stage: this rank's part of the model.
        micro_batches: tokens (micro_batch, seq_len), the same on every rank: the first reads them, the last their labels.
        loss_fn: of logits and tokens.
        hidden: width of what travels between stages: (micro_batch, seq_len, hidden), fp32.
        record: opened around each forward, ("F", i), and backward, ("B", i).

    Returns:
        The micro-batches' losses on the last rank, nothing elsewhere.
    """
    rank, stages = dist.get_rank(), dist.get_world_size()
    before, after = (n if 0 <= n < stages else None for n in (rank - 1, rank + 1))
    held: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # input and output, oldest first, until their backward
    losses: list[torch.Tensor] = []
    count, done = len(micro_batches), {"F": 0, "B": 0}

    def talk(neighbour: int | None, send: torch.Tensor | None = None, receive: bool = False) -> torch.Tensor | None:
        """Both ways at once: two neighbours who first send, and only then receive, would wait for each other for ever."""
        if neighbour is None or not (receive or send is not None):
            return None
        got = micro_batches[0].new_empty((*micro_batches[0].shape, hidden), dtype=torch.float32) if receive else None
        calls = [dist.P2POp(dist.isend, send, neighbour)] if send is not None else []
        calls += [dist.P2POp(dist.irecv, got, neighbour)] if receive else []
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return got

    def forward(x: torch.Tensor | None) -> torch.Tensor:
        i = done["F"]
        with record("F", i):
            x = micro_batches[i] if x is None else x.requires_grad_()
            y = stage(x)
            if after is None:
                losses.append(loss_fn(y, micro_batches[i]))
                y = losses[-1] / count  # gradients add up over micro-batches, and the loss is their mean
        held.append((x, y))
        done["F"] += 1
        return y.detach()

    def backward(gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, y = held.popleft()
        with record("B", done["B"]):
            y.backward(gradient)
        done["B"] += 1
        return x.grad

    ahead = min(stages - 1 - rank, count)
    for _ in range(ahead):  # fill: as many forwards as there are stages behind this one
        talk(after, send=forward(talk(before, receive=True)))
    x = talk(before, receive=True) if ahead < count else None
    for i in range(ahead, count):  # steady: one forward, one backward
        gradient = talk(after, send=forward(x), receive=True)
        x = talk(before, send=backward(gradient), receive=i < count - 1)
    for _ in range(ahead):  # drain
        talk(before, send=backward(talk(after, receive=True)))
    return [loss.detach() for loss in losses]
