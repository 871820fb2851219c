"""Lab 1, exercise 4: the worst moment of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from course_checks.harness import NotYet, named_mistake, number
from course_checks.lab01 import measured
from course_checks.lab01.common import Slips, far, gib, lab


class Case(NamedTuple):
    """A loss over a batch. `held`: somebody still has the logits while backward runs."""

    tokens: int
    vocab: int
    dtype_bytes: int
    held: bool


CASES = [Case(*sizes, each, held) for sizes in ((96, 4096), (256, 1000)) for each in (4, 2) for held in (False, True)]
SENTENCES = {
    "logits only": "that is the logits alone; cross-entropy makes log-probabilities of them, and backward two more tensors "
    "as large, all in fp32",
    "forward": "that is the most of the forward pass; the worst moment is in backward, when log-probabilities, their "
    "gradient and the logits' gradient are there together",
    "one gradient": "backward makes two tensors beside the log-probabilities: the gradient of the log-probabilities, and "
    "of it that of the logits",
    "own type": "cross-entropy computes in fp32 whatever the logits' type: 4 bytes for each of its tensors, not dtype_bytes",
    "never held": "with held=True somebody still has the logits, dtype_bytes each, when backward begins",
    "always held": "with held=False nobody has the logits any more when backward begins: log_softmax keeps its output only",
    "held in fp32": "what is held are the logits in their own type, dtype_bytes each; their fp32 copy is gone after forward",
}


def peak(case: Case, slips: Slips) -> float:
    """Bytes at the worst moment, with these slips made."""
    each = case.dtype_bytes if "own type" in slips else 4
    held = (case.held or "always held" in slips) and "never held" not in slips
    kept = (4 if "held in fp32" in slips else case.dtype_bytes) * held
    tensors = 2 if "one gradient" in slips else 3
    a_logit = tensors * each + kept
    if "forward" in slips:  # log-probabilities, fp32 logits and, in bf16, the logits that these were cast from
        a_logit = 2 * each + (case.dtype_bytes if case.dtype_bytes < 4 else 0)
    if "logits only" in slips:
        a_logit = case.dtype_bytes
    return a_logit * case.tokens * case.vocab


@lab.exercise("The worst moment of the loss", importance=5, difficulty=3, minutes=15)
def logit_peak(worst: Callable[..., Any]) -> str:
    """What the allocator saw during a real cross-entropy, forward and backward, in fp32 and bf16, held or not."""
    yours = [number(worst(*case), "the peak of the loss") for case in CASES]
    dtypes = {4: torch.float32, 2: torch.bfloat16}
    seen = [measured.loss_peak(case.tokens, case.vocab, dtypes[case.dtype_bytes], case.held) for case in CASES]
    wrong = far(yours, seen, rtol=0.01)
    if not wrong:
        fp32, fp32_held, bf16, bf16_held = (held / CASES[0].tokens / CASES[0].vocab for held in seen[:4])
        return (
            f"the allocator saw {fp32:.2f} bytes a logit in fp32 and {bf16:.2f} in bf16; where the logits are held, "
            f"{fp32_held:.2f} and {bf16_held:.2f}"
        )
    case, mine, truth = CASES[wrong[0]], yours[wrong[0]], seen[wrong[0]]
    logits = case.tokens * case.vocab
    short = f"{case}: the allocator saw {gib(truth)}, {truth / logits:.1f} a logit, and you have {mine / logits:.3g}"
    why = named_mistake(yours, peak, CASES, SENTENCES, rtol=1e-3)
    raise NotYet(f"{short}: {why}" if why else f"{short}. Which tensors of tokens x vocab are there at that moment?")
