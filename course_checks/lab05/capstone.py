"""Lab 5, exercise 5: a script for one GPU on ZeRO's stage 3, run on two ranks, killed, and resumed on three."""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course_checks.harness import Contract, NotYet, run_ranks
from course_checks.lab05.common import SLACK, lab
from course_lib.launch import RankFailed
from course_lib.notebook.contents import ROOT
from course_lib.observe.collectives import record_collectives

ONE_GPU = ROOT / "labs" / "05_deepspeed_zero" / "one_gpu.py"
BATCH, ACCUMULATE, STEPS, SAVED_AT, DIES_AT, TIMEOUT = 24, 2, 8, 3, 5, 90.0
FEATURES, SIZES = 12, (12 * 128, 128, 128 * 64, 64, 64 * 5, 5)
HINTS = {
    "train what deepspeed.initialize() returns": lambda f: f["clause"] == "steps" and not f["steps"],
    "DeepSpeed keeps tensors of up to 100,000 elements whole unless stage3_param_persistence_threshold says otherwise": lambda f: (
        f["clause"] == "weights that a rank holds"
    ),
    "hand the scheduler to initialize(): then the engine steps it and saves it": lambda f: (
        f["clause"] == "the learning rate"
    ),
    "engine.backward() divides by the number of micro-batches already": lambda f: f["norm"](1 / ACCUMULATE),
    "gradient_clipping is a key of the configuration": lambda f: f["clause"] == "its norm",
    "is it the loss of this rank alone?": lambda f: f["clause"] == "the losses",
}


def start(path: str) -> Path:
    """Copy the script for one GPU to `path`, unless a file is there; open it in JupyterLab and edit it."""
    file = Path(path).resolve()
    if not file.exists():
        shutil.copyfile(ONE_GPU, file)
    return file


def watch(script: str, folder: str, notes: str, dies_at: int = 0, rank: int | None = None) -> None:
    """Run a script in this process as `torchrun` would; a line per optimizer step in a file of `notes`.

    rank: None for a script without DeepSpeed. Rank 1 dies at step `dies_at`.
    """
    steps, recording = 0, ExitStack()
    issued = recording.enter_context(record_collectives())
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
        nonlocal steps, issued
        steps += 1
        recording.close()  # fills the list
        with open(f"{notes}/rank{rank or 0}.jsonl", "a") as file:
            file.write(json.dumps(seen | {"sent": sum(c.wire_bytes for c in issued)} | more) + "\n")
        issued = recording.enter_context(record_collectives())
        seen.update(rows=[], at_once=0, squares=0.0)
        if rank == 1 and steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(gradients)
    if rank is None:
        plain = torch.optim.AdamW.step
        torch.optim.AdamW.step = lambda self, *args: (plain(self, *args), write())[0]
    else:
        _watch_deepspeed(write)
    sys.argv = [script, "--folder", folder, "--batch-size", str(BATCH), "--accumulate", str(ACCUMULATE)]
    sys.argv += ["--save-every", str(SAVED_AT), "--max-norm", "0.4", "--seed", "7"]
    with recording:
        runpy.run_path(script, run_name="__main__")


def _watch_deepspeed(write: Callable[..., None]) -> None:
    """A line per step of an engine, with the proof that it shards."""
    from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed

    prepare_deepspeed()
    import deepspeed

    step = deepspeed.DeepSpeedEngine.step

    def watched(engine: Any, *args: Any, **kwargs: Any) -> None:
        last = engine.is_gradient_accumulation_boundary()
        step(engine, *args, **kwargs)
        if last:
            local = 0  # nothing is sharded
            with suppress(RuntimeError):
                local = assert_sharded(engine)
            held = sum(t.nbytes for p in engine.module.parameters() for t in (p, getattr(p, "ds_tensor", p[:0])))
            write(stage=engine.zero_optimization_stage(), local=local, held=held)

    deepspeed.DeepSpeedEngine.step = watched


def on_a_rank(script: str, folder: str, notes: str, dies_at: int) -> None:
    watch(script, folder, notes, dies_at, int(os.environ["RANK"]))


def convert(folder: str) -> None:
    """DeepSpeed's own `ds_to_universal`, of the newest checkpoint."""
    from deepspeed.checkpoint import ds_to_universal

    tag = Path(folder, "latest").read_text()
    sys.argv = ["ds_to_universal", "--input_folder", f"{folder}/{tag}", "--output_folder", f"{folder}/universal"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


@lab.exercise("One script, sharded", importance=5, difficulty=4, minutes=30)
def sharded(path: Callable[[], Any]) -> str:
    """By what the script does: one process's training on 2 ranks at stage 3, killed, and resumed on 3."""
    script = Path(str(path())).resolve()
    if not script.is_file():
        raise NotYet(f"there is no file {script.name}: return the path of your script")
    alone, whole = one_process()
    with tempfile.TemporaryDirectory() as folder:
        seen = _run(on_a_rank, script, folder, 2, DIES_AT)
        for rank in range(2):
            _right(seen, rank, alone[:DIES_AT], 2)
        state = Path(folder, "state")
        if not (state / "latest").exists():
            raise NotYet(
                f"there is no DeepSpeed checkpoint in {{folder}}/state after {DIES_AT} steps: engine.save_checkpoint()"
            )
        saved = list(state.glob("*/*rank_[01]*optim_states.pt"))
        if len(saved) < 2:
            raise NotYet("of 2 ranks 1 has saved its slices: every rank calls save_checkpoint()")
        run_ranks(convert, str(state), ranks=1, timeout=TIMEOUT)
        seen = _run(on_a_rank, script, folder, 3)
        for rank in range(3):
            _right(seen, rank, alone[SAVED_AT:], 3)
        lines = [json.loads(line) for line in Path(folder, "losses.jsonl").read_text().splitlines()]
        weights = Path(folder, "pytorch_model.bin")
        weights = torch.load(weights) if weights.exists() else {}
    contract, times = Contract(HINTS, {"norm": lambda _: False}), Counter(line["step"] for line in lines)
    once = all(count == 1 if step <= SAVED_AT else count <= 2 for step, count in times.items())
    contract.holds(
        once and sorted(times) == [*range(1, STEPS + 1)], f"losses.jsonl has these steps, times: {dict(times)}"
    )
    losses = {line["step"]: line["loss"] for line in lines}
    contract.values("the losses", [losses[n] for n in sorted(losses)], whole["losses"], rtol=1e-3)
    contract.values("the weights of pytorch_model.bin", weights, whole["weights"], rtol=1e-3, atol=1e-4)
    first = seen[0][0]
    return (
        f"stage 3 on 2 ranks, killed in step {DIES_AT}, resumed on 3 after step {SAVED_AT}: rows, rates, norms, losses and weights "
        f"of one process; each of 3 ranks holds {first['held']:,} bytes of {4 * sum(SIZES):,} and sends {first['sent']:,.0f} in a step"
    )


@functools.cache
def one_process() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The script for one GPU, in one process: its steps, and its files."""
    with tempfile.TemporaryDirectory() as folder:
        steps = _run(watch, ONE_GPU, folder, 1)[0]
        losses = [json.loads(line)["loss"] for line in Path(folder, "losses.jsonl").read_text().splitlines()]
        return steps, {"losses": losses, "weights": torch.load(Path(folder, "pytorch_model.bin"))}


def _run(
    program: Callable[..., Any], script: Path, folder: str, ranks: int, dies_at: int = 0
) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as notes:
        try:
            run_ranks(program, str(script), folder, notes, dies_at, ranks=ranks, timeout=TIMEOUT)
        except RankFailed as failed:
            if not dies_at or failed.cause_type != "SIGKILL":
                raise
        except NotYet:
            if not dies_at:
                raise
        files = [Path(notes, f"rank{rank}.jsonl") for rank in range(ranks)]
        return [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]


def _right(seen: list[list[dict[str, Any]]], rank: int, expected: list[dict[str, Any]], ranks: int) -> None:
    about = f"rank {rank} of {ranks}" + (f", resumed after step {SAVED_AT}" if ranks == 3 else "")
    contract, steps = Contract(HINTS, {"norm": lambda _: False, "steps": len(seen[rank])}, about), seen[rank]
    if not len(expected) - (ranks == 2) <= len(steps) <= len(expected):  # the survivor may not finish the last step
        raise contract.broken(f"the engine steps {len(steps)} times, not {len(expected)}", "steps")
    shares = sum(-(-size // ranks) for size in SIZES)
    for number, (step, right) in enumerate(zip(steps, expected, strict=False), 1):
        contract.about = f"{about}, step {number + STEPS - len(expected) if ranks == 3 else number}"
        contract.holds(step["stage"] == 3 and step["local"] > 0, f"ZeRO's stage is {step['stage']}, not 3")
        contract.memory("weights that a rank holds", step["held"], at_most=4 * shares + SLACK)
        micro = BATCH // ACCUMULATE // ranks
        contract.holds(step["at_once"] == micro, f"{step['at_once']} rows go through the model at once, not {micro}")
        every = [row for line in seen for each in line[number - 1 : number] for row in each["rows"]]
        told = f"{len(step['rows'])} rows, {len(set(step['rows']) & set(right['rows']))} of them of this step's batch"
        contract.holds(set(step["rows"]) <= set(right["rows"]) and len(step["rows"]) == BATCH // ranks, told)
        contract.holds(len(every) == len(set(every)), "two ranks train on the same rows")
        contract.values("the learning rate", step["lr"], right["lr"], rtol=1e-6)
        together = [line[number - 1]["squares"] for line in seen if len(line) >= number]
        if len(together) == ranks:
            norm, wanted = sum(together) ** 0.5, right["squares"] ** 0.5
            contract.facts["norm"] = lambda f, a=norm, b=wanted: abs(a / (f * b) - 1) < 0.01
            contract.values("its norm", norm, wanted, rtol=1e-3)
        if number > 1:
            once = 4 * (ranks - 1) * shares
            bounds = {"at_least": 1.9 * ACCUMULATE * once, "at_most": 3 * ACCUMULATE * once * 1.1 + SLACK}
            contract.memory("what it sends", int(step["sent"]), **bounds)
