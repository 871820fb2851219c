"""Lab 5, exercise 5: a script for one GPU on ZeRO's stage 3, run on two ranks, killed, and resumed on two and three."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from course_checks.harness import Contract, NotYet, run_ranks, scripts
from course_checks.lab05.common import SLACK, lab
from course_lib.launch import RankFailed
from course_lib.notebook.contents import ROOT
from course_lib.on_cpu.deepspeed import prepare_deepspeed

ONE_GPU = ROOT / "labs" / "05_deepspeed_zero" / "one_gpu.py"
BATCH, ACCUMULATE, STEPS, SAVED_AT, DIES_AT, MAX_NORM = 36, 3, 8, 4, 5, 0.4
OPTIONS = (
    f"--batch-size {BATCH} --accumulate {ACCUMULATE} --save-every {SAVED_AT} --max-norm {MAX_NORM} --seed 7".split()
)
FEATURES, SIZES = 12, (12 * 128, 128, 128 * 64, 64, 64 * 5, 5)
HELD = "a rank's share of the weights"
HINTS = {
    "call engine.step() after each micro-batch: the engine counts": lambda f: (
        f["clause"] == "rows" and f["count"] > BATCH
    ),
    "train what deepspeed.initialize() returns": lambda f: f["clause"] == "steps" and not f["steps"],
    "DeepSpeed keeps tensors of up to 100,000 elements whole unless stage3_param_persistence_threshold says otherwise": (
        lambda f: f["clause"] == HELD
    ),
    "hand the scheduler to initialize(): the engine steps, saves and loads it": lambda f: (
        f["clause"] == "the learning rate"
    ),
    "engine.backward() divides by the number of micro-batches already": lambda f: f["norm"](1 / ACCUMULATE),
    "gradient_clipping is a key of the configuration": lambda f: f["the gradient norm"] > 1.01 * MAX_NORM,
    "call the engine, not the model": lambda f: f["clause"] == "the gradient norm",
    "is it the mean over all micro-batches and all ranks?": lambda f: f["clause"] == "the loss of a step",
}
start = functools.partial(scripts.start, ONE_GPU)


def watch(script: str, folder: str, notes: str, dies_at: int) -> None:
    """Run a script on this rank as torchrun would; a line per optimizer step in a file of `notes`. Rank 1 dies at `dies_at`."""
    rank, steps = int(os.environ["RANK"]), 0
    seen: dict[str, Any] = {"rows": [], "at_once": 0, "squares": 0.0}

    def forward(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Linear) and module.in_features == FEATURES and torch.is_grad_enabled():
            numbers = [round(x, 5) for x in args[0][:, 0].tolist()]
            seen["rows"] += numbers
            seen["at_once"] = max(seen["at_once"], len(numbers))

    def gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # at stage 3 DeepSpeed may step group by group
        every = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen["squares"] += sum(gradient.double().square().sum().item() for gradient in every)
        seen["lr"] = optimizer.param_groups[0]["lr"]

    def write(**more: Any) -> None:
        nonlocal steps
        steps += 1
        with open(f"{notes}/rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(seen | more) + "\n")
        seen.update(rows=[], at_once=0, squares=0.0)
        if rank == 1 and steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(gradients)
    if script == str(ONE_GPU):
        register_optimizer_step_post_hook(lambda *_: write())
    else:
        _watch_engine(write)
    scripts.run_as_main(script, "--folder", folder, *OPTIONS)


def _watch_engine(write: Callable[..., None]) -> None:
    prepare_deepspeed()
    import deepspeed

    step = deepspeed.DeepSpeedEngine.step

    def watched(engine: Any, *args: Any, **kwargs: Any) -> None:
        last = engine.is_gradient_accumulation_boundary()
        step(engine, *args, **kwargs)
        if last:
            held = sum(t.nbytes for p in engine.module.parameters() for t in (p, getattr(p, "ds_tensor", p[:0])))
            write(stage=engine.zero_optimization_stage(), held=held)

    deepspeed.DeepSpeedEngine.step = watched


def convert(state: str) -> None:
    """DeepSpeed's own `ds_to_universal`, of the newest checkpoint."""
    from deepspeed.checkpoint import ds_to_universal

    tag = Path(state, "latest").read_text()
    sys.argv = ["ds_to_universal", "--input_folder", f"{state}/{tag}", "--output_folder", f"{state}/universal"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


@lab.exercise("One script, sharded", importance=5, difficulty=4, minutes=25)
def sharded(path: Callable[[], Any]) -> str:
    """By what the script does: one process's training on 2 ranks at stage 3, killed, and resumed on 2 and on 3."""
    script = scripts.script_of(path())
    alone, losses, weights = one_process()
    with tempfile.TemporaryDirectory() as folder:
        seen = _run(script, f"{folder}/run", 2, DIES_AT)
        for rank in range(2):
            _right(seen, rank, alone[:DIES_AT], 0)
        state = Path(folder, "run", "state")
        if not (state / "latest").exists():
            raise NotYet(
                f"after {DIES_AT} steps no DeepSpeed checkpoint is in {{folder}}/state: engine.save_checkpoint()"
            )
        shutil.copytree(f"{folder}/run", f"{folder}/again")
        seen = _run(script, f"{folder}/again", 2)
        for rank in range(2):
            _right(seen, rank, alone[SAVED_AT:], SAVED_AT)
        run_ranks(convert, str(state), ranks=1, timeout=60.0)
        try:
            seen = _run(script, f"{folder}/run", 3)
        except RankFailed as failed:
            if "load_checkpoint" not in failed.where:
                raise
            need = (
                '2 ranks\' slices fit 3 ranks only as a Universal Checkpoint: {"checkpoint": {"load_universal": True}}'
            )
            raise NotYet(f"load_checkpoint() raised {failed.cause_type}: {need}") from failed
        for rank in range(3):
            _right(seen, rank, alone[SAVED_AT:], SAVED_AT)
        contract, saved = Contract(HINTS), Path(folder, "run", "pytorch_model.bin")
        logged = scripts.logged_losses(f"{folder}/run", saved_at=SAVED_AT, steps=STEPS)
        contract.values("the loss of a step", logged, losses, rtol=1e-3)
        need = "no pytorch_model.bin in {folder}: save_16bit_model(), with stage3_gather_16bit_weights_on_model_save"
        contract.holds(saved.exists(), need)
        contract.values("pytorch_model.bin", torch.load(saved), weights, rtol=1e-3, atol=1e-4)
    return (
        f"stage 3 on 2 ranks, killed in step {DIES_AT}, resumed after step {SAVED_AT} on 2 and on 3: rows, learning rates, gradient norms, "
        f"losses and weights of one process; each of 3 ranks holds {seen[0][-1]['held']:,} bytes of {4 * sum(SIZES):,}"
    )


@functools.cache
def one_process() -> tuple[scripts.Lines, list[float], dict[str, torch.Tensor]]:
    """The script for one GPU in one process: its steps, its losses, its weights."""
    with tempfile.TemporaryDirectory() as folder:
        steps = _run(ONE_GPU, folder, 1)[0]
        losses = scripts.logged_losses(folder, saved_at=STEPS, steps=STEPS)
        return steps, losses, torch.load(Path(folder, "pytorch_model.bin"))


def _run(script: Path, folder: str, ranks: int, dies_at: int = 0) -> list[scripts.Lines]:
    """What each rank's optimizer steps looked like."""
    seen, failed = scripts.watched(watch, script, folder, dies_at, ranks=ranks)
    if failed and not (dies_at and len(seen[1]) == dies_at):
        raise failed
    return seen


def _right(seen: list[scripts.Lines], rank: int, expected: scripts.Lines, done: int) -> None:
    """Whether a rank's steps are the expected ones, those after `done`; a killed run's survivor may miss the last."""
    ranks, steps = len(seen), seen[rank]
    about = f"rank {rank} of {ranks}" + (f", resumed after step {done}" if done else "")
    contract, shares = Contract(HINTS, {"steps": len(steps)}, about), sum(-(-size // ranks) for size in SIZES)
    count = f"the engine steps {len(steps)} times, not {len(expected)}"
    contract.holds(len(expected) - (not done) <= len(steps) <= len(expected), count, "steps")
    for number, (step, right) in enumerate(zip(steps, expected, strict=False)):
        contract.about = f"{about}, step {done + number + 1}"
        contract.holds(step["stage"] == 3, f"ZeRO's stage is {step['stage']}, not 3")
        contract.memory(HELD, step["held"], at_most=4 * shares + SLACK)
        micro = BATCH // ACCUMULATE // ranks
        contract.holds(step["at_once"] == micro, f"{step['at_once']} rows go through the model at once, not {micro}")
        contract.values("the learning rate", step["lr"], right["lr"], rtol=1e-6)
        together = [line[number] for line in seen if len(line) > number]
        if len(together) == ranks:
            rows = sorted(row for each in together for row in each["rows"])
            told = f"the ranks together train on {len(set(rows) & set(right['rows']))} of the step's {BATCH} rows, each once?"
            contract.facts["count"] = len(rows)
            contract.holds(rows == sorted(right["rows"]), told, "rows")
            norm, wanted = sum(each["squares"] for each in together) ** 0.5, right["squares"] ** 0.5
            contract.facts["norm"] = lambda f, a=norm, b=wanted: abs(a / (f * b) - 1) < 0.01
            contract.values("the gradient norm", norm, wanted, rtol=1e-3)
