"""How long a training takes: FLOPs in all, days, GPU-hours, and the utilisation behind somebody's GPU-hours."""

from __future__ import annotations

from typing import Any

from course_lib.memory.cards import Card
from course_lib.memory.compute import flops_per_token
from course_lib.memory.shapes import Shape
from course_lib.memory.utilization import Utilization, utilization
from course_lib.validation import positive

DAY = 86_400  # seconds


def training_flops(parameters: float, tokens: float) -> float:
    """6 N D: FLOPs of a training over `tokens`, attention and recomputation left out.

    Source: Kaplan et al., arXiv:2001.08361, section 2.1; Hoffmann et al., arXiv:2203.15556, table 3.
    """
    positive(parameters=parameters, tokens=tokens)
    return 6.0 * parameters * tokens


def training_days(
    tokens: float, parameters: float, gpus: int, flops_per_gpu: float, *, recompute: bool = True
) -> float:
    """Days by 8 T P / (n X): equation 4 of arXiv:2104.04473.

    Args:
        tokens, parameters: T and P. gpus: n.
        flops_per_gpu: X, FLOP/s that a GPU really reaches, *hardware* FLOPs if `recompute`.
        recompute: the blocks' forward pass runs twice (8 a parameter and token); False: 6.
    """
    positive(tokens=tokens, parameters=parameters, gpus=gpus, flops_per_gpu=flops_per_gpu)
    return (8 if recompute else 6) * tokens * parameters / (gpus * flops_per_gpu) / DAY


def training_days_of(
    model: str | Shape | Any,
    tokens: float,
    gpus: int,
    flops_per_gpu: float,
    *,
    seq_len: int = 2048,
    recompute: str = "full",
) -> float:
    """Days with attention and the output layer counted: equation 3 of arXiv:2104.04473 for a GPT, any dense shape here.

    Arguments as of `training_days`; `seq_len` in tokens, `recompute` as of `flops_per_token`.
    """
    positive(tokens=tokens, gpus=gpus, flops_per_gpu=flops_per_gpu)
    return tokens * flops_per_token(model, seq_len, recompute=recompute) / (gpus * flops_per_gpu) / DAY


def gpu_hours(flops: float, flops_per_gpu: float) -> float:
    """GPU-hours for `flops` at `flops_per_gpu` FLOP/s, whatever the number of GPUs."""
    positive(flops=flops, flops_per_gpu=flops_per_gpu)
    return flops / flops_per_gpu / 3600


def implied_utilization(parameters: float, tokens: float, hours: float, peak: float | str | Card) -> Utilization:
    """The utilisation that published GPU-hours imply: 6 N D over what the GPUs could have done in that time.

    Args:
        hours: GPU-hours, of all GPUs together, failures and restarts included if the publisher included them.
        peak: FLOP/s a GPU, or a card's name.
    """
    positive(hours=hours)
    return utilization(training_flops(parameters, tokens) / (hours * 3600), peak, "6 N D over all GPU-hours")
