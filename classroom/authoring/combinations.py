"""The tables of site/combinations.md: each cell asks `course_lib.choices`, and tests/test_combinations.py runs each "runs"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.choices import CHOICES, SCHEDULES, STRATEGIES, check_schedule, tensor_parallel_degrees, why_not
from course_lib.memory import PRESETS

Choices = dict[str, Any]  # arguments of `why_not`, `precision` and `activation_checkpointing`
BASE: Choices = {"strategy": "single", "method": "full", "optimizer": "adamw", "precision": "fp32"}
BASE |= {"activation_checkpointing": "none", "offload": "none", "tp": 1, "pp": 1}
# What `why_not` lets pass and no test runs: choice, strategy (or axis of a single one), why. All else runs.
MODELLED = (
    ("fp16-mixed", "zero1 zero2 zero3", "DeepSpeed refuses fp16 on CPUs without fp16 arithmetic."),
    ("fp16-mixed", "tp", "PyTorch's loss scaler takes tensors or DTensors, not both at once."),
    ("fp16-mixed", "pp", "PyTorch's loss scaler looks at the gradients of one stage alone."),
    ("adamw_bf16", "single ddp fsdp tp pp", "PyTorch steps fp32 weights with bf16 moments on CUDA alone."),
    ("adamw8bit", "fsdp tp", "The 8-bit AdamW for DTensors is torchao's, which the course does not install."),
    ("paged_adamw8bit", "single ddp zero1 zero2 zero3 pp", "On a CPU nothing is paged: it would be adamw8bit."),
)


def rows(*names: str) -> dict[str, Choices]:
    """Each value of these choices that is not the usual one, by its label."""
    found: dict[str, Choices] = {}
    for name in names:
        for value in CHOICES[name]:
            if value != BASE[name]:
                label = f"{name.removeprefix('activation_')} {value.replace('_', '_<wbr>')}"  # a phone may break it
                found[label] = {name: value}
                if value == "adamw_bf16":
                    found[label]["precision"] = "bf16-mixed"  # DeepSpeed has it for weights in bf16 alone
    return found


USUAL = {"the usual choices": {}}
ONE_CHANGED = USUAL | rows("method", "optimizer", "precision", "activation_checkpointing", "offload")
TABLES: dict[str, tuple[dict[str, Choices], dict[str, Choices]]] = {  # title: columns, rows
    "Nothing sharded over data-parallel ranks": (
        {"one process": {}, "DDP": {"strategy": "ddp"}, "`tp=2`": {"tp": 2}, "`pp=2`": {"pp": 2}},
        ONE_CHANGED,
    ),
    "Sharded": ({how.label: {"strategy": name} for name, how in STRATEGIES.items() if how.shards}, ONE_CHANGED),
    "Several axes": (
        {how.label: {"strategy": name} for name, how in STRATEGIES.items() if name != "single"},
        {"with `tp=2`": {"tp": 2}, "with `pp=2`": {"pp": 2}},
    ),
    "Offload": (
        {
            "ZeRO-2, `optimizer`": {"strategy": "zero2", "offload": "optimizer"},
            "ZeRO-3, `all`": {"strategy": "zero3", "offload": "all"},
            "FSDP, `all`": {"strategy": "fsdp", "offload": "all"},
        },
        USUAL | rows("method", "optimizer"),
    ),
}


def mark(choices: Choices) -> tuple[str, str]:
    """("runs", ""), ("model", why no CPU runs it) or ("no", the library's sentence)."""
    asked = {name: value for name, value in choices.items() if name not in ("precision", "activation_checkpointing")}
    if reason := why_not(**asked, ranks=1 if choices["strategy"] == "single" else 2):
        return "no", reason
    where = choices["strategy"]
    if where == "single":
        where = "tp" if choices["tp"] > 1 else "pp" if choices["pp"] > 1 else "single"
    for value, places, reason in MODELLED:
        if value in choices.values() and where in places.split():
            return "model", reason
    return "runs", ""


def cells() -> list[Choices]:
    """The choices of every cell, in the order of the page."""
    tables = TABLES.values()
    return [BASE | column | row for columns, lines in tables for row in lines.values() for column in columns.values()]


def page() -> str:
    """Everything that is computed on the page, in Markdown."""
    parts = []
    for title, (columns, lines) in TABLES.items():
        body = {label: [mark(BASE | column | row) for column in columns.values()] for label, row in lines.items()}
        parts.append(f"## {title}\n\n{_table(['choice', *columns], body)}")
    settings = {"8 micro-batches": (4, 8, 1), "2 stages a rank": (4, 8, 2), "2 stages, 6 micro-batches": (4, 6, 2)}
    body = {f"`{name}`": [_schedule(name, *numbers) for numbers in settings.values()] for name in SCHEDULES}
    own = "As this course simulates them: **yes** goes. PyTorch has interleaved variants of more of them."
    parts.append(f"## Schedules of four ranks\n\n{own}\n\n{_table(['schedule', *settings], body)}")
    models = ("smollm2-135m", "qwen2.5-7b", "llama-3.1-8b", "llama-3.1-70b")
    body = {f"`{name}`": [(f"{tensor_parallel_degrees(PRESETS[name])}"[1:-1], "")] for name in models}
    heads = "They divide the heads, the kv heads, the columns of the MLP and the vocabulary: for the planner as for the programs."
    parts.append(f"## Tensor-parallel ranks of a model\n\n{heads}\n\n{_table(['model', 'ranks'], body)}")
    return "\n\n".join(parts)


def _schedule(name: str, *numbers: int) -> tuple[str, str]:
    try:
        check_schedule(name, *numbers)
    except ValueError as error:
        return "no", str(error)
    return "yes", ""


def _table(heads: Sequence[str], body: dict[str, list[tuple[str, str]]]) -> str:
    """A table of (word, reason), and below it the reasons, which the words name by number."""
    reasons = list(dict.fromkeys(reason for line in body.values() for _, reason in line if reason))
    lines = [heads, ["---"] * len(heads)]
    for label, line in body.items():
        lines.append([label, *(f"{word} {reasons.index(reason) + 1}" if reason else word for word, reason in line)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([table, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))])
