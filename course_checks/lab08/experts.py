"""Lab 8, stretch: experts on several ranks with a fixed capacity, so that every message has the same size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_checks.harness import ATOL, RTOL, Contract, fresh, fresh_seed, in_bytes, named_seed, returned, run_ranks
from course_checks.lab08.common import lab
from course_lib.observe.collectives import record_collectives

OUT, GRADIENTS = "the output", ("x", "gates", "up", "down")


class Case(NamedTuple):
    ranks: int
    own: int
    hidden: int
    inner: int
    capacity: int


CASES = (Case(4, 2, 6, 10, 3), Case(2, 3, 5, 7, 4))
SLIPS = {
    "first": "the tokens that came first got the room: the largest gates should",
    "ungated": "multiply each result by its token's gate",
    "twice": "the gate is multiplied in twice",
    "input": "a dropped token comes back as it went in: its result is zeros, and its residual carries it on",
    "order": "a rank's experts got each other's rows: they arrive by rank first, and by expert within it",
}
HINTS = {
    **{words: lambda f, slip=slip: f["clause"] == OUT and f["near"](slip) for slip, words in SLIPS.items()},
    "the right results stand at the wrong tokens: remember which token is in which slot": lambda f: (
        f["clause"] == OUT and f["shuffled"]
    ),
    "no rank needs counts or anything else: with a capacity each message has the same size": lambda f: (
        f["clause"] == "forward" and len(f["sent"]) > 2
    ),
    "unused slots travel as zeros": lambda f: f["clause"] == "forward" and f["short"],
    "a plain all_to_all_single has no backward: gradients must travel, too": lambda f: (
        f["clause"] == "backward" and len(f["sent"]) < 2
    ),
}


def given(case: Case, seed: int, rank: int) -> tuple[torch.Tensor, ...]:
    """x, gates, up, down and the output's gradient: one expert is overfull, and one gets no token of this rank."""
    tokens, experts = 3 * case.capacity + 5 + 2 * rank, case.ranks * case.own
    logits, hot = fresh((tokens, experts), seed, rank) / 2, (rank * case.own + seed) % experts
    logits[: case.capacity + 1, hot] += 2
    logits[[0, -1], hot] = 6.0 + logits[[0, -1], hot].abs()  # whoever comes first, and last, has a large gate
    logits[:, (hot + 1) % experts] -= 2
    x, gradient = fresh((tokens, case.hidden), seed + 1, rank), fresh((tokens, case.hidden), seed + 2, rank)
    up = fresh((case.own, case.hidden, case.inner), seed + 3, rank) / 2
    return x, logits.softmax(1), up, fresh((case.own, case.inner, case.hidden), seed + 4, rank), gradient


def well_apart(case: Case, seed: int) -> bool:
    """No input of a relu is so near to 0 that rounding decides about its gradient."""
    x, _, up, *_ = map(torch.cat, zip(*(given(case, seed, rank) for rank in range(case.ranks)), strict=True))
    return bool((x @ up).abs().min() > 1e-5)


def one_process(case: Case, seed: int, slip: str = "") -> list[list[torch.Tensor]]:
    """Each rank's output and gradients of x, gates, up, down, with one mistake made or none."""
    every = [given(case, seed, rank) for rank in range(case.ranks)]
    leaves = [[tensor.double().requires_grad_() for tensor in parts[:4]] for parts in every]
    outs = []
    for rank, (x, gates, _, _) in enumerate(leaves):
        weight, chosen = gates.max(1)
        out = x * (slip == "input")
        for expert in range(case.ranks * case.own):
            line = (chosen == expert).nonzero()[:, 0]
            line = (line if slip == "first" else line[weight[line].argsort(descending=True)])[: case.capacity]
            home, local = divmod(expert, case.own)
            local = (rank * case.own + local) // case.ranks if slip == "order" else local
            rows = (x[line] @ leaves[home][2][local]).relu() @ leaves[home][3][local]
            power = {"ungated": 0, "twice": 2}.get(slip, 1)
            out = out.index_put((line,), rows * weight[line, None] ** power)
        outs.append(out)
    torch.autograd.backward(outs, [parts[4].double() for parts in every])
    return [[out.detach(), *(leaf.grad for leaf in mine)] for out, mine in zip(outs, leaves, strict=True)]


def on_a_rank(layer: Callable[..., Any], case: Case, seed: int) -> tuple[Any, ...]:
    """Output, gradients, the bytes of each collective forward and backward by kind, and whether the inputs are as before."""
    *inputs, upstream = given(case, seed, dist.get_rank())
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    dist.barrier()
    with record_collectives() as forward:
        out = returned(layer(*leaves, case.capacity), torch.Tensor, OUT)
    told = Contract()
    told.holds(out.shape == upstream.shape, f"{OUT} has the shape {tuple(out.shape)}, not {tuple(upstream.shape)}")
    told.holds(out.requires_grad, "no gradient flows back from the output")
    result = out.detach().clone()
    with record_collectives() as backward:
        out.backward(upstream)
    kept = all(torch.equal(leaf, tensor) for leaf, tensor in zip(leaves, inputs, strict=True))
    sent = [[(c.kind, c.bytes) for c in issued if c.kind != "barrier"] for issued in (forward, backward)]
    return result, [leaf.grad for leaf in leaves], *sent, kept


@lab.exercise("Stretch: experts with a capacity", importance=3, difficulty=4, minutes=20)
def switch_layer(layer: Callable[..., Any]) -> str:
    """One process's output and gradients, by two all-to-alls of a fixed size forward, and two backward."""
    seed, said = next(n for n in iter(fresh_seed, 0) if all(well_apart(case, n) for case in CASES)), ""
    with named_seed(seed):
        for case in CASES:
            expected = one_process(case, seed)
            slips = {slip: one_process(case, seed, slip) for slip in SLIPS}
            for rank, seen in enumerate(run_ranks(on_a_rank, layer, case, seed, ranks=case.ranks).results):
                evidence = _right(case, rank, seen, expected[rank], {slip: slips[slip][rank][0] for slip in SLIPS})
                said = said or evidence
    return said


def _right(case: Case, rank: int, seen: tuple[Any, ...], expected: list[torch.Tensor], slips: Any) -> str:
    out, gradients, forward, backward, kept = seen
    due = 4 * case.ranks * case.own * case.capacity * case.hidden
    contract = Contract(HINTS, {}, f"rank {rank} of {case.ranks}, capacity {case.capacity}")
    contract.facts["near"] = lambda slip: torch.allclose(out.double(), slips[slip], rtol=1e-4, atol=1e-5)
    contract.facts["shuffled"] = torch.allclose(out.double().sort(0)[0], expected[0].sort(0)[0], rtol=1e-4, atol=1e-5)
    contract.values(OUT, out, expected[0], rtol=RTOL, atol=10 * ATOL)
    for way, calls in (("forward", forward), ("backward", backward)):
        contract.facts["sent"] = [size for _, size in calls]
        contract.facts["short"] = any(kind == "all_to_all" and size < due for kind, size in calls)
        told = ", ".join(f"{kind} of {in_bytes(size)}" for kind, size in calls) or "nothing"
        sentence = f"{way} calls {told}; it should call all_to_all twice, {in_bytes(due)} each"
        contract.holds(calls == [("all_to_all", due)] * 2, sentence, way)
    for name, yours, wanted in zip(GRADIENTS, gradients, expected[1:], strict=True):
        contract.holds(yours is not None, f"no gradient reaches {name}", name)
        contract.values(f"the gradient of {name}", yours, wanted, rtol=RTOL, atol=10 * ATOL)
    contract.holds(kept, "the inputs have changed: the caller still needs them")
    dropped = int((expected[0] == 0).all(1).sum())
    return (
        f"output and gradients are one process's on 4 ranks and on 2; rank {rank} of {case.ranks} dropped {dropped} of "
        f"{len(out)} tokens, and put {in_bytes(due)} into each of 2 all-to-alls forward and 2 backward"
    )
