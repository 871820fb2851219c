"""Cross entropy of logits that are split by vocabulary: three numbers per token are sent, never the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course_lib.models.data import IGNORED


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # Softmax does not change when the same number is taken off all of a token's logits. Only with the largest one
        # over *all* ranks no exponential overflows and every rank shifts alike.
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[..., None]

        exponentials = shifted.exp()
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, group=group)

        rows = logits.shape[-1]
        local = labels - group.rank() * rows
        elsewhere = (local < 0) | (local >= rows)  # another rank has this label's logit; IGNORED is nobody's
        local = local.masked_fill(elsewhere, 0)[..., None]
        target = shifted.gather(-1, local)[..., 0].masked_fill(elsewhere, 0.0)
        dist.all_reduce(target, group=group)

        counted = labels != IGNORED
        number = counted.sum()
        ctx.save_for_backward(exponentials.div_(total[..., None]), local, elsewhere, counted, number)
        return ((total.log() - target) * counted).sum() / number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, local, elsewhere, counted, number = ctx.saved_tensors
        of_logits = softmax.clone()  # d loss / d logits is softmax, less 1 at the label: nothing to send
        of_logits.scatter_add_(-1, local, elsewhere[..., None].to(softmax.dtype) - 1)
        return of_logits * (counted * (gradient / number))[..., None], None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean cross entropy over all labels but IGNORED, equal on every rank, as ``F.cross_entropy`` of the whole.

    Three all-reduces of one fp32 number a token, as Megatron-LM's (arXiv:1909.08053, section 3): the largest logit, the
    sum of the exponentials, the label's logit. Gathering the logits would send vocabulary-many.

    Args:
        logits: (..., vocabulary / n), rank r's being those of tokens r * vocabulary / n and following.
        labels: (...), int64, whole and equal on every rank.
        group: the n tensor-parallel ranks.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of {tuple(logits.shape)} need labels of {tuple(logits.shape[:-1])}, not {tuple(labels.shape)}."
        )
    return _CrossEntropy.apply(logits.float(), labels, group)
