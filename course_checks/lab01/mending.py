"""Lab 1, exercise 3: a public tool's estimate of training memory, and what it leaves out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import Contract, fresh_seed, number, refused, slip_hints
from course_checks.lab01 import measured
from course_checks.lab01.common import lab
from course_lib.memory import timeline
from course_lib.observe.memory import AllocatorLog
from course_lib.units import nice_bytes

TOLERANCE = 0.02
REFUSED = "you ask the course's calculator or its instruments: here you work the bytes out from the arguments"
GIVEN = (  # what each way to an answer that is not the learner's own goes through
    (sys.modules["course_lib.memory.estimate"], "breakdown_of"),
    (timeline, "check_sizes"),
    (AllocatorLog, "__enter__"),
)
TINY = (128, 4, 2, 352)


class Case(NamedTuple):
    """A Llama, widths as (hidden, heads, kv_heads, intermediate); micro-batches of rows x length tokens; Adam's moments."""

    layers: int
    widths: measured.Widths
    vocab: int
    rows: int
    length: int
    moments: int = 2
    micro_batches: int = 1

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.widths[0]}, vocabulary {self.vocab}, {self.micro_batches} micro-batch(es) of "
            f"{self.rows * self.length} tokens, {self.moments} moment(s)"
        )

    @property
    def weights(self) -> int:
        model = measured.model_of(self.layers, self.widths, self.vocab, self.length, device="meta")
        return 4 * model.num_parameters()


CASES = (
    Case(4, TINY, 256, 1, 16),  # few tokens: the optimizer's step is the worst moment, and the tool is right
    Case(4, TINY, 256, 1, 16, moments=3),  # the same with AMSGrad
    Case(1, (256, 4, 2, 352), 4000, 1, 100, moments=1),  # a wide model with momentum only: the step again
    Case(4, TINY, 256, 4, 128),  # activations
    Case(2, (64, 4, 2, 176), 4096, 1, 56),  # logits
    Case(12, (64, 4, 4, 176), 256, 2, 64, moments=3),  # many thin layers
    Case(4, TINY, 256, 4, 128, micro_batches=5),  # the second micro-batch finds the first one's gradients
    Case(3, (96, 6, 2, 256), 2048, 1, 200, moments=1, micro_batches=2),
    Case(1, (128, 4, 1, 128), 512, 4, 256, moments=1),  # one wide, short block: here the last norm counts
)


def peak(case: Case, slip: str = "") -> float:
    """Bytes at the worst of two moments, the loss's backward and the optimizer's step, with this slip made."""
    hidden, heads, kv_heads, intermediate = case.widths
    tokens, weights = case.rows * case.length, case.weights
    if slip == "tool":
        return 4 * weights
    keys = kv_heads * hidden // heads
    block = 4 * tokens * (2 * (3 * hidden + 1) + 2 * hidden + 2 * keys + heads + 4 * intermediate)
    batch = case.layers * block + 4 * tokens * (3 * hidden + (1 if slip == "logits once" else 3) * case.vocab)
    gradients = weights if slip == "sum" or (case.micro_batches > 1 and slip != "no accumulation") else 0
    return max(weights * (1 + case.moments) + gradients + batch, weights * (2 + case.moments))


SENTENCES = {
    "tool": "this is the tool's own number, right for a tiny batch and Adam: the batch is not in it",
    "sum": "you add gradients and activations where there is one micro-batch: they are not there at one time",
    "no accumulation": "from the second micro-batch on, the first one's gradients are there when the next loss is computed",
    "logits once": "the logits count once; at the loss's worst moment there are three tensors of their size, in fp32",
}


@lab.exercise("A public tool's estimate, repaired", importance=4, difficulty=3, minutes=15)
def corrected_estimate(corrected: Callable[..., Any]) -> str:
    """Within 2% of the peak that the allocator saw in a real step, for ten models, batches and optimizers, one of them drawn."""
    cases = [*CASES, CASES[3]._replace(length=100 + fresh_seed() % 100)]
    yours = []
    for case in cases:
        config = measured.model_of(case.layers, case.widths, case.vocab, case.length, device="meta").config
        with refused(REFUSED, *GIVEN):
            answer = corrected(case.weights, config, case.rows * case.length, case.moments, case.micro_batches)
        yours.append(number(answer, "the corrected estimate"))
    contract = Contract(slip_hints(peak, SENTENCES, cases, yours, 0.01))
    seen = [measured.step_peak(*case) for case in cases]
    for case, mine, truth in zip(cases, yours, seen, strict=True):
        story = f"{case}: the allocator saw {nice_bytes(truth)} and you have {nice_bytes(mine)}, {mine / truth:.1%}"
        contract.holds(abs(mine / truth - 1) <= TOLERANCE, story)
    off = max(abs(mine / truth - 1) for mine, truth in zip(yours, seen, strict=True))
    tool = ", ".join(f"{4 * case.weights / truth:.0%}" for case, truth in zip(cases, seen, strict=True))
    return f"within {off:.1%} of the peaks of {len(cases)} real steps; the tool gives {tool} of them"
