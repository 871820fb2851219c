"""Lab 4, exercises 3 to 5: who trains on which samples, and how many at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from course_checks.harness import ATOL, RTOL, NotYet, close, nothing, ratio_hint, returned, run_ranks
from course_checks.lab04 import on_ranks
from course_checks.lab04.common import lab


@lab.exercise("A sampler for uneven shards", importance=4, difficulty=2, minutes=15)
def sampler(make_sampler: Callable[..., Any]) -> str:
    """Every sample exactly once an epoch over all ranks; another order each epoch; shards within one of each other."""
    for num_samples, ranks in ((12, 1), (12, 4), (10, 4), (7, 3), (2, 3), (101, 8)):
        epochs = []
        for epoch in (0, 1):
            shards = []
            for rank in range(ranks):
                one = make_sampler(num_samples, rank, ranks, seed=3)
                if one is None or one is ...:
                    raise nothing("the sampler")
                one.set_epoch(epoch)
                shards.append([int(i) for i in one])
                if len(one) != len(shards[-1]):
                    raise NotYet(f"len() says {len(one)} and rank {rank} gives {len(shards[-1])} samples")
            _right_shards(shards, num_samples, ranks)
            epochs.append(shards)
        if num_samples > 50 and epochs[0] == epochs[1]:
            raise NotYet("epoch 1 has the order of epoch 0: the permutation must depend on set_epoch's number")
        if num_samples > 50 and sorted(epochs[0][0]) == sorted(epochs[1][0]) and ranks > 1:
            raise NotYet("a rank sees the same samples every epoch: shuffle first, then cut, so that shards change too")
        if num_samples > 50 and _flat(epochs[0]) == list(range(num_samples)):
            raise NotYet("the samples come in their stored order: shuffle them with a generator seeded by seed + epoch")
    return "each of 101 samples once on 8 ranks, shards of 12 and 13; another order, and other shards, every epoch"


def _flat(shards: Iterable[list[int]]) -> list[int]:
    return [i for shard in shards for i in shard]


def _right_shards(shards: list[list[int]], num_samples: int, ranks: int) -> None:
    every = _flat(shards)
    twice = len(every) - len(set(every))
    case = f"{num_samples} samples on {ranks} ranks"
    if twice and num_samples % ranks and len(every) == math.ceil(num_samples / ranks) * ranks:
        raise NotYet(f"{case}: {twice} samples come twice: that is DistributedSampler's padding; leave shards uneven")
    if twice:
        raise NotYet(
            f"{case}: {twice} samples come twice and {num_samples - len(set(every))} never: every rank must cut the "
            "same permutation, so seed it alike on all ranks"
        )
    if len(every) < num_samples:
        raise NotYet(f"{case}: {num_samples - len(every)} samples are never seen: the rest of the division is dropped")
    if set(every) != set(range(num_samples)):
        raise NotYet(f"{case}: {max(every)} is no index of a data set of {num_samples}")
    if max(map(len, shards)) - min(map(len, shards)) > 1:
        raise NotYet(
            f"{case}: shards of {[len(s) for s in shards]}: they may differ by one, or ranks wait for the longest"
        )


@lab.exercise("The mean over uneven shards", importance=4, difficulty=3, minutes=15)
def loss_weight(weight: Callable[..., Any]) -> str:
    """DDP's average over ranks of the weighted losses is the mean over all rows, also where shards are unequal."""
    for rows_by_rank in ([4, 4], [5, 3], [3, 3, 2], [4, 1, 1, 1]):
        run = run_ranks(on_ranks.uneven, weight, rows_by_rank, ranks=len(rows_by_rank), timeout=8)
        for rank, told in enumerate(run.results):
            if told["weight"] is None:
                raise nothing("the weight")
            ranks, total = len(rows_by_rank), sum(rows_by_rank)
            table = {
                1 / ranks: "your gradients are world_size times too small: DDP divides by world_size once more, so "
                "multiply by it",
                ranks: "your gradients are world_size times too large",
            }
            hint = ratio_hint(told["got"], told["expected"], table)
            if hint:
                raise NotYet(hint)
            if abs(told["weight"] - 1) < 1e-9 and len(set(rows_by_rank)) > 1:
                raise NotYet(
                    f"shards of {rows_by_rank} rows, every weight 1: a row on a small shard then counts more than one "
                    "on a large shard"
                )
            right = rows_by_rank[rank] * ranks / total
            close(
                told["weight"], right, rtol=1e-6, what=f"the weight of rank {rank} with shards of {rows_by_rank} rows"
            )
            close(
                told["got"], told["expected"], rtol=RTOL, atol=ATOL, what=f"shards of {rows_by_rank} rows, the gradient"
            )
    return "equal to the mean over all rows for shards of 5 and 3, of 3, 3 and 2, and of 4, 1, 1 and 1"


PLANS = {  # (global_batch, machines, gpus a machine, largest micro_batch) -> (micro_batch, accumulate) or None
    (8, 1, 2, 4): (4, 1),
    (64, 1, 2, 4): (4, 8),
    (512, 4, 8, 4): (4, 4),  # 32 processes at 8 GPUs a machine are 4 machines, not 2
    (512, 2, 8, 4): (4, 8),
    (96, 1, 4, 10): (8, 3),
    (56, 1, 8, 4): (1, 7),
    (1024, 16, 8, 64): (8, 1),
    (100, 1, 8, 4): None,
    (4, 1, 8, 4): None,
}


@lab.exercise("The effective batch", importance=4, difficulty=1, minutes=10)
def batch_plan(plan: Callable[..., Any]) -> str:
    """The largest micro-batch that fits and multiplies to the global batch exactly; ValueError where none does."""
    for case, wanted in PLANS.items():
        shown = "global_batch={}, machines={}, gpus_per_machine={}, max_micro_batch={}".format(*case)
        try:
            answer = plan(*case)
        except ValueError:
            if wanted is not None:
                raise NotYet(f"{shown}: you refuse, and {wanted} works") from None
            continue
        answer = returned(answer, tuple, "the plan")
        if wanted is None:
            raise NotYet(f"{shown}: {answer} cannot give that batch; raise ValueError when no whole numbers do")
        if len(answer) != 2 or not all(isinstance(n, int) for n in answer):
            raise NotYet(f"{shown}: give two whole numbers (micro_batch, accumulate), not {answer}")
        _right_plan(answer, wanted, case, shown)
    return "nine clusters, among them 32 processes on machines of 8 GPUs, and two batches that no plan gives"


def _right_plan(answer: tuple[int, int], wanted: tuple[int, int], case: tuple[int, ...], shown: str) -> None:
    global_batch, machines, gpus, largest = case
    micro_batch, accumulate = answer
    product = micro_batch * accumulate * machines * gpus
    if product != global_batch and micro_batch * accumulate * gpus == global_batch:
        raise NotYet(f"{shown}: {answer} forgets the machines: ranks are machines x GPUs a machine")
    if product != global_batch:
        raise NotYet(
            f"{shown}: {micro_batch} x {accumulate} x {machines * gpus} ranks is {product}, not {global_batch}"
        )
    if micro_batch > largest:
        raise NotYet(f"{shown}: a micro-batch of {micro_batch} does not fit; {largest} is the most")
    if answer != wanted:
        raise NotYet(
            f"{shown}: {answer} works, and {wanted} needs fewer passes: take the largest micro-batch that fits"
        )
