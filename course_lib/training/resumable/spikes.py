"""Detect spikes: losses that differ from those before by far more than these differ among themselves.

The median and the median absolute deviation (MAD) are used because the spike itself would move a mean and a standard
deviation. Large models were trained past spikes by skipping batches (PaLM: back to a checkpoint some 100 steps before, then
200 to 500 batches skipped; Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

SIGMA = 1.4826  # a normal distribution's standard deviation over its MAD


@dataclass(frozen=True)
class Verdict:
    """What a detector says of one step.

    Attributes:
        kind: ``"ok"``, ``"spike"`` or ``"nan"`` (not a number, or infinite).
        reason: one sentence; empty for ``"ok"``.
        in_a_row: how many steps up to this one were not ok.
    """

    kind: str
    reason: str = ""
    in_a_row: int = 0

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


class SpikeDetector:
    """Tells a spike before its update is applied; every rank that gives it the same numbers gets the same verdict.

    >>> detector = SpikeDetector()
    >>> detector.update(step, loss, norm).ok

    A loss is a spike where it is above ``median + threshold x max(1.4826 MAD, floor x median)`` of the last ``window``
    losses that were ok. Only a rise counts. A gradient norm is one above ``norm_factor`` medians. What is not finite is
    never ok, from the first step on; the rest needs ``grace`` losses first, because early ones fall fast.

    False alarms at the defaults, in 20,000 simulated steps each (``tests/test_spikes.py``): none on normal noise of 1, 5
    or 20% of the loss, none while it falls from 11 to 3; about 1 in 1,000 steps on noise with heavy tails (Laplace, 5%),
    each at the price of one good batch. A rise below ``threshold x floor`` (16%) is never told, and neither is a loss that
    climbs slowly: that is divergence, which no skipped batch heals.

    Args:
        window: losses to compare with.
        threshold: how many deviations a loss may lie above the median.
        floor: least deviation, as a share of the median: nearly equal losses make no alarm of a tiny rise.
        grace: losses to see before the first alarm.
        norm_factor: how many medians a gradient norm may reach.
    """

    def __init__(
        self,
        window: int = 32,
        threshold: float = 8.0,
        *,
        floor: float = 0.02,
        grace: int = 8,
        norm_factor: float = 10.0,
    ) -> None:
        if window < 4:
            raise ValueError(f"window={window}: give at least 4 losses, a median of fewer says little.")
        if not 1 <= grace <= window:
            raise ValueError(f"grace={grace}: give 1 to window={window} losses to see before the first alarm.")
        for name, value, least in (("threshold", threshold, 0), ("floor", floor, 0), ("norm_factor", norm_factor, 1)):
            if not (math.isfinite(value) and value > least):
                raise ValueError(f"{name}={value}: give a number above {least}.")
        self.window, self.threshold, self.floor = window, threshold, floor
        self.grace, self.norm_factor = grace, norm_factor
        self.losses: deque[float] = deque(maxlen=window)
        self.norms: deque[float] = deque(maxlen=window)
        self.in_a_row = 0

    @property
    def limit(self) -> float:
        """The loss above which the next one is a spike; infinite within the grace."""
        if len(self.losses) < self.grace:
            return math.inf
        middle = median(self.losses)
        deviation = SIGMA * median(abs(loss - middle) for loss in self.losses)
        return middle + self.threshold * max(deviation, self.floor * abs(middle))

    @property
    def norm_limit(self) -> float:
        """The gradient norm above which a step is a spike; infinite within the grace."""
        return self.norm_factor * median(self.norms) if len(self.norms) >= self.grace else math.inf

    def update(self, step: int, loss: float, norm: float | None = None) -> Verdict:
        """Judge one step by its loss and, where given, its gradient norm; what is ok joins the window."""
        verdict = self._judge(step, loss, norm)
        if verdict.ok:
            self.losses.append(loss)
            if norm is not None:
                self.norms.append(norm)
        self.in_a_row = verdict.in_a_row
        return verdict

    def _judge(self, step: int, loss: float, norm: float | None) -> Verdict:
        again = self.in_a_row + 1
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if value is not None and not math.isfinite(value):
                return Verdict("nan", f"step {step}: the {name} is {value}.", again)
        for name, value, limit, seen in (
            ("loss", loss, self.limit, self.losses),
            ("gradient norm", norm, self.norm_limit, self.norms),
        ):
            if value is not None and value > limit:
                told = f"{value:.4g} is above {limit:.4g}; the median of the last {len(seen)} is {median(seen):.4g}"
                return Verdict("spike", f"step {step}: the {name} {told}.", again)
        return Verdict("ok")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain JSON."""
        return {"losses": list(self.losses), "norms": list(self.norms), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.losses, self.norms = deque(state["losses"], self.window), deque(state["norms"], self.window)
        self.in_a_row = int(state["in_a_row"])
