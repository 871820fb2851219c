"""Lab 1, exercise 1: the parameters of a Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, named_mistake, number
from course_checks.lab01.common import Slips, lab
from course_checks.lab01.published import PARAMETERS

SENTENCES = {
    "12lh^2": "12 x layers x hidden^2 is a GPT's block (MLP of 4 x hidden, no gate, no grouped heads), not a Llama's",
    "gqa": "keys and values have kv_heads heads, fewer than the queries have (grouped-query attention)",
    "head_dim": "queries are heads x head_dim wide, which need not be hidden (Mistral-Nemo: 4,096 and 5,120)",
    "gate": "the MLP has three matrices, not two: gate, up and down",
    "o": "attention's output matrix (o_proj) is missing",
    "norms": "the norms are missing: two a block and one at the end, hidden each",
    "block norms": "the norms of the blocks are missing: two a block, hidden each",
    "one norm": "a block has two norms, one before attention and one before the MLP",
    "last norm": "the last norm, after all blocks, is missing: hidden more",
    "norm bias": "an RMSNorm has a weight and no bias: hidden each, not 2 x hidden",
    "tied": "a tied output layer is the embedding's own matrix: count it once",
    "untied": "the output layer is missing: where it is not tied, it is a second matrix of vocab x hidden",
    "embedding": "the embedding is missing: vocab x hidden",
    "biases": "a Llama has no biases",
}


def parameters(case: tuple[int, int, int, int, int, int, int, bool], slips: Slips) -> int:
    """Elements of all tensors, with these slips made."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tied = case
    if "head_dim" in slips:
        head_dim = hidden // heads
    wide, narrow = heads * head_dim, (heads if "gqa" in slips else kv_heads) * head_dim
    attention = hidden * wide * (1 if "o" in slips else 2) + 2 * hidden * narrow
    mlp = (2 if "gate" in slips else 3) * hidden * intermediate
    norm = hidden * (2 if "norm bias" in slips else 1)
    norms = 0 if slips & {"norms", "block norms"} else norm * (1 if "one norm" in slips else 2)
    biases = wide + 2 * narrow + 2 * hidden + 2 * intermediate if "biases" in slips else 0
    block = 12 * hidden**2 if "12lh^2" in slips else attention + mlp + norms + biases
    matrices = 2 if (not tied or "tied" in slips) and "untied" not in slips else 1
    matrices -= "embedding" in slips
    last = 0 if slips & {"norms", "last norm"} else norm
    if "12lh^2" in slips:
        last = 0
    return layers * block + matrices * vocab * hidden + last


@lab.exercise("The parameters of a Llama", importance=5, difficulty=2, minutes=15)
def count_parameters(count: Callable[..., Any]) -> str:
    """Equal to the published count of seven checkpoints, to the last parameter."""
    cases = [widths for widths, _ in PARAMETERS.values()]
    truth = [published for _, published in PARAMETERS.values()]
    yours = [number(count(*widths), f"{name}'s count") for name, widths in zip(PARAMETERS, cases, strict=True)]
    if yours == truth:
        return f"{len(truth)} published models to the last parameter, Llama-3.1-8B with {truth[2]:,}"
    name, mine, wanted = next(row for row in zip(PARAMETERS, yours, truth, strict=True) if row[1] != row[2])
    short = f"{name} has {wanted:,} parameters and you count {mine:,}"
    why = named_mistake(yours, parameters, cases, SENTENCES, together=3)
    if why:
        raise NotYet(f"{short}: {why}")
    right = [name for name, mine, wanted in zip(PARAMETERS, yours, truth, strict=True) if mine == wanted]
    also = f"; {', '.join(right)} {'is' if len(right) == 1 else 'are'} right" if right else ""
    raise NotYet(f"{short}, {abs(mine - wanted):,} too {'many' if mine > wanted else 'few'}{also}")
