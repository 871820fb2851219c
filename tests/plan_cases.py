"""Plans for the tests of what a plan becomes: made by hand, so that a change of the planner changes none of them."""

from __future__ import annotations

from typing import Any

from course_lib.memory import estimate, shape_of
from course_tools.planning import Plan, machines


def a_plan(
    strategy: str = "fsdp",
    *,
    model: str = "tiny",
    on: str = "2xcpu",
    dp: int = 2,
    micro_batch_size: int = 2,
    num_microbatches: int = 2,
    seq_len: int = 32,
    precision: str = "fp32",
    **choices: Any,
) -> Plan:
    """A plan whose memory and times mean nothing."""
    shape = shape_of(model)
    return Plan(
        strategy,
        dp=dp,
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        precision=precision,
        **choices,
        memory=estimate(shape),
        host=0,
        step_seconds=1.25,
        parts={"matrix products": 1.0, "data parallelism": 0.25},
        mfu=0.4,
        limit="data parallelism (20 % of the step)",
        model=shape,
        machines=machines(on),
        global_batch=dp * micro_batch_size * num_microbatches,
        seq_len=seq_len,
    )


LLAMA = dict(model="llama-3.1-8b", on="2xh100-80gb", precision="bf16-mixed", seq_len=2048)
