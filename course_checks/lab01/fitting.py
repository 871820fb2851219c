"""Lab 1, exercise 5: the cheapest changes with which a run fits a card, by the house's prices and the learner's margin."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from course_checks.harness import Contract, fresh_seed, number, returned
from course_checks.lab01.common import lab
from course_lib.memory import card, estimate
from course_lib.units import nice_bytes

CHANGES: dict[str, tuple[int, dict[str, str]]] = {  # price in percent, settings; no two sets that can be cost the same
    "fused loss": (1, {"loss": "fused"}),
    "bf16 moments": (3, {"optimizer": "adamw_bf16"}),
    "8-bit Adam": (5, {"optimizer": "adamw8bit"}),
    "two micro-batches": (8, {}),  # half of the sequences in each
    "all in bf16": (15, {"precision": "bf16"}),
    "checkpointing": (30, {"activation_checkpointing": "full"}),
    "LoRA": (60, {"method": "lora"}),
}
SETS = {frozenset(s): sum(CHANGES[c][0] for c in s) for n in range(len(CHANGES)) for s in combinations(CHANGES, n)}
SETS = {s: SETS[s] for s in sorted(SETS, key=SETS.get) if not s >= {"bf16 moments", "8-bit Adam"}}  # the cheapest first
MODELS = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-1.7b", "smollm2-1.7b", "tinyllama-1.1b")
SIZES = [(on, *size) for on in ("rtx3090", "22GiB", "17.5GiB") for size in ((2, 2048), (3, 1536), (4, 2048))]
WAYS: dict[str, dict[str, Any]] = {  # what a learner may do wrong, and how to ask `_need` for what comes of it
    "compare `device`, not `peak`: the allocator and CUDA want room, too": {"of": "peak"},
    "each of two micro-batches has half of the sequences": {"halves": 1},
    "whoever accumulates keeps gradients through every forward: set num_microbatches": {"microbatches": 1},
}


@dataclass(frozen=True)
class Job:  # a run that somebody wants, all sequences in one forward pass
    model: str
    card: str  # a name, or an amount such as "22.5GiB"
    sequences: int
    seq_len: int = 2048
    method: str = "full"
    precision: str = "bf16-mixed"


JOBS = (Job("llama-3.2-1b", "rtx4090", 2), Job("llama-3.2-3b", "l4", 1), Job("smollm2-1.7b", "a10g", 4))


def _need(job: Job, names: frozenset[str], of: str = "device", microbatches: int = 2, halves: int = 2) -> int:
    settings = {"method": job.method, "precision": job.precision, "seq_len": job.seq_len}
    settings["micro_batch_size"] = job.sequences
    if "two micro-batches" in names:
        settings |= {"micro_batch_size": job.sequences // halves, "num_microbatches": microbatches}
    for name in names:
        settings |= CHANGES[name][1]
    return getattr(estimate(job.model, **settings), of)


def _can_be(job: Job, names: frozenset[str], odd: bool = False) -> bool:
    halves_an_odd_number = "two micro-batches" in names and job.sequences % 2
    return names in SETS and (odd or not halves_an_odd_number)


def _best(job: Job, free: float, odd: bool = False, **wrong: Any) -> frozenset[str] | None:
    room = card(job.card).memory * (1 - free)
    return next((names for names in SETS if _can_be(job, names, odd) and _need(job, names, **wrong) <= room), None)


def _fresh_jobs(free: float, draw: random.Random) -> list[Job]:
    """Some that each wrong way gets wrong, two on the margin's edge, and one that cannot fit."""
    drawn = [Job(model, *size) for model in MODELS for size in SIZES]
    draw.shuffle(drawn)
    wrong_bests = [lambda job: _best(job, 0.0), lambda job: _best(job, free, odd=True)]
    wrong_bests += [lambda job, way=way: _best(job, free, **way) for way in WAYS.values()]
    jobs = [next((job for job in drawn if wrong(job) != _best(job, free)), drawn[0]) for wrong in wrong_bests]
    jobs += [Job("llama-3.2-3b", "rtx4090", 2, method="lora"), Job("llama-3.2-1b", "12GiB", 2, precision="bf16")]
    edge = _need(drawn[0], _best(drawn[0], free)) / (1 - free) / 2**30
    jobs += [replace(drawn[0], card=f"{edge * nudge:.4f}GiB") for nudge in (1.0005, 0.9995)]
    return [*jobs, Job("qwen2.5-14b", f"{draw.randint(150, 240) / 10}GiB", 2, 4096)]


@lab.exercise("Make it fit 24 GB", importance=5, difficulty=3, minutes=15)
def cheapest(choose: Callable[..., Any]) -> str:
    """The announced jobs, and ten fresh ones."""
    hints = {say: lambda f, w=w: _need(*f["of"], **w) == f["claim"] != f["need"] for say, w in WAYS.items()}
    hints["that is the answer without your margin"] = lambda f: f["of"][1] == _best(f["of"][0], 0.0) != f["best"]
    contract = Contract(hints)
    for job in JOBS:
        _judge(choose, job, contract)
    free = contract.facts["free"]
    fresh = _fresh_jobs(free, random.Random(fresh_seed()))
    for job in fresh:
        _judge(choose, job, contract)
    told = [f"{len(JOBS) + len(fresh)} jobs with {free:.1%} free. What other margins would buy:"]
    for job in JOBS:
        told += [f"{job.model}, {n:2} % free: {' + '.join(sorted(_best(job, n / 100)))}" for n in (5, 10, 15)]
    return "\n".join(told)


def _judge(choose: Callable[..., Any], job: Job, contract: Contract) -> None:
    it, facts, holds = (
        f"{job.model}, {job.sequences} x {job.seq_len:,} tokens, {job.card}",
        contract.facts,
        contract.holds,
    )
    facts.pop("of", None)  # no hint about the job before
    try:
        answer = returned(choose(job), dict, f"your answer to {it}")
    except ValueError as error:
        holds(_best(job, facts.get("free", 0.2)) is None, f"{it}: it can fit, and you raise ValueError: {error}")
        holds(job.card in str(error), f"{it}: your ValueError does not name the card, {job.card!r}")
        return
    for key in ("changes", "free", "spare"):
        holds(key in answer, f"{it}: your dict lacks {key!r}")
    free, spare = number(answer["free"], f"'free' of {it}"), number(answer["spare"], f"'spare' of {it}")
    mine = frozenset(map(str, returned(answer["changes"], (list, tuple, set), f"'changes' of {it}")))
    one_share = 0.02 <= free <= 0.2 and free == facts.setdefault("free", free)
    holds(one_share, f"{it}: 'free' is {free:g}; decide for one share between 0.02 and 0.2, for all jobs")
    why = "two optimizers, or an odd number of sequences in halves?"
    holds(_can_be(job, mine), f"{it}: {sorted(mine)} cannot be made: {why}")
    memory, need, best = card(job.card).memory, _need(job, mine), _best(job, free)
    facts |= {"of": (job, mine), "claim": memory - spare, "need": need, "best": best}
    short = f"{it}: your set for {SETS[mine]} % needs {nice_bytes(need)} of {nice_bytes(memory)}, and you want {free:.1%} free"
    holds(need <= memory * (1 - free), short if best is not None else f"{short}; nothing does, so raise ValueError")
    holds(mine == best, f"{it}: your set costs {SETS[mine]} %, and one for {SETS[best]} % fits")
    left = memory - need
    holds(abs(left - spare) <= memory / 200, f"{it}: 'spare' is {spare:,.0f}, and {left:,} bytes are left")
