"""Lab 7, exercise 4: samples packed into rows, and what an epoch is then: how many steps, how much of it padding."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from course_checks.harness import NotYet, close, returned
from course_checks.lab07.common import lab
from course_lib.models.data import instructions


class Plan(NamedTuple):
    """What decides about an epoch's steps."""

    sequence_len: int
    micro: int
    ranks: int
    accumulate: int
    packing: bool


@lab.exercise("Packing, and the steps of an epoch", importance=4, difficulty=3, minutes=30)
def packing(pack: Callable[..., Any], epoch: Callable[..., Any]) -> str:
    """Bins against a reference, steps and padding of a dozen runs, the last of them with the course's own texts."""
    for lengths, capacity in BINS:
        _right_bins(pack(list(lengths), capacity), list(lengths), capacity)
    cases = epochs()
    told = [epoch(list(lengths), *plan) for lengths, plan in cases]
    for value in told:
        value = returned(value, (tuple, list), "what epoch() gives, two numbers,")
        if len(value) != 2:
            raise NotYet(f"epoch() should return (steps, padding), two numbers, not {str(value)[:60]}")
        returned(value[0], int, "the steps of an epoch")
    _right_steps([value[0] for value in told], cases)
    for value, (lengths, plan) in zip(told, cases, strict=True):
        padding = returned(value[1], (int, float), "the share of padding")
        _right_padding(padding, lengths, plan)
    lengths, (without, packed) = texts(), OWN
    return (
        f"the course's {len(lengths)} questions and answers at sequence_len 512, micro-batch 4, 2 ranks, accumulate 2: "
        f"{true_epoch(lengths, *without)[0]} steps an epoch and {true_epoch(lengths, *without)[1]:.0%} padding, packed "
        f"{true_epoch(lengths, *packed)[0]} steps and {true_epoch(lengths, *packed)[1]:.0%}"
    )


def true_pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit, longest first; samples longer than a bin are left out. Indices into ``lengths``."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            continue
        fits = next((b for b, room in enumerate(free) if room >= length), None)
        if fits is None:
            bins.append([index])
            free.append(capacity - length)
        else:
            bins[fits].append(index)
            free[fits] -= length
    return bins


def true_epoch(
    lengths: Sequence[int], sequence_len: int, micro: int, ranks: int, accumulate: int, packing: bool
) -> tuple[int, float]:
    """(steps of one epoch, share of the computed tokens that is padding)."""
    return _epoch(lengths, Plan(sequence_len, micro, ranks, accumulate, packing), ())


def _epoch(lengths: Sequence[int], plan: Plan, mistakes: tuple[str, ...]) -> tuple[int, float]:
    """With no mistake the truth; with one, what an answer with that mistake gives."""
    kept = [n for n in lengths if n <= plan.sequence_len] if "long" not in mistakes else list(lengths)
    if plan.packing:
        capacity = plan.sequence_len * (plan.micro if "row" not in mistakes else 1)
        bins = len(true_pack(kept, capacity))
        step = plan.ranks * plan.accumulate
        if "micro twice" in mistakes:
            step *= plan.micro
        if "row" in mistakes:
            step *= plan.micro
        slots = bins * capacity
    else:
        step = plan.micro * plan.ranks * plan.accumulate
        bins = len(kept)
        slots = bins * plan.sequence_len
    if "ranks" in mistakes:
        step //= plan.ranks
    if "accumulate" in mistakes:
        step //= plan.accumulate
    up, down = -(-bins // step), max(1, bins // step)
    if "up" in mistakes:
        steps = up
    elif "down" in mistakes:
        steps = down
    elif "nothing" in mistakes:
        steps = down if plan.packing and bins // step else up if not plan.packing else 0
    else:
        steps = down if plan.packing else up
    return steps, 1 - sum(kept) / slots


MISTAKES = {
    "ranks": "forgets that the ranks share the bins: a step takes one micro-batch of every rank",
    "accumulate": "forgets gradient accumulation: a step takes `accumulate` micro-batches of every rank",
    "micro twice": "counts the micro-batch twice: packed, a bin holds micro x sequence_len tokens, and is one micro-batch",
    "row": "packs rows of sequence_len tokens; Axolotl lays a whole micro-batch out as one row of micro x sequence_len",
    "long": "keeps samples longer than sequence_len; Axolotl drops them, also where a bin would have room",
    "up": "rounds up with packing too: Axolotl drops the last, incomplete step of a packed epoch",
    "down": "rounds down without packing too: there the last step is taken, with fewer samples",
    "nothing": "gives no step where the bins do not fill one: Axolotl takes at least one",
}


def _right_steps(steps: list[int], cases: list[tuple[Sequence[int], Plan]]) -> None:
    expected = [true_epoch(lengths, *plan)[0] for lengths, plan in cases]
    if steps == expected:
        return
    for mistake, words in MISTAKES.items():
        if steps == [_epoch(lengths, plan, (mistake,))[0] for lengths, plan in cases]:
            raise NotYet(f"your number of steps {words}")
    for mine, right, (lengths, plan) in zip(steps, expected, cases, strict=True):
        if mine != right:
            bins = true_pack([n for n in lengths if n <= plan.sequence_len], plan.micro * plan.sequence_len)
            have = f"{len(bins)} bins" if plan.packing else f"{sum(n <= plan.sequence_len for n in lengths)} samples"
            raise NotYet(f"{_shown(lengths, plan)}: {have}, and so {right} steps an epoch, not {mine}")


def _right_padding(padding: float, lengths: Sequence[int], plan: Plan) -> None:
    expected = true_epoch(lengths, *plan)[1]
    where = _shown(lengths, plan)
    kept = [n for n in lengths if n <= plan.sequence_len]
    if abs(padding - (1 - expected)) < 1e-6 and abs(expected - 0.5) > 1e-6:
        raise NotYet(f"{where}: {padding:.4g} is the share of real tokens; padding is the rest")
    capacity = plan.sequence_len * (plan.micro if plan.packing else 1)
    units = len(true_pack(kept, capacity)) if plan.packing else len(kept)
    if abs(padding - (units * capacity - sum(kept))) < 1e-6 and expected > 0:
        raise NotYet(f"{where}: {padding} is the number of padded tokens; give their share, between 0 and 1")
    if abs(padding - (1 - sum(lengths) / (units * capacity))) < 1e-6 and len(kept) < len(lengths):
        raise NotYet(f"{where}: the tokens of the samples that were dropped are not computed: leave them out")
    close(padding, expected, rtol=1e-6, atol=1e-9, what=f"{where}: the share of padding")


def _shown(lengths: Sequence[int], plan: Plan) -> str:
    some = str(list(lengths)) if len(lengths) < 12 else f"{len(lengths)} samples"
    return (
        f"{some} at sequence_len {plan.sequence_len}, micro {plan.micro}, {plan.ranks} ranks, accumulate {plan.accumulate}, "
        + ("packed" if plan.packing else "not packed")
    )


def _right_bins(value: Any, lengths: list[int], capacity: int) -> None:
    """The very bins of first fit, longest first."""
    bins = returned(value, (list, tuple), "the bins")
    shown = f"lengths {lengths if len(lengths) < 12 else f'({len(lengths)} of them)'} into bins of {capacity}"
    if any(not isinstance(b, (list, tuple)) or any(not isinstance(i, int) for i in b) for b in bins):
        raise NotYet(f"{shown}: give a list of bins, each a list of indices into lengths")
    expected = true_pack(lengths, capacity)
    placed = sorted(i for b in bins for i in b)
    if any(not 0 <= i < len(lengths) for i in placed):
        raise NotYet(f"{shown}: an index {max(placed)} into {len(lengths)} lengths; give indices, not lengths")
    if len(set(placed)) < len(placed):
        raise NotYet(f"{shown}: some sample is in two bins")
    over = [b for b in bins if sum(lengths[i] for i in b) > capacity]
    if over:
        if len(over[0]) == 1:
            raise NotYet(f"{shown}: a sample of {lengths[over[0][0]]} fits into no bin: leave it out")
        raise NotYet(f"{shown}: the bin {list(over[0])} holds {sum(lengths[i] for i in over[0])} tokens")
    missing = sorted({i for b in expected for i in b} - set(placed))
    if missing:
        raise NotYet(f"{shown}: the sample of {lengths[missing[0]]} tokens is in no bin")
    if [] in [list(b) for b in bins]:
        raise NotYet(f"{shown}: there is an empty bin")
    as_sets = {frozenset(b) for b in bins}
    if as_sets == {frozenset(b) for b in expected}:
        return
    if as_sets == {frozenset(b) for b in _in_order(lengths, capacity)}:
        raise NotYet(f"{shown}: that is first fit in the order given, {len(bins)} bins; take the longest first")
    if as_sets == {frozenset(b) for b in _next_fit(lengths, capacity)}:
        raise NotYet(f"{shown}: you only ever look into the last bin; try every open bin, the first one first")
    if as_sets == {frozenset(b) for b in _best_fit(lengths, capacity)}:
        raise NotYet(f"{shown}: you take the fullest bin in which it fits; first fit takes the first one")
    by_length = {tuple(sorted(lengths[i] for i in b)) for b in expected}
    if len(bins) == len(expected) and {tuple(sorted(lengths[i] for i in b)) for b in bins} == by_length:
        return  # samples of equal length may change places
    raise NotYet(
        f"{shown}: {len(bins)} bins, {[list(b) for b in bins][:4]}, …; first fit with the longest first gives {len(expected)}, "
        f"{expected[:4]}, …"
    )


def _in_order(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        if length <= capacity:
            fits = next((b for b in bins if sum(lengths[i] for i in b) + length <= capacity), None)
            bins.append([index]) if fits is None else fits.append(index)
    return bins


def _next_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] <= capacity:
            if bins and sum(lengths[i] for i in bins[-1]) + lengths[index] <= capacity:
                bins[-1].append(index)
            else:
                bins.append([index])
    return bins


def _best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [(capacity - sum(lengths[i] for i in b), n) for n, b in enumerate(bins)]
        fits = [pair for pair in room if pair[0] >= lengths[index]]
        if lengths[index] <= capacity:
            bins[min(fits)[1]].append(index) if fits else bins.append([index])
    return bins


@functools.cache
def texts() -> tuple[int, ...]:
    """Bytes of the course's questions with their answers, and one token to end each."""
    return tuple(len(f"{pair['question']}\n{pair['answer']}".encode()) + 1 for pair in instructions())


def _some(seed: int, count: int, longest: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(3, longest) for _ in range(count))


BINS: tuple[tuple[Sequence[int], int], ...] = (
    ((), 10),
    ((7,), 10),
    ((2, 3, 8, 1, 5), 10),  # in the order given three bins, longest first two
    ((8, 6, 3, 5, 9, 1), 12),  # the first bin with room is not the fullest
    ((11, 5, 5, 10), 10),  # 11 fits nowhere
    (_some(1, 60, 40), 64),
)
LENGTHS = ((40, 90, 25, 64, 33, 20, 20, 60, 10, 5, 64, 8, 50), _some(2, 101, 70))  # 90 and 65 to 70 are too long
PLANS = (
    Plan(64, 1, 1, 1, False),
    Plan(64, 2, 2, 2, False),
    Plan(64, 1, 1, 1, True),
    Plan(64, 1, 2, 2, True),  # seven bins, four a step
    Plan(64, 2, 2, 2, True),
    Plan(64, 3, 4, 2, True),
)
OWN = (Plan(512, 4, 2, 2, False), Plan(512, 4, 2, 2, True))  # with the course's own texts


@functools.cache
def epochs() -> list[tuple[Sequence[int], Plan]]:
    """All cases of the second function."""
    return [(lengths, plan) for lengths in LENGTHS for plan in PLANS] + [(texts(), plan) for plan in OWN]
