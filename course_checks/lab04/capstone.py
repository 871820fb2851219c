"""Lab 4, exercise 5: a script for one GPU on Accelerate, started by torchrun, killed, and resumed."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_checks.harness import Contract, NotYet, scripts, without_limit
from course_checks.lab04.common import SLACK, lab
from course_lib.launch.commands import Background
from course_lib.launch.rank import PEER_LOST
from course_lib.notebook.contents import ROOT

ONE_GPU = ROOT / "labs" / "04_ddp_accelerate" / "one_gpu.py"
BATCH, ACCUMULATE, STEPS, SAVED_AT, DIES_AT, RANKS = 24, 3, 8, 3, 5, 2
GRADIENT_BYTES = 4 * (12 * 64 + 64 + 64 * 64 + 64 + 64 * 5 + 5)
GRADIENT = "the gradient at the optimizer's step, times a fixed vector,"
HINTS = {
    "a prepared scheduler moves once per process: leave it out of prepare(), or count in its unit": lambda f: (
        f["clause"] == "the learning rate" and f["the learning rate"] < f["lr"]
    ),
    "a scheduler that was not prepared needs register_for_checkpointing()": lambda f: (
        f["clause"] == "the learning rate" and f["resumed"]
    ),
    "accelerator.backward() divides by the number of micro-batches already": lambda f: f["times"](1 / ACCUMULATE),
    "is it clipped once, when gradients are synchronised? Before, it is not whole": lambda f: (
        f["clause"] in ("its norm", GRADIENT)
    ),
    "is it the loss of this rank alone? accelerator.reduce(loss, 'mean')": lambda f: (
        f["clause"] == "the loss of a step"
    ),
    "rows that fill up the last batch count twice: gather_for_metrics() drops them": lambda f: (
        f["clause"] == "the accuracy"
    ),
    "a resumed run goes on where it stopped: are the steps done saved and loaded, the scheduler's too?": lambda f: f[
        "resumed"
    ],
}


start = functools.partial(scripts.start, ONE_GPU)


@lab.exercise("One script, many GPUs", importance=5, difficulty=4, minutes=35)
def many_gpus(path: Callable[[], Any]) -> str:
    """By what the script does on 2 ranks: the training of one process, also across a death and a resume."""
    script = scripts.script_of(path())
    torchrun = f"torchrun --standalone --nproc_per_node {RANKS}"
    with tempfile.TemporaryDirectory() as folder, without_limit():
        alone = one_process()
        seen = _run(script, Path(folder, "run"), torchrun, dies_at=DIES_AT)
        for rank in range(RANKS):
            _right(seen, rank, alone.ranks[0], 0, DIES_AT)
        states = [len(list(Path(folder, "run").rglob(f"random_states_{rank}.pkl"))) for rank in range(RANKS)]
        if states[0] and not all(states):
            raise NotYet("only rank 0's random state is saved: every rank calls save_state()")
        seen = _run(script, Path(folder, "run"), torchrun)
        for rank in range(RANKS):
            _right(seen, rank, alone.ranks[0], SAVED_AT, STEPS)
        losses = scripts.logged_losses(str(Path(folder, "run")), saved_at=SAVED_AT, steps=STEPS)
    contract = Contract(HINTS)
    contract.values("the loss of a step", losses, alone.losses, rtol=1e-3)
    contract.values("the accuracy", seen.accuracy, alone.accuracy, rtol=1e-6)
    return (
        f"{RANKS} ranks under DDP, killed in step {DIES_AT} and resumed after step {SAVED_AT}: rows, rates, gradients, losses and "
        f"accuracy of one process; {seen.ranks[0][1]['sent']:,} bytes all-reduced in a step"
    )


@functools.cache
def one_process() -> _Seen:
    """The script for one GPU, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        seen = _run(ONE_GPU, Path(folder, "run"), "python")
        seen.losses = scripts.logged_losses(str(Path(folder, "run")), saved_at=STEPS, steps=STEPS)
        return seen


class _Seen:
    """What the witness wrote of each rank, and the files of the script."""

    losses: list[float]

    def __init__(self, folder: Path, witness: Path) -> None:
        files = sorted(witness.glob("rank*.jsonl"))
        self.ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        accuracy = folder / "accuracy.json"
        self.accuracy = json.loads(accuracy.read_text()) if accuracy.exists() else None


def _run(script: Path, folder: Path, launcher: str, dies_at: int = 0) -> _Seen:
    folder.mkdir(exist_ok=True)
    witness = Path(tempfile.mkdtemp(dir=folder.parent))
    command = f"{launcher} -m course_checks.lab04.witness '{script}' --folder '{folder}' --batch-size {BATCH} "
    command += f"--accumulate {ACCUMULATE} --save-every {SAVED_AT} --max-norm 0.4 --seed 7"
    where = {"WITNESS": str(witness), "DIES_AT": str(dies_at), "TMPDIR": str(folder.parent)}
    with Background(command, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true", **where) as running:
        output = running.wait(90, check=False)
    seen = _Seen(folder, witness)
    errors = re.findall(
        r"^\[rank\d\]: (\w+(?:Error|Exception|Exit).*)", output, re.MULTILINE
    )  # torch's mark for a rank
    own = [error for error in errors if not any(sign in error.lower() for sign in PEER_LOST)]
    if own:
        raise NotYet(f"{script.name} raised {own[-1]}")
    return seen


def _right(seen: _Seen, rank: int, expected: list[dict[str, Any]], begin: int, end: int) -> None:
    about = f"rank {rank} of {RANKS}" + (f", resumed after step {begin}" if begin else "")
    contract = Contract(HINTS, {"resumed": begin > 0}, about)
    contract.holds(len(seen.ranks) == RANKS, f"{len(seen.ranks)} processes train")
    steps = seen.ranks[rank][:-1] if end == STEPS else seen.ranks[rank]  # a finished run has a last line
    contract.holds(all(step["ddp"] for step in steps), "no DistributedDataParallel runs: train what prepare() returns")
    count = f"the optimizer steps {len(steps)} times, and should from step {begin + 1} to {end}: {end - begin} times"
    contract.holds(len(steps) == end - begin or (not begin and len(steps) >= end - 1), count)
    for number, (step, right) in enumerate(zip(steps, expected[begin:end], strict=False), start=begin + 1):
        contract.about = f"{about}, step {number}"
        contract.facts |= {
            "lr": right["lr"],
            "times": lambda f, s=step, r=right: abs(s["norm"] / r["norm"] / f - 1) < 0.01,
        }
        micro = BATCH // ACCUMULATE // RANKS
        contract.holds(step["at_once"] == micro, f"{step['at_once']} rows go through the model at once, not {micro}")
        mine = [row for row in step["rows"] if row in right["rows"]]
        told = f"{len(mine)} of the {len(step['rows'])} rows are of the batch that one process takes here"
        contract.holds(len(mine) == len(step["rows"]) == BATCH // RANKS, told)
        other = seen.ranks[1 - rank][number - begin - 1 :][:1]
        shared = {row for line in other for row in line["rows"]} & set(step["rows"])
        contract.holds(not shared, f"{len(shared)} of its rows the other rank trains on, too")
        contract.values("the learning rate", step["lr"], right["lr"], rtol=1e-6)
        contract.values("its norm", step["norm"], right["norm"], rtol=1e-3)
        contract.values(GRADIENT, step["along"], right["along"], rtol=1e-2, atol=1e-3)
        if number > begin + 1:  # before the first one, weights and random states travel
            contract.memory("what it sends", step["sent"], at_least=GRADIENT_BYTES, at_most=GRADIENT_BYTES + SLACK)
    if end == STEPS:
        most = expected[-1]["tested"] / RANKS + 8
        tested = seen.ranks[rank][-1]["tested"]
        contract.holds(0 < tested <= most, f"it evaluates {tested} rows, and {most:.0f} at most")
