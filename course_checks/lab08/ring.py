"""Lab 8, stretch: attention that takes in one block of keys after the other, whatever their positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_checks.harness import Contract, fresh, fresh_seed, named_seed, returned
from course_checks.lab08.common import lab

HEADS, WIDTH, RANKS, LENGTH = 2, 8, 4, 48
CASES = (("zigzag", 0), ("any order", 0), ("interleaved", 1000), ("any order", -1000))  # positions, offset of scores
SLIPS = {
    "added": "what was there keeps its weight: scale it down to its share of the new sum of exponentials",
    "block": "the new block counts as if it were alone: scale it down to its share of the new sum of exponentials",
    "replaced": "lse is that of the new block alone: the earlier keys' exponentials belong to the sum",
    "index": "compare positions, not places in the block",
    "strict": "a query sees the key at its own position, too",
    "all": "a query sees no key after its own position",
    "scale": "divide the scores by the root of the width",
}
HINTS = {
    "exp overflows, or all of them are 0: subtract the largest score first": lambda f: (
        f["offset"] > 0 or f["offset"] and not f["nan"]
    ),
    "-inf minus -inf is NaN: what if a query sees no key of the block, or none so far?": lambda f: f["nan"],
    **{words: lambda f, slip=slip: f["near"](slip) for slip, words in SLIPS.items()},
}


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float = WIDTH**-0.5) -> tuple[Tensor, Tensor]:
    """Out and lse of these keys; seen (queries, keys). Queries without a key get 0 and -inf."""
    some = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen | ~some, scale=scale)[0]
    lse = (q @ k.mT * scale).masked_fill(some & ~seen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(some, out, 0.0), torch.where(some, lse, -torch.inf)


def slipped(slip: str, out: Tensor, lse: Tensor, *block: Tensor) -> tuple[Tensor, Tensor]:
    """A step with one mistake made; block is q, k, v, q_at, k_at."""
    *qkv, q_at, k_at = block
    seen = (k_at < q_at[:, None]) if slip == "strict" else (k_at <= q_at[:, None]) | (slip == "all")
    seen = torch.ones_like(seen).tril() if slip == "index" else seen
    new_out, new_lse = attention(*qkv, seen, 1.0 if slip == "scale" else WIDTH**-0.5)
    both = torch.logaddexp(lse, new_lse)
    old, new = ((part - both).exp().nan_to_num(0.0) for part in (lse, new_lse))
    merged = out * (1 if slip == "added" else old) + new_out * (1 if slip == "block" else new)
    return merged, new_lse if slip == "replaced" else both


def positions(name: str, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Of a rank's queries, and of each block of keys as they arrive; the rank's own block is the second."""
    draw = torch.Generator().manual_seed(seed)
    anyhow, order = (torch.randperm(n - 1, generator=draw) + 1 for n in (LENGTH, RANKS))
    if name == "any order":  # one query is at 0, where no key is
        return torch.cat([anyhow[:8], anyhow[:1] * 0]), list(anyhow.split([7, 20, 1, LENGTH - 29]))
    chunks = torch.arange(LENGTH).chunk(2 * RANKS)  # zigzag: each rank has an early and a late one
    zigzag = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(RANKS)]
    parts = zigzag if name == "zigzag" else torch.arange(LENGTH).view(-1, RANKS).T
    return parts[0], [parts[rank] for rank in (order[0], 0, *order[1:])]


def in_one_process(step: Callable[..., Any], name: str, offset: int, seed: int) -> None:
    """Out and lse after every block, and the gradients at the end."""
    at, blocks = positions(name, seed)
    sizes, about, double = (len(at), LENGTH, LENGTH), f"{name}, scores around {offset}", torch.float64
    q, k, v = leaves = [fresh((HEADS, size, WIDTH), seed, part, dtype=double) for part, size in enumerate(sizes)]
    if offset:
        q[..., 0], k[..., 0] = abs(offset) ** 0.5, offset / abs(offset) ** 0.5 * WIDTH**0.5
    mine = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    wrong, (for_out, for_lse) = dict.fromkeys(SLIPS, mine), fresh((2, *q.shape), seed, 9, dtype=double)
    within, facts = {"rtol": 2e-4, "atol": 1e-5 * max(1, abs(offset))}, {"offset": offset}
    for leaf in leaves:
        leaf.requires_grad_()
    for number, now in enumerate(blocks, 1):
        contract, so_far = Contract(HINTS, facts, f"{about}, after block {number}"), torch.cat(blocks[:number])
        block = q, k[:, now], v[:, now], at, now
        right = attention(q, k[:, so_far], v[:, so_far], so_far <= at[:, None])
        if offset < 0 and number == 1:  # blocks that the answer has never seen count, too
            mine, wrong = right, dict.fromkeys(SLIPS, right)
            continue
        mine = returned(step(*mine, *block), tuple, "the pair (out, lse)")
        contract.holds(len(mine) == 2 and all(isinstance(part, Tensor) for part in mine), "return out and lse")
        wrong = {slip: slipped(slip, *was, *block) for slip, was in wrong.items()}
        facts["nan"] = any(part.isnan().any() for part in mine)
        facts["near"] = lambda slip, w=wrong, m=mine, r=right: _near(m, w[slip], 1e-4) and not _near(r, w[slip], 1e-3)
        for what, yours, wanted in zip(("out", "lse"), mine, right, strict=True):
            contract.values(what, yours, wanted, **within)
            contract.holds(yours.requires_grad, f"no gradient flows back from {what}")
    some = right[1].isfinite()
    sums = [(out * for_out).sum() + (lse * for_lse[..., :1])[some].sum() for out, lse in (mine, right)]
    yours, wanted = (torch.autograd.grad(total, leaves, allow_unused=True) for total in sums)
    contract = Contract(HINTS, facts, f"{about}, backward")
    for what, gradient, due in zip("qkv", yours, wanted, strict=True):
        contract.holds(gradient is not None, f"no gradient reaches {what}")
        facts["nan"] = gradient.isnan().any()
        contract.values(f"the gradient of {what}", gradient, due, **within)


def _near(mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], within: float) -> bool:
    return all(torch.allclose(a.double(), b, rtol=within, atol=within) for a, b in zip(mine, other, strict=True))


@lab.exercise("Stretch: one step of a zigzag ring", importance=3, difficulty=3, minutes=15)
def ring_step(step: Callable[..., Any]) -> str:
    """The attention over all keys that have come, after every block, and its gradients."""
    seed = fresh_seed()
    with named_seed(seed):
        for name, offset in CASES:
            in_one_process(step, name, offset, seed)
    return (
        f"{RANKS} blocks of a zigzag ring, of interleaved tokens and in any order: after every block out and lse are those of all "
        "keys so far, gradients too, with scores around ±1,000"
    )
