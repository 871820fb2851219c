"""Lab 1, exercise 3: what autograd keeps of one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import NotYet, named_mistake, number
from course_checks.lab01 import measured
from course_checks.lab01.common import NO_SLIP, Slips, factor, far, gib, lab


class Case(NamedTuple):
    """A batch through a block."""

    rows: int
    length: int
    widths: measured.Widths
    attention: str

    def __str__(self) -> str:
        hidden, heads, kv_heads, head_dim, intermediate = self.widths
        return (
            f"{self.rows} x {self.length} tokens, hidden {hidden}, {heads} heads of {head_dim} ({kv_heads} for keys and "
            f"values), intermediate {intermediate}, {self.attention} attention"
        )


CASES = [
    Case(rows, length, widths, attention)
    for rows, length, widths in (
        (2, 48, (64, 4, 2, 16, 176)),
        (1, 130, (96, 6, 3, 16, 160)),
        (3, 17, (64, 8, 2, 16, 200)),  # 8 heads of 16: 128 wide, twice hidden
    )
    for attention in ("flash", "eager")
]
SENTENCES = {
    "silu": "SwiGLU keeps four tensors of tokens x intermediate, and you have three: gate, silu(gate), up, and their "
    "product, which is down_proj's input",
    "mlp two": "SwiGLU keeps four tensors of tokens x intermediate, and you have two: gate, silu(gate), up, product",
    "norms once": "each norm keeps three tensors of tokens x hidden, and you have one: its input, the normalised input "
    "(for its weight's gradient), and its output, which is the next matrices' input",
    "norms twice": "each norm keeps three tensors of tokens x hidden, and you have two: its input, the normalised input, "
    "and its output, which is the next matrices' input",
    "rstd": "each norm keeps one number a token, its 1/rms: 4 bytes a token a norm",
    "rotary": "queries and keys are kept once, after the rotary embedding: before it, nobody needs them in backward",
    "lse": "flash attention keeps the log-sum-exp of each token's scores: 4 bytes a token a head",
    "out": "attention's output is kept, too: o_proj's input, tokens x heads x head_dim",
    "residual": "the block's output is counted by the next block, whose input it is: leave it out here",
    "scores": "flash attention never writes the scores out: no term with tokens x seq_len",
    "no softmax": "eager attention keeps the softmax's output, tokens x heads x seq_len",
    "raw scores": "eager attention keeps softmax's output and not the scores before it: softmax's backward needs its "
    "output only",
    "gqa": "flash attention keeps keys and values with kv_heads heads, not repeated to all heads",
    "eager gqa": "eager attention repeats keys and values to all heads, and keeps what it repeated",
    "hidden": "queries and attention's output are heads x head_dim wide, which need not be hidden",
}
UNITS = {
    0.25: "you count elements: an element of fp32 has 4 bytes",
    0.5: "half of it: these are the bytes of bf16, and the block runs in fp32",
}


def kept(case: Case, slips: Slips) -> float:
    """Bytes in fp32, with these slips made."""
    hidden, heads, kv_heads, head_dim, intermediate = case.widths
    tokens, flash = case.rows * case.length, case.attention == "flash"
    wide = hidden if "hidden" in slips else heads * head_dim
    each = 1 if "norms once" in slips else 2 if "norms twice" in slips else 3
    norms = 2 * each * hidden + (0 if "rstd" in slips else 2)
    repeated = "gqa" in slips if flash else "eager gqa" not in slips
    narrow = wide if repeated else kv_heads * head_dim
    attention = wide + 2 * narrow + (0 if "out" in slips else wide)
    if "rotary" in slips:
        attention += wide + kv_heads * head_dim
    if flash:
        attention += (0 if "lse" in slips else heads) + (heads * case.length if "scores" in slips else 0)
    else:
        times = 0 if "no softmax" in slips else 2 if "raw scores" in slips else 1
        attention += times * heads * case.length
    mlp = (2 if "mlp two" in slips else 3 if "silu" in slips else 4) * intermediate
    return 4 * tokens * (norms + attention + mlp + (hidden if "residual" in slips else 0))


@lab.exercise("What autograd keeps of a block", importance=5, difficulty=4, minutes=30)
def block_activations(activations: Callable[..., Any]) -> str:
    """To the byte what saved-tensor hooks count on a real Llama, at three shapes, with flash and eager attention."""
    yours = [
        number(
            activations(case.rows * case.length, case.length, *case.widths, attention=case.attention),
            "what a block keeps",
        )
        for case in CASES
    ]
    counted = [measured.block_activations(*case) for case in CASES]
    wrong = far(yours, counted)
    if not wrong:
        return f"six blocks to the byte; {CASES[0].rows} x {CASES[0].length} tokens keep {counted[0]:,} bytes with flash attention"
    case, mine, truth = CASES[wrong[0]], yours[wrong[0]], counted[wrong[0]]
    short = f"{case}: autograd kept {truth:,} bytes and you have {mine:,.0f}"
    why = factor(yours, [kept(case, NO_SLIP) for case in CASES], UNITS) or named_mistake(yours, kept, CASES, SENTENCES)
    right = len(CASES) - len(wrong)
    raise NotYet(f"{short}: {why or f'{gib(abs(mine - truth))} apart, {right} of {len(CASES)} blocks right'}")
