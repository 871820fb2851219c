"""A plan for machines that are not here, run small on ranks that are: the same split of a tiny model, by the same program.

>>> small = run(best)          # best: a plan of course_tools.planning, for 16 H100s, say
>>> print(small.sentence)      # what was run, what was shrunk, what it does not prove
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

from course_lib.choices import METHODS, STRATEGIES
from course_lib.launch import launch
from course_lib.memory import shape_of
from course_lib.models import tiny_llama
from course_lib.training.methods import prepare
from course_lib.training.outcome import Outcome
from course_tools.planning import Plan, machines
from course_tools.planning.answer import words
from course_tools.planning.files import files, program_of
from course_tools.planning.files.programs import not_said

MOST_RANKS = 8
GLOBAL_BATCH = 8
SEQ_LEN = 32  # tokens; of the bytes of questions and answers, which Axolotl takes whole, more
SEQ_LEN_ANSWERS = 512
BUCKET_ELEMENTS = 100_000  # DeepSpeed's own 500 million are 2 GB on each rank, however small the model
SMALL_ZERO = {
    "reduce_bucket_size": BUCKET_ELEMENTS,
    "allgather_bucket_size": BUCKET_ELEMENTS,
    "stage3_param_persistence_threshold": 0,  # DeepSpeed's own 100,000 would leave most of the tiny model whole
}
TIMEOUT = 240.0  # seconds; eight ranks of two busy cores take a while to import


@dataclass
class Result:
    """A small run.

    Attributes:
        plan: as it ran here, for the tiny Llama on CPU ranks.
        outcomes: what each rank returned, by rank.
        program: the module that trained, as `torchrun -m` takes it.
        sentence: what was run, what was shrunk, and what that does not prove.
        arguments: what the program was called with.
    """

    plan: Plan
    outcomes: list[Outcome]
    program: str
    sentence: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        """Of the global batch, one a step."""
        return self.outcomes[0].losses


def run(plan: Plan, *, ranks: int | None = None, steps: int = 3) -> Result:
    """Train the tiny Llama on this machine's ranks, split as `plan` splits its model.

    Strategy, method and every axis of the grid stay, each axis of more than one rank with two; checkpointing and offload
    where the program has them, else the sentence says so. The losses of full training are those of one rank (`one_rank`).

    Args:
        plan: of `course_tools.planning`.
        ranks: the most to start, 1 to 8; None takes two along each axis. With fewer than the axes need, data ranks go
            first, then pipeline stages; with more, there are more data ranks.
        steps: optimizer steps.

    Raises:
        ValueError: ranks or steps that make no sense, or a plan that no program here runs; its words say why.
        RankFailed, RanksHung: as `launch`.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: give a whole number of at least 1.")
    small = shrunk(plan, ranks)
    if small.method != "full" and small.strategy not in ("single", "fsdp"):
        program, arguments, outcomes = _axolotl(small, steps)
        left_out = []
    else:
        given = small.strategy in ("single", "fsdp") and small.gpus == small.dp
        # these two programs train whatever model they are given: adapters and checkpointing come with that
        asked = replace(small, method="full", activation_checkpointing="none") if given else small
        program, arguments = program_of(asked, steps=steps)
        if given:
            how = {name: getattr(small, name) for name in ("method", "lora_rank", "activation_checkpointing")}
            arguments["build"] = partial(prepared, **how)
        if "config" in arguments:
            arguments["config"]["zero_optimization"] |= SMALL_ZERO
        left_out = not_said(asked, program, arguments)
        train = import_module(program).train
        outcomes = launch(train, ranks=small.gpus, quiet=True, timeout=TIMEOUT, threads=1, **arguments).results
    return Result(small, outcomes, program, _sentence(plan, small, program, left_out), arguments)


def one_rank(result: Result) -> list[float]:
    """The losses of the same full training on one rank, without any splitting: what a small run's must equal."""
    given = result.arguments
    if "config" in given:  # DeepSpeed's
        given = given | {"global_batch": given["config"]["train_batch_size"]}
    if result.plan.method != "full":
        raise ValueError(f"{result.program} trained adapters: one_rank trains all weights, as a full training does.")
    same = {name: given[name] for name in ("steps", "global_batch", "seq_len")}
    single = import_module("course_lib.training.single")
    return launch(single.train, ranks=1, quiet=True, timeout=TIMEOUT, threads=1, **same).results[0].losses


def shrunk(plan: Plan, ranks: int | None = None) -> Plan:
    """The plan for the tiny Llama on at most `ranks` CPU ranks. Its memory and times are still those of the large one."""
    most = MOST_RANKS if ranks is None else ranks
    if type(most) is not int or not 1 <= most <= MOST_RANKS:
        raise ValueError(f"ranks={ranks!r}: give 1 to {MOST_RANKS}, the most that one machine is asked to carry here.")
    axes = {"tp": 1, "pp": 1, "dp": 1, "cp": 1}
    free = most
    for axis in axes:
        joined = axis == "cp" and axes["tp"] * axes["pp"] > 1  # no program here splits sequences and layers at once
        if getattr(plan, axis) > 1 and free >= 2 and not joined:
            axes[axis] = 2
            free //= 2
    while ranks is not None and 2 <= free and 2 * axes["dp"] <= plan.dp and axes["dp"] > 1:
        axes["dp"] *= 2
        free //= 2
    virtual_stages = 2 if plan.virtual_stages > 1 and axes["pp"] > 1 and axes["tp"] * axes["dp"] == 1 else 1
    num_microbatches = min(plan.num_microbatches, 2) if axes["pp"] == 1 else 2 * axes["pp"] // axes["dp"]
    size = axes["tp"] * axes["pp"] * axes["dp"] * axes["cp"]
    whole = max(GLOBAL_BATCH, axes["dp"] * num_microbatches)
    strategy = plan.strategy if size > 1 else "single"
    answers = plan.method != "full" and strategy not in ("single", "fsdp")
    return replace(
        plan,
        **axes,
        virtual_stages=virtual_stages,
        num_microbatches=num_microbatches,
        micro_batch_size=whole // (axes["dp"] * num_microbatches),
        global_batch=whole,
        seq_len=SEQ_LEN_ANSWERS if answers else SEQ_LEN,
        precision="fp32",
        model=shape_of("tiny"),
        machines=machines(f"{size}xcpu"),
        sequence_parallel=plan.sequence_parallel and axes["tp"] > 1,
        strategy=strategy,
        offload=plan.offload if size > 1 else "none",
    )


def prepared(**how: Any) -> Any:
    """The tiny Llama for `course_lib.training.single` and `.fsdp`; `how` is `prepare`'s."""
    model = prepare(tiny_llama(), **how)
    return model if how["method"] == "full" else model.get_base_model()  # PEFT's layers without its wrapper


def _axolotl(small: Plan, steps: int) -> tuple[str, dict[str, Any], list[Outcome]]:
    """Adapters under DDP or ZeRO: by the YAML that `plan_files` writes, on a tiny model and the course's own questions."""
    from course_tools.axolotl import make_inputs, train, warm_axolotl  # few plans need it, and it is slow to import
    from course_tools.axolotl.check.yaml_lines import loaded

    warm_axolotl()
    with tempfile.TemporaryDirectory(prefix="small-run-") as folder:
        inputs = make_inputs(f"{folder}/inputs", layers=4)
        text = files(small, "axolotl", base_model=str(inputs / "tiny"))["axolotl.yml"]
        values = loaded(text, "axolotl.yml")[1] | {
            "datasets": [{"path": str(inputs / "instructions.jsonl"), "ds_type": "json", "type": "alpaca"}],
            "special_tokens": {"pad_token": "<|im_end|>"},
            "dataset_prepared_path": f"{folder}/prepared",
            "output_dir": f"{folder}/out",
            "save_strategy": "no",
            "max_steps": steps,
            "logging_steps": 1,
            "optimizer": "adamw_torch",
            "plugins": [
                f"course_tools.axolotl.{name}"
                for name in ("cpu_ranks.CPURanks", "witness.Witness", "token_mean.TokenMean")
            ],
        }
        done = train(values, ranks=small.gpus, timeout=TIMEOUT)
    outcomes = [
        Outcome(
            done.losses,
            held["wrapper"],
            rank,
            held["world_size"],
            median_step=float("nan"),
            tokens_per_second=float("nan"),
            memory={},
            extra=held,
        )
        for rank, held in enumerate(done.witness)
    ]
    return "axolotl.cli.train", values, outcomes


def _sentence(plan: Plan, small: Plan, program: str, left_out: list[str]) -> str:
    """What was run, what was shrunk, what it does not prove."""
    changed = [f"{plan.model.name} to the tiny Llama"] if plan.model.name != "tiny" else []
    changed += [f"{plan.precision} to fp32"] if plan.precision != "fp32" else []
    if plan.grid != small.grid:
        changed.append(f"{words(plan.grid)} to {words(small.grid)}")
    if plan.virtual_stages != small.virtual_stages:
        changed.append(f"{plan.virtual_stages} virtual stages per rank to {small.virtual_stages}")
    changed.append(
        f"{plan.global_batch:,} sequences of {plan.seq_len:,} tokens a step to {small.global_batch} of {small.seq_len}"
    )
    what = f"{METHODS[small.method]} by {STRATEGIES[small.strategy].label}"
    unlike = f" Unlike the plan it {' and '.join(left_out)}." if left_out else ""
    return (
        f"{what[0].upper()}{what[1:]} ran on {small.gpus} CPU rank{'s' * (small.gpus > 1)} ({words(small.grid)}) with {program}. "
        f"Shrunk: {'; '.join(changed)}.{unlike} Not proven: the step's time, the traffic over real links, and the memory of "
        "the real model on its cards."
    )
