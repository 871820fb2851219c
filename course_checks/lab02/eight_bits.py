"""Lab 2, exercise 6: Adam's two moments in 8 bits, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet
from course_checks.lab02.common import kept, lab, stored_bytes, tensor_like

BLOCK, BLOCKS = 256, 256
EPSILON = 1e-8
# Relative error of Adam's update: fourth-power levels 0.019, bitsandbytes' dynamic ones 0.028, linear for m alone 0.058
UPDATE_ERROR = 0.045


def moments() -> tuple[torch.Tensor, torch.Tensor]:
    """(m, v) as after some steps of Adam, 256 blocks of 256: gradients of very different size stand side by side."""
    generator = torch.Generator().manual_seed(5)

    def noise() -> torch.Tensor:
        return torch.randn(BLOCKS * BLOCK, generator=generator).clamp(-3.3, 3.3)

    size = torch.exp(0.8 * noise()) * 1e-3
    return 0.25 * size * noise(), size**2 * 0.05 * (1 + 0.3 * noise()).clamp(min=0.2)


@lab.exercise("An optimizer state in 8 bits", importance=4, difficulty=4, minutes=30)
def eight_bit_state(quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> str:
    """A byte a number and a scale a block; outliers stay in their block; v never below 0; the update of fp32 Adam."""
    m, v = moments()
    stored_m, stored_v = (kept(lambda t, s=signed: quantize(t, s), x) for x, signed in ((m, True), (v, False)))
    got_m = tensor_like(dequantize(stored_m), m, "dequantize_state(stored)").detach()
    got_v = tensor_like(dequantize(stored_v), v, "dequantize_state(stored)").detach()
    num_bytes = stored_bytes(stored_m) + stored_bytes(stored_v)
    _right_bytes(num_bytes, m.numel())
    for got in (got_m, got_v):
        if not bool(got.isfinite().all()):
            raise NotYet("a state comes back with nan or inf")
    if bool((got_v < 0).any()):
        raise NotYet(
            f"{int((got_v < 0).sum())} second moments come back negative, and Adam takes their root: with signed=False the "
            "codes are to reach from 0 to the absmax, with nothing subtracted"
        )
    if bool((got_m >= 0).all()):
        raise NotYet("no first moment comes back negative: with signed=True the codes must reach below 0")
    _outliers_stay(quantize, dequantize, v, got_v)
    error = _right_update(m, v, got_m, got_v)
    _small_states(quantize, dequantize)
    return (
        f"{num_bytes:,} bytes for {2 * m.numel():,} numbers; Adam's update is off by {error:.1%}; an outlier stays in its "
        "block"
    )


def _right_bytes(num_bytes: int, count: int) -> None:
    wanted = 2 * (count + 4 * count // BLOCK)
    if num_bytes < wanted:
        raise NotYet(f"{num_bytes:,} bytes are stored and {wanted:,} are needed: something is kept elsewhere")
    if num_bytes <= wanted + 4096:  # room for two code books
        return
    each = num_bytes / (2 * count)
    if each > 1.9:
        raise NotYet(f"you store {each:.2f} bytes a number: a code of 8 bits is one byte, so keep it as uint8 or int8")
    raise NotYet(
        f"you store {num_bytes:,} bytes for {2 * count:,} numbers, and one byte each with one fp32 scale a block of {BLOCK} "
        f"is {wanted:,}"
    )


def _outliers_stay(
    quantize: Callable[..., Any], dequantize: Callable[..., Any], v: torch.Tensor, before: torch.Tensor
) -> None:
    """One number of block 3 grows a million times: what else changes?"""
    wild = v.clone()
    wild[3 * BLOCK + 17] *= 1e6
    got = tensor_like(dequantize(kept(lambda t: quantize(t, False), wild)), v, "dequantize_state(stored)").detach()
    touched = (got != before).view(-1, BLOCK).any(1)
    elsewhere = int(touched.sum()) - int(touched[3])
    if elsewhere:
        raise NotYet(
            f"one outlier in block 3 changed {elsewhere} of the {BLOCKS - 1} other blocks: scale each block of {BLOCK} by its "
            "own absmax"
        )
    if not torch.isclose(got[3 * BLOCK + 17], wild[3 * BLOCK + 17], rtol=1e-3):
        raise NotYet(
            "a block's largest number does not come back as itself: scale by the block's absmax, so that it is 1"
        )


def _right_update(m: torch.Tensor, v: torch.Tensor, got_m: torch.Tensor, got_v: torch.Tensor) -> float:
    lost = int(((got_v == 0) & (v > 0)).sum())
    if lost:
        raise NotYet(
            f"{lost:,} of {len(v):,} second moments come back as 0: Adam divides by their root, and the update is a hundred "
            "thousand times too large. Linear levels leave nothing between 0 and absmax / 255: make them dense near 0"
        )
    update = m / (v.sqrt() + EPSILON)

    def off(first: torch.Tensor, second: torch.Tensor) -> float:
        return float((first / (second.sqrt() + EPSILON) - update).norm() / update.norm())

    error, first_only, second_only = off(got_m, got_v), off(got_m, v), off(m, got_v)
    if error > UPDATE_ERROR:
        worse = "first" if first_only > second_only else "second"
        raise NotYet(
            f"Adam's update is off by {error:.1%}, where {UPDATE_ERROR:.1%} is allowed; most of it comes from the {worse} "
            "moment: its small numbers need levels closer to each other"
        )
    return error


def _small_states(quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> None:
    """Shapes that fill no block, and the zeros before the first step."""
    generator = torch.Generator().manual_seed(6)
    for shape in ((1000,), (30, 50)):
        small = torch.randn(shape, generator=generator)
        got = tensor_like(dequantize(kept(lambda t: quantize(t, True), small)), small, f"a state of shape {shape}")
        if float((got.detach() - small).abs().max()) > 0.1 * float(small.abs().max()):
            raise NotYet(f"a state of shape {shape}, which does not fill its last block, comes back wrong")
    for signed in (True, False):
        zeros = torch.zeros(300)
        got = tensor_like(dequantize(kept(lambda t, s=signed: quantize(t, s), zeros)), zeros, "a state of zeros")
        if not torch.equal(got.detach(), zeros):
            raise NotYet("a state of zeros, as before the first step, does not come back as zeros: guard the division")
