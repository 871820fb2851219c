"""What every target asks of a plan: its ranks, its machines, its model's name on the hub, and the comment above a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from course_lib.choices import AXIS_NAMES, STRATEGIES, why_not
from course_lib.memory import architectures
from course_lib.memory.presets import HUB_NAMES
from course_lib.units import GIB

if TYPE_CHECKING:
    from course_tools.planning import Plan


def model_name(plan: Plan) -> str:
    """The model as the planner names it."""
    return plan.model.name


def hub_id(plan: Plan) -> str | None:
    """Where the model's weights lie on the hub; None for widths that are nobody's."""
    return next(iter(HUB_NAMES.get(model_name(plan), ())), None)


def block_class(plan: Plan) -> str | None:
    """The transformers class of the model's blocks, the unit that FSDP gathers; None for widths that are nobody's."""
    return architectures.block_class(plan.model.kind)


def layout(plan: Plan) -> tuple[int, int]:
    """(machines, ranks on each of them).

    Raises:
        Refused: the ranks do not fill whole machines.
    """
    wanted, per_node = plan.gpus, plan.machines.per_node
    if wanted <= per_node:
        return 1, wanted
    if wanted % per_node:
        raise Refused(
            f"A launcher starts as many ranks on each machine, and {wanted} do not fill machines of {per_node}"
        )
    return wanted // per_node, per_node


class Refused(ValueError):
    """Why a target cannot express a plan: a clause without a full stop, to which `writing` adds what can."""


def refuse_axes(plan: Plan, what: str, *axes: str) -> None:
    """Raises Refused for a plan that uses one of `axes`, which `what` cannot express."""
    for axis in axes:
        if getattr(plan, axis) > 1:
            raise Refused(
                f"{what} has no {AXIS_NAMES[axis]} parallelism, and the plan has {axis}={getattr(plan, axis)}"
            )


def refuse_combination(plan: Plan) -> None:
    """Raises Refused for a plan that no program runs, whatever the target."""
    ranks = plan.dp * plan.cp
    reason = why_not(
        method=plan.method, strategy=plan.strategy, offload=plan.offload, ranks=ranks, tp=plan.tp, pp=plan.pp
    )
    if reason:
        raise Refused(reason.removesuffix("."))


def zero_stage(plan: Plan) -> int:
    """DeepSpeed's stage; 0 for another strategy."""
    return STRATEGIES[plan.strategy].zero_stage


def about(plan: Plan) -> list[str]:
    """The plan in a few lines, for the top of a file."""
    return [
        f"Plan: {model_name(plan)}, {plan}, {plan.precision}",
        f"On {'' if plan.gpus == plan.machines.gpus else f'{plan.gpus} of '}{plan.machines}; a step is {plan.global_batch} sequences of {plan.seq_len} tokens "
        f"({plan.micro_batch_size} x {plan.num_microbatches} micro-batches x {plan.dp} data ranks)",
        f"Predicted: {plan.memory_bytes / GIB:.1f} GiB a GPU, {seconds(plan.step_seconds)} a step; most of the wait: "
        f"{plan.limit}",
    ]


def seconds(value: float) -> str:
    """A time that a person reads: 3 significant digits, in ms below a second."""
    if not math.isfinite(value):
        return "unknown time"
    return f"{value:,.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def comment(lines: list[str]) -> str:
    """The lines as a comment of a shell script or YAML."""
    return "".join(f"# {line}\n" for line in lines)


def yaml(values: dict[str, Any], lines: list[str]) -> str:
    """A YAML document with a comment above it."""
    from course_tools.clusters.yaml_writer import to_yaml  # imports PyYAML, which only these targets need

    return to_yaml(values, "\n".join(lines))
