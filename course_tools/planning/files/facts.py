"""What every target asks of a plan: its ranks, its machines, its model's name on the hub, and the comment above a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from course_lib.choices import AXIS_NAMES, STRATEGIES, why_not
from course_lib.memory.presets import HUB_NAMES
from course_lib.units import GIB

if TYPE_CHECKING:
    from course_tools.planning import Plan


class Refused(ValueError):
    """Why a target cannot express a plan: a clause without a full stop, to which `files` adds what can."""


def model_source(plan: Plan, base_model: str | None, what: str) -> str:
    """The folder or the name on the hub that the model is read from. Raises Refused for widths that are nobody's."""
    name = base_model or next(iter(HUB_NAMES.get(plan.model.name, ())), None)
    if name is None:
        raise Refused(
            f"{what}, from the hub or a folder, and {plan.model.name} is in neither (give base_model=, --base-model)"
        )
    return name


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


def refuse_axes(plan: Plan, what: str, *axes: str) -> None:
    """Raises Refused for a plan that uses one of `axes`, which `what` cannot express."""
    for axis in axes:
        if getattr(plan, axis) > 1:
            raise Refused(
                f"{what} has no {AXIS_NAMES[axis]} parallelism, and the plan has {axis}={getattr(plan, axis)}"
            )


def refuse_choice(plan: Plan, what: str, name: str, *able: Any) -> None:
    """Raises Refused for a plan whose `name` is none of those that `what` can express."""
    if getattr(plan, name) not in able:
        raise Refused(f"{what} does not do the plan's {name}={getattr(plan, name)!r}")


def refuse_combination(plan: Plan) -> None:
    """Raises Refused for a plan that no program runs, whatever the target."""
    names = ("method", "optimizer", "strategy", "offload", "tp", "pp")
    reason = why_not(**{name: getattr(plan, name) for name in names}, ranks=plan.dp * plan.cp)
    if reason:
        raise Refused(reason.removesuffix("."))
    if plan.compile:
        raise Refused("No target here writes torch.compile, which the plan's time and memory count on")
    if plan.ep > 1:
        raise Refused(f"No target here writes expert parallelism, and the plan has ep={plan.ep}")


def zero_stage(plan: Plan) -> int:
    """DeepSpeed's stage; 0 for another strategy."""
    return STRATEGIES[plan.strategy].zero_stage


def about(plan: Plan) -> list[str]:
    """The plan in a few lines, for the top of a file."""
    some = "" if plan.gpus == plan.machines.gpus else f"{plan.gpus} of "
    return [
        f"Plan: {plan.model.name}, {plan}, {plan.precision}",
        f"On {some}{plan.machines}; a step is {plan.global_batch} sequences of {plan.seq_len} tokens "
        f"({plan.micro_batch_size} x {plan.num_microbatches} micro-batches x {plan.dp} data ranks)",
        f"Predicted: {plan.memory_bytes / GIB:.1f} GiB a GPU, {seconds(plan.step_seconds)} a step; most of the wait: "
        f"{plan.limit}",
    ]


def seconds(value: float) -> str:
    """A time that a person reads: 3 significant digits, in ms below a second."""
    if not math.isfinite(value):
        return "unknown time"
    return f"{value:,.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def yaml(values: dict[str, Any], lines: list[str]) -> str:
    """A YAML document with a comment above it."""
    from course_tools.clusters.yaml_writer import to_yaml  # imports PyYAML, which only these targets need

    return to_yaml(values, "\n".join(lines))
