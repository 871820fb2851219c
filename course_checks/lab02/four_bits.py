"""Lab 2, exercise 5: a matrix in NF4, its scales in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet
from course_checks.lab02.common import kept, lab, stored_bytes, tensor_like
from course_checks.lab02.nf4_reference import BLOCK, GROUP, NF4, there_and_back

BITS = 4 + 8 / BLOCK + 32 / (BLOCK * GROUP)  # 4.127 bits a weight
# How far off the absmaxes are, in units of our linear code: bitsandbytes' own code 1.5, without the mean 2.6, all in one
# group 2.8
ABSMAX_EXCESS, ERROR_EXCESS = 2.0, 1.01


@lab.exercise("NF4 with double quantization", importance=4, difficulty=4, minutes=35)
def nf4(quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> str:
    """4.127 bits a weight, counted from what is stored; NF4's levels; an error like that of bitsandbytes."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(512, 512, generator=generator) * 0.02
    weight[128:160] *= 2  # one group of absmaxes is unlike the others
    other = torch.randn(512, 512, generator=generator)
    stored = kept(quantize, weight)
    kept(quantize, other)  # what is kept outside of `stored` now belongs to this one
    got = tensor_like(dequantize(stored, tuple(weight.shape)), weight, "dequantize_nf4(stored, shape)").detach()
    bits = 8 * stored_bytes(stored) / weight.numel()
    if not bool(got.isfinite().all()):
        raise NotYet("the dequantized matrix holds nan or inf")
    _right_signs(got, weight)
    _right_bits(bits)
    _right_levels(got)
    expected = there_and_back(weight)
    _right_absmax(got, expected, weight)
    mine, theirs = float((got - weight).abs().mean()), float((expected - weight).abs().mean())
    if mine > ERROR_EXCESS * theirs:
        pairs = got.view(-1, 2).flip(1).reshape(weight.shape)
        if float((pairs - weight).abs().mean()) < ERROR_EXCESS * theirs:
            raise NotYet(
                "two neighbours come back in each other's place: unpack the half-bytes in the order of packing"
            )
        raise NotYet(
            f"the levels are NF4's and the error is {mine / theirs:.2f} times what it can be: give each weight the nearest "
            "level, and keep the weights in their order"
        )
    if bits < BITS - 0.01:
        raise NotYet(f"{bits:.3f} bits a weight are stored, and {BITS:.3f} are needed: something is kept elsewhere")
    _zeros_and_odd_sizes(quantize, dequantize, generator)
    return f"{bits:.3f} bits a weight, counted; mean error {mine / float(weight.std()):.4f} standard deviations"


def _right_signs(got: torch.Tensor, weight: torch.Tensor) -> None:
    if bool((got >= 0).all()) or bool((got <= 0).all()):
        raise NotYet("all weights come back with one sign: the sign is lost; NF4 has levels on both sides of 0")
    large = weight.abs() > weight.abs().mean()
    against = float((got[large].sign() == -weight[large].sign()).float().mean())
    if against > 0.9:
        raise NotYet("the weights come back with the other sign")


def _right_bits(bits: float) -> None:
    if bits <= BITS + 0.011:
        return
    if bits >= 8:
        raise NotYet(
            f"you store {bits:.2f} bits a weight: a code takes 4, so pack two into each byte of a uint8 tensor"
        )
    if bits > 4.45:
        raise NotYet(f"you store {bits:.3f} bits a weight: half a bit of it is absmax in fp32; give it 8 bits too")
    raise NotYet(f"you store {bits:.3f} bits a weight where double quantization needs {BITS:.3f}: the rest is scales")


def _right_levels(got: torch.Tensor) -> None:
    """Read the learner's code book off the result: in a block every value is a level times the block's scale."""
    if len((got / got.abs().max()).unique()) <= 16:
        raise NotYet(
            "the whole matrix has at most 16 values: it has one scale, so one outlier would push every weight to 0. Give "
            f"each block of {BLOCK} its own absmax"
        )
    blocks = got.view(-1, BLOCK)
    per_block = [len(block.unique()) for block in blocks[:64]]
    if max(per_block) > 16:
        raise NotYet(
            f"a block of {BLOCK} comes back with {max(per_block)} different values and 4 bits have 16: your blocks are not "
            f"{BLOCK} neighbours of a row"
        )
    relative = (blocks / blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)).flatten()
    distance = (relative[:, None] - NF4).abs().amin(1)
    if float(distance.max()) < 2e-3:
        return
    levels = (relative * 1000).round().unique() / 1000
    gaps = levels.diff()
    if len(levels) <= 17 and float(gaps.max() - gaps.min()) < 0.01:
        raise NotYet(
            f"your levels are {float(gaps.mean()):.3f} apart, evenly: most weights are near 0, where NF4 has its levels "
            "closer. Use the code book"
        )
    at = int(distance.argmax())
    raise NotYet(
        f"a weight of block {at // BLOCK} comes back as {float(relative[at]):.3f} of the block's absmax, which is no level of "
        "NF4: look the codes up in the code book"
    )


def _right_absmax(got: torch.Tensor, expected: torch.Tensor, weight: torch.Tensor) -> None:
    """A block's largest weight comes back as its absmax, so how well that was kept can be seen."""
    true, mine, theirs = (t.view(-1, BLOCK).abs().amax(1) for t in (weight, got, expected))
    if float((mine < 0.9 * true).float().mean()) > 0.1:
        raise NotYet(
            f"in {int((mine < 0.9 * true).sum()):,} of {len(true):,} blocks the largest weight comes back too small: scale by "
            "the largest absolute value, the most negative weight may be the one"
        )
    off, possible = float((mine - true).abs().mean()), float((theirs - true).abs().mean())
    if off > ABSMAX_EXCESS * possible:
        raise NotYet(
            f"the absmax of a block is off by {off:.1e} on average where 8 bits can do {possible:.1e}: subtract the mean "
            f"first (all absmaxes are positive and alike), and scale in groups of {GROUP}"
        )


def _zeros_and_odd_sizes(
    quantize: Callable[..., Any], dequantize: Callable[..., Any], generator: torch.Generator
) -> None:
    """100 blocks fill no group of 256; one block is all zeros, one is so large that the zeros' absmax is rounded.

    Each row is one block: bitsandbytes unpacks other rows with the wrong absmax on a CPU with AVX-512.
    """
    weight = torch.randn(100, BLOCK, generator=generator)
    weight.view(-1, BLOCK)[3] *= 10
    weight.view(-1, BLOCK)[7] = 0
    got = tensor_like(
        dequantize(kept(quantize, weight), tuple(weight.shape)), weight, "a matrix of 100 blocks"
    ).detach()
    zeros = got.view(-1, BLOCK)[7]
    if not bool((zeros == 0).all()):
        raise NotYet(
            f"a block of zeros comes back with {float(zeros[0]):.3g}: its absmax is 0, so guard the division that finds its codes"
        )
    mine, theirs = (float((t - weight).abs().mean()) for t in (got, there_and_back(weight)))
    if mine > 1.05 * theirs:
        raise NotYet(
            f"100 blocks fill no group of {GROUP}, and there the error is {mine / theirs:.2f} times what it can be"
        )
