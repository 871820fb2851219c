"""The practitioners' search, held against the exhaustive one."""

from __future__ import annotations

import pytest

from course_tools.planning import NoPlan, plan, procedure
from course_tools.planning.search import ALIKE

QUESTIONS = (
    ("llm-jp-13b", "12x8xa100-40gb", 1536, 2048),
    ("gpt3-175b", "49x8xa100-40gb", 1536, 2048),
    ("llama-2-70b", "8x8xa100-80gb", 1024, 4096),
    ("llama-3.1-8b", "8xa100-80gb", 128, 4096),
)


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked[0])
def test_the_procedure_comes_near_the_best_and_never_passes_it(asked, record_property) -> None:
    model, cluster, batch, length = asked
    found = procedure(model, cluster, global_batch=batch, seq_len=length)
    best = plan(
        model,
        cluster,
        global_batch=batch,
        seq_len=length,
        methods="full",
        strategies=("zero1", "single"),
        offload="none",
        axes=("dp", "tp", "pp"),
        interleave=False,
    ).best
    ratio = found.plan.step_seconds / best.step_seconds
    record_property("slower by", f"{ratio - 1:.1%}")
    assert 1 - ALIKE <= ratio < 1.3
    assert found.plan.memory_bytes <= found.plan.machines.card.memory and found.plan.gpus == found.plan.machines.gpus
    assert found.measured == sum(len(step.tried) for step in found.steps) < 40


def test_its_steps_are_those_of_the_talk() -> None:
    model, cluster, batch, length = QUESTIONS[0]
    found = procedure(model, cluster, global_batch=batch, seq_len=length)
    first = found.steps[0]
    assert "Raise data parallelism" in first.what
    degrees = [one.plan.dp for one in first.tried]
    assert degrees == sorted(degrees, reverse=True) and degrees[0] == 96, "from all data-parallel downwards"
    assert [one.fits for one in first.tried] == [False] * (len(degrees) - 1) + [True], "the first that fits ends it"
    second = found.steps[1]
    assert {one.plan.dp for one in second.tried} == {first.tried[-1].plan.dp}, "TP against PP at the same DP"
    third = found.steps[2]
    assert {one.plan.grid for one in third.tried} == {second.best.plan.grid}
    assert any(
        "Checkpointing" in step.what and step.tried[0].plan.activation_checkpointing == "full"
        for step in found.steps[3:]
    )
    rates = [step.best.tokens_per_second for step in found.steps if step.best]
    assert rates == sorted(rates), "the best so far never gets worse"
    assert found.plan.tokens_per_second == rates[-1]
    assert "does not fit" in str(found) and "tokens/s *" in str(found)


def test_where_it_finds_nothing_it_says_so() -> None:
    with pytest.raises(NoPlan, match="The procedure finds nothing"):
        procedure("llama-3.1-8b", "2x24GiB", global_batch=16, seq_len=2048)
    with pytest.raises(ValueError, match="global_batch=0"):
        procedure("llama-3.1-8b", "2x24GiB", global_batch=0, seq_len=2048)
