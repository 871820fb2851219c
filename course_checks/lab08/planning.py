"""Lab 8, exercise 7: a plan for three given clusters, judged by the memory model and by the planner's clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_checks.harness import NotYet, returned
from course_checks.lab08.common import lab
from course_lib.units import GIB

if TYPE_CHECKING:  # imported where they are used: every rank of this lab imports this module
    from course_lib.memory import Breakdown
    from course_tools.planning import Machines, Plan, Settings
    from course_tools.planning.fit import Needs
    from course_tools.planning.question import Question

FACTOR = 1.15  # a plan may take so many times the seconds of the fastest one
KEYS = ("method", "strategy", "dp", "tp", "pp", "micro_batch", "checkpointing")
SAID = {
    "weights": "the weights",
    "gradients": "the gradients",
    "optimizer": "the optimizer's states",
    "activations": "the activations",
    "logits": "the logits",
    "buffers": "buffers and gathered or cast weights",
}


@dataclass(frozen=True)
class Task:
    """A model to train on given machines.

    Attributes:
        name: of the task. model: a preset of course_lib.memory. methods: those that are allowed.
        cluster, wiring: the machines as course_tools.planning.machines reads them; `machines` is what it makes of them.
        global_batch: sequences of one optimizer step. seq_len: tokens a sequence.
    """

    name: str
    model: str
    methods: tuple[str, ...]
    cluster: str
    wiring: tuple[tuple[str, Any], ...]
    global_batch: int
    seq_len: int

    @property
    def machines(self) -> Machines:
        """Cards, nodes and the links between them."""
        from course_tools.planning import machines

        return machines(self.cluster, **dict(self.wiring))

    def __str__(self) -> str:
        on, way = self.machines, {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}
        between = f", between machines {on.outer_links} x {on.outer.name}" if on.nodes > 1 else ""
        return (
            f"{self.name}: {self.model}, {' or '.join(way[m] for m in self.methods)}, {self.global_batch} x {self.seq_len:,} tokens "
            f"a step, on {on} ({on.inner.name}{between})"
        )

    @property
    def question(self) -> Question:
        """The planner's question: data, tensor and pipeline parallelism, nothing on the host, no interleaving."""
        from course_tools.planning.question import question

        return question(self.model, self.machines, **self.asked)

    @property
    def asked(self) -> dict[str, Any]:
        """What `course_tools.planning.plan` takes beside the model and the machines."""
        return {
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "methods": self.methods,
            "offload": ("none",),
            "axes": ("dp", "tp", "pp"),
            "interleave": False,
        }


TASKS = (
    Task("two cards at home", "llama-3.1-8b", ("lora", "qlora"), "2x24GiB", (), 16, 2048),
    Task("one machine", "llama-3.1-8b", ("full",), "8xa100-80gb", (), 64, 4096),
    Task(
        "eight machines on a slow network",
        "llama-3.1-70b",
        ("full",),
        "8x8xh100-80gb",
        (("outer", "roce-100"), ("outer_links", 1)),
        256,
        4096,
    ),
)


@lab.exercise("A plan for three clusters", importance=5, difficulty=4, minutes=35)
def choose_plan(choose: Callable[..., Any]) -> str:
    """Uses every GPU, fits, and takes at most FACTOR times the seconds of the fastest plan that the planner finds."""
    told = []
    for task in TASKS:
        chosen = _settings(choose(task), task)
        mine, need = _measured(task, chosen)
        if not need.fits(task.question):
            raise NotYet(f"{task.name}: {_too_large(task, chosen, need.memory)}")
        best = fastest(task)
        if mine.step_seconds > FACTOR * best.step_seconds:
            raise NotYet(f"{task.name}: {_too_slow(task, mine, best)}")
        told.append(
            f"{task.name}: {mine}, {mine.memory_bytes / GIB:.0f} of {task.machines.card.memory / GIB:.0f} GiB, "
            f"{mine.step_seconds:.1f} s a step (the planner's best: {best.step_seconds:.1f} s)"
        )
    return "; ".join(told)


@functools.cache
def fastest(task: Task) -> Plan:
    """The plan with the shortest step of those that fit."""
    from course_tools.planning import plan

    return min(plan(task.model, task.machines, **task.asked).plans, key=lambda found: found.step_seconds)


def _settings(value: Any, task: Task) -> Settings:
    from course_lib.memory import shape_of
    from course_tools.planning import Settings

    value = returned(value, Mapping, f"{task.name}: the plan")
    missing, extra = [k for k in KEYS if k not in value], [k for k in value if k not in KEYS]
    if missing or extra:
        why = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which nobody asks for"
        raise NotYet(f"{task.name}: the plan {why}: give {', '.join(KEYS)}")
    numbers = {name: value[name] for name in ("dp", "tp", "pp", "micro_batch")}
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise NotYet(f"{task.name}: {name}={number!r}: give a whole number of at least 1")
    dp, tp, pp, micro_batch = numbers.values()
    if dp * tp * pp != task.machines.gpus:
        raise NotYet(
            f"{task.name}: dp x tp x pp = {dp} x {tp} x {pp} = {dp * tp * pp}, and there are {task.machines.gpus} GPUs"
        )
    if value["method"] not in task.methods:
        raise NotYet(f"{task.name}: method {value['method']!r} is not what is asked for: {' or '.join(task.methods)}")
    if task.global_batch % (dp * micro_batch):
        raise NotYet(
            f"{task.name}: {dp} data-parallel ranks with micro-batches of {micro_batch} do not divide the batch of {task.global_batch}"
        )
    shape = shape_of(task.model)
    if tp > task.machines.per_node:
        raise NotYet(
            f"{task.name}: a tensor-parallel group of {tp} leaves the machine of {task.machines.per_node} GPUs, and it sends the "
            "most, several times in each layer: tp stays inside"
        )
    if pp > shape.layers:
        raise NotYet(f"{task.name}: {pp} stages for {shape.layers} layers")
    return Settings(
        value["strategy"],
        value["method"],
        dp,
        tp,
        pp,
        sequence_parallel=tp > 1,
        micro_batch_size=micro_batch,
        num_microbatches=task.global_batch // (dp * micro_batch),
        activation_checkpointing=value["checkpointing"],
        precision=task.question.precision,
    )


def _measured(task: Task, chosen: Settings) -> tuple[Plan, Needs]:
    from course_lib.memory.estimate import breakdown_of
    from course_tools.planning.fit import run_settings
    from course_tools.planning.search import measured

    asked = task.question
    try:  # a choice that means nothing: the memory model has the sentence
        breakdown_of(asked.shape, run_settings(asked, chosen))
    except ValueError as error:
        raise NotYet(f"{task.name}: {error}") from None
    return measured(asked, chosen)


def _too_large(task: Task, chosen: Settings, memory: Breakdown) -> str:
    parts = {name: getattr(memory, name) for name in SAID if getattr(memory, name, 0)}
    largest = max(parts, key=parts.__getitem__)
    shown = (
        f"{chosen} needs {memory.device / GIB:.1f} GiB of a card's {task.machines.card.memory / GIB:.0f}; the most are "
        f"{SAID[largest]}, {parts[largest] / GIB:.1f} GiB"
    )
    shares = {
        "weights": "cut them (tp, pp, zero3 or fsdp)" + (", or keep them in 4 bits" if "qlora" in task.methods else ""),
        "gradients": "cut them (zero2, zero3 or fsdp, tp, pp)",
        "optimizer": "share them out over the data-parallel ranks (zero1 and above)",
        "activations": "a smaller micro-batch, or checkpointing",
        "logits": "a smaller micro-batch, or tp, which cuts the vocabulary",
        "buffers": "cut the model itself (tp, pp), or take a strategy with 16-bit weights (zero and fsdp)",
    }
    return f"{shown}: {shares[largest]}"


def _too_slow(task: Task, mine: Plan, best: Plan) -> str:
    excess = {n: mine.parts.get(n, 0.0) - best.parts.get(n, 0.0) for n in mine.parts}
    part = max(excess, key=excess.__getitem__)
    on, chosen = task.machines, mine
    between = f", over {on.outer.name}" if on.nodes > 1 else ""
    why = {
        "recomputation": f"{chosen.activation_checkpointing} checkpointing computes what there is room to keep, or what fewer states would "
        "make room for",
        "data parallelism": f"{chosen.strategy} with dp={chosen.dp} moves weights and gradients too often or too far{between}: lay the "
        "axis that sends the least across machines, and shard no more than the memory asks for",
        "tensor parallelism": f"tp={chosen.tp} sends activations several times in each layer: take no more of it than the memory "
        "asks for",
        "pipeline bubble": f"{chosen.pp} stages with {chosen.num_microbatches} micro-batches leave ranks idle: smaller micro-batches, "
        "fewer data-parallel ranks, or fewer stages",
        "uneven stages": f"{chosen.pp} stages do not share the layers and the output layer out evenly",
        "pipeline sends": f"{chosen.pp} stages send activations between machines",
        "matrix products": "the matrices are cut so small that the card does not reach its speed",
        "dequantization": "4-bit weights are unpacked at every use, and larger ones would fit",
    }.get(part, mine.limit)
    return (
        f"{mine} fits and takes {mine.step_seconds:.1f} s a step; {best.step_seconds:.1f} s are possible. Most of the difference is "
        f"{part} ({excess[part]:.1f} s more): {why}"
    )
