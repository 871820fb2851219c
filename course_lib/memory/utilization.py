"""How much of a GPU's peak a run uses: MFU and HFU, which mean nothing without their definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.memory.cards import Card, card
from course_lib.memory.compute import flops_per_token, weights_counted
from course_lib.memory.presets import shape_of
from course_lib.memory.shapes import Shape
from course_lib.validation import positive


@dataclass(frozen=True)
class Utilization:
    """A share of the peak, and what was counted to get it.

    Attributes:
        value: 0.4 is 40 %.
        flops_per_second: FLOP/s a GPU that were counted. peak: FLOP/s a GPU that it is a share of.
        definition: for the line under a table.
    """

    value: float
    flops_per_second: float
    peak: float
    definition: str

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} %: {self.definition}"


def utilization(flops_per_second: float, peak: float | str | Card, counted: str = "FLOPs as reported") -> Utilization:
    """The share that `flops_per_second` (a GPU) is of `peak` (FLOP/s a GPU, or a card's name: its dense 16-bit peak).

    Raises:
        ValueError: numbers that are not above 0, an unknown card, a card whose speed is not known.
    """
    name = ""
    if isinstance(peak, str | Card):
        found = card(peak)
        peak, name = found.peak_flops, f" ({found.name}, dense 16-bit)"
        if not peak:
            raise ValueError(f"The speed of {found.name} is not known: give peak in FLOP/s, 312e12 for an A100.")
    positive(flops_per_second=flops_per_second, peak=peak)
    return Utilization(
        flops_per_second / peak, flops_per_second, peak, f"{counted}; peak {peak / 1e12:g} TFLOP/s a GPU{name}"
    )


def mfu(
    model: str | Shape | Any,
    tokens_per_second: float,
    *,
    seq_len: int,
    peak: float | str | Card,
    gpus: int = 1,
    attention: bool = True,
    causal: bool = False,
    counted: str = "matrices",
    frozen: bool = False,
) -> Utilization:
    """Model FLOPs utilisation: the FLOPs that the mathematics needs, recomputation not counted, over the peak.

    `tokens_per_second` of all `gpus` together; the rest as in `flops_per_token` and `utilization`.

    >>> str(mfu("gpt3-175b", 64 * 2048 / 13.75, seq_len=2048, peak=312e12, gpus=64))[:12]
    '51.4 %: MFU,'
    """
    return _of_run(model, tokens_per_second, seq_len, peak, gpus, "none", attention, causal, counted, frozen)


def hfu(
    model: str | Shape | Any,
    tokens_per_second: float,
    *,
    seq_len: int,
    peak: float | str | Card,
    recompute: str,
    gpus: int = 1,
    attention: bool = True,
    causal: bool = False,
    counted: str = "matrices",
    frozen: bool = False,
) -> Utilization:
    """Hardware FLOPs utilisation: what is recomputed counts too, so it is never below `mfu`.

    What flash attention recomputes inside its own backward kernel is not counted. Arguments as of `mfu`.
    """
    return _of_run(model, tokens_per_second, seq_len, peak, gpus, recompute, attention, causal, counted, frozen, "HFU")


def _of_run(model, tokens_per_second, seq_len, peak, gpus, recompute, attention, causal, counted, frozen, kind="MFU"):
    positive(tokens_per_second=tokens_per_second, gpus=gpus)
    shape = shape_of(model)
    per_token = flops_per_token(
        shape, seq_len, recompute=recompute, attention=attention, causal=causal, counted=counted, frozen=frozen
    )
    which = {
        "matrices": "that multiply, output layer included",
        "all": "in all",
        "without_embedding": "without embeddings",
    }
    words = [
        f"{kind}, {4 if frozen else 6} FLOPs x {sum(weights_counted(shape, counted)):,} parameters {which[counted]}",
        f"attention over {'the keys in sight' if causal else 'all keys'} of {seq_len:,} tokens"
        if attention
        else "no attention",
    ]
    if kind == "HFU":
        words.append(
            {"none": "nothing recomputed", "selective": "attention recomputed", "full": "blocks recomputed"}[recompute]
        )
    return utilization(tokens_per_second * per_token / gpus, peak, ", ".join(words))
