"""Lab 6, exercise 1: an FSDP unit of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import ATOL, RTOL, NotYet, close, phases, ratio_hint, run_ranks, same
from course_checks.lab06 import unit_on_ranks
from course_checks.lab06.common import lab
from course_checks.lab06.unit_on_ranks import FROZEN, gradient_bytes
from course_lib.launch import Run


@lab.exercise("Your own FSDP unit", importance=5, difficulty=5, minutes=45)
def own_unit(make_unit: Callable[..., Any]) -> str:
    """Parity with the whole chain; 1/N at rest, one unit at a time in full; two all-gathers, one reduce-scatter each."""
    evidence = ""
    for ranks in (2, 3, 1, 4):
        run = run_ranks(unit_on_ranks.own_unit, make_unit, ranks=ranks)
        for rank, told in enumerate(run.results):
            if ranks > 1:
                _sharded_at_rest(told, rank, ranks)
            _same_start(told, rank, ranks)
        for rank, told in enumerate(run.results):
            _right_numbers(told, rank, ranks)
        if ranks > 1:
            for rank, told in enumerate(run.results):
                _right_traffic(run, rank, told)
                peak = max(_one_at_a_time(told, step, rank, ranks) for step in (0, 1))
            whole, rest = 4 * sum(told["whole"]), told["rest"]
            evidence = (
                f"on {ranks} ranks {rest:,} of {whole:,} bytes at rest, at most {peak:,} while a unit computes; two "
                "all-gathers and one reduce-scatter a trained unit and step"
            )
    return f"equal to the whole model on 1, 2, 3 and 4 ranks; {evidence}"


def _sharded_at_rest(told: dict[str, Any], rank: int, ranks: int) -> None:
    shards, whole = 4 * sum(told["shards"]), 4 * sum(told["whole"])
    if told["rest"] <= shards + 2 * min(told["whole"]):
        return
    if sum(told["own storage"]) >= 0.95 * whole:
        raise NotYet(
            f"at rest rank {rank} of {ranks} still holds {told['rest']:,} bytes: your shard is a view, and a view keeps "
            "the whole flattened storage alive. clone() the slice"
        )
    raise NotYet(
        f"at rest rank {rank} of {ranks} holds {told['rest']:,} bytes for a model of {whole:,}; its shards are {shards:,}: "
        "the module's own parameters, or a gathered copy, are still there after wrapping"
    )


def _same_start(told: dict[str, Any], rank: int, ranks: int) -> None:
    for number, (mine, expected) in enumerate(told["start"]):
        if not same(mine, expected):
            raise NotYet(
                f"rank {rank} of {ranks}: the shard of unit {number} is not its slice of rank 0's flattened parameters. "
                "The ranks start from different seeds: broadcast rank 0's before you cut; rank r keeps elements "
                "r * size to (r + 1) * size, parameters in the order of module.parameters()"
            )


def _right_numbers(told: dict[str, Any], rank: int, ranks: int) -> None:
    for step, each in enumerate(told["steps"]):
        missing = [number for number, (mine, _) in each["gradients"].items() if mine is None]
        if missing:
            raise NotYet(f"after backward() the shard of unit {missing[0]} has no .grad on rank {rank} of {ranks}")
        got = {number: mine for number, (mine, _) in each["gradients"].items()}
        expected = {number: wanted for number, (_, wanted) in each["gradients"].items()}
        if ranks > 1 and step == 0 and _agree(got, each["local"]):
            raise NotYet(
                f"rank {rank} of {ranks} holds the gradients of its own rows alone: the ranks' gradients were never added up"
            )
        hint = ratio_hint(
            got,
            expected,
            {
                ranks: f"your gradients are exactly world_size ({ranks}) times too large: reduce_scatter sums, and FSDP "
                "averages: divide by world_size",
                1 / ranks: f"your gradients are exactly world_size ({ranks}) times too small: you divided twice",
            },
        )
        if hint:
            raise NotYet(hint)
        if step == unit_on_ranks.ACCUMULATED and not _agree(got, expected):
            raise NotYet(
                "one backward() is right, and two without zero_grad() between them are not: the second must add to .grad"
            )
        if step and not _agree(got, expected):
            raise NotYet(
                f"step 1 is right and step {step + 1} is not (rank {rank} of {ranks}): after the optimizer has changed the "
                "shards, forward must gather them anew"
            )
        close(got, expected, rtol=RTOL, atol=ATOL, what=f"rank {rank} of {ranks}, the gradient of the shard of unit")
        if each["frozen"]:
            raise NotYet("the frozen unit's shard has a .grad: nobody needs it")


def _agree(got: dict[int, Any], expected: dict[int, Any]) -> bool:
    return not any(not same(got[number], expected[number]) for number in expected)


def _right_traffic(run: Run, rank: int, told: dict[str, Any]) -> None:
    ranks = len(run.results)
    calls = phases(run, rank)[3]  # before step 1 | step 1 | optimizer | step 2 | …
    shards = [4 * elements for elements in told["shards"]]
    kinds = {c.kind for c in calls}
    if "all_reduce" in kinds:
        raise NotYet(
            "gradients are all-reduced: every rank then holds the sum of all of them, and moves twice the bytes. "
            "reduce_scatter gives each rank its shard's part alone"
        )
    strange = kinds - {"all_gather", "reduce_scatter"}
    if strange:
        raise NotYet(f"a step uses {', '.join(sorted(strange))}: all_gather and reduce_scatter are all that it needs")
    gathers = [c.bytes for c in calls if c.kind == "all_gather"]
    scatters = [c.bytes for c in calls if c.kind == "reduce_scatter"]
    if any(bytes_ not in shards for bytes_ in gathers) and len(gathers) > 2 * len(shards):
        raise NotYet(
            f"{len(gathers)} all-gathers a step for {len(shards)} units: gather the flat shard in one, not parameter by parameter"
        )
    for number, shard in enumerate(shards):
        again, reduced = gathers.count(shard), scatters.count(shard * ranks)
        if again == 1:
            raise NotYet(
                f"unit {number} is gathered once a step: what forward gathered was kept for backward. Free it after forward, "
                "gather again in backward"
            )
        if again != 2:
            raise NotYet(f"unit {number}: {again} all-gathers of its {shard:,} bytes a step, and two are needed")
        if number == FROZEN and reduced:
            raise NotYet("the gradient of the frozen unit is reduce-scattered: nobody needs it")
        if number != FROZEN and reduced != 1:
            raise NotYet(
                f"unit {number}: {reduced} reduce-scatters of its {shard * ranks:,} bytes of gradients a step, not 1"
                + (f" (the sizes seen: {sorted(set(scatters))})" if not reduced else "")
            )


def _one_at_a_time(told: dict[str, Any], number_of_step: int, rank: int, ranks: int) -> int:
    """Bytes alive while a unit computes in forward: the most over the units."""
    rest, whole = told["rest"], [4 * elements for elements in told["whole"]]
    step = told["steps"][number_of_step]
    slack, gradients = min(whole) // 2, gradient_bytes(told["shards"])
    forward = step["moments"][: next(i for i, m in enumerate(step["moments"]) if m[0] == "backward")]
    where = f"(rank {rank} of {ranks}, {rest:,} at rest)"
    peak = 0
    for what, number, alive in forward:
        above = alive - rest
        if what == "inside":
            peak = max(peak, alive)
            if above > whole[number] + slack:
                raise NotYet(
                    f"while unit {number} computes, {above:,} bytes are alive beyond the shards, and unit {number} in full "
                    f"has {whole[number]:,} {where}: {_culprit(above, whole, number)}"
                )
            if above < whole[number] - slack:
                raise NotYet(
                    f"while unit {number} computes, its parameters are not alive here: where does it read them?"
                )
        elif above > slack:
            raise NotYet(
                f"after forward of unit {number} {above:,} bytes are alive beyond the shards {where}: free what you "
                "gathered when the module has computed. (Autograd keeps what backward will read: resize the storage to 0, "
                "or keep nothing and compute again)"
            )
    for what, number, alive in step["moments"]:
        above = alive - rest - gradient_bytes(told["shards"], number + 1)
        if what == "backward" and number < len(whole) - 1 and above > max(whole) + slack:
            raise NotYet(
                f"in backward, before unit {number}'s turn, {above:,} bytes are alive beyond the shards and their gradients "
                f"{where}: units that are done still hold parameters or full gradients"
            )
    if step["end"] - rest - gradients > slack:
        raise NotYet(
            f"after backward {step['end'] - rest - gradients:,} bytes are alive beyond the shards and their gradients {where}: "
            "free the parameters that backward gathered, and the full gradients"
        )
    return peak


def _culprit(above: int, whole: list[int], number: int) -> str:
    if above > 0.9 * sum(whole):
        return "all units were gathered at once. Gather each just before it computes"
    if number == 0:
        return "a second copy, or the next unit, is there too"
    return "the unit before was not freed, or a second copy is there"
