"""Lab 6, exercise 6: a script for one GPU on FSDP2, killed while it saves, and resumed on two ranks and on three."""

from __future__ import annotations

import functools
import json
import math
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from course_checks.harness import Contract, NotYet, fresh_seed, run_ranks, scripts
from course_checks.lab06.common import chunk_rows, lab
from course_lib.launch import RankFailed, Run
from course_lib.notebook.contents import ROOT

ONE_GPU = ROOT / "labs" / "06_fsdp" / "one_gpu.py"
BATCH, ACCUMULATE, STEPS, SAVE_EVERY, BLOCKS, MAX_NORM = 36, 3, 16, 5, 3, 1.2
SAVED_AT, DIES_AT = 2 * SAVE_EVERY, 3 * SAVE_EVERY
WEIGHTS, MOMENTS, LOSS = "what a rank keeps of the weights", "what a rank keeps of Adam's moments", "the loss of a step"
HINTS = {
    "your save overwrites the only checkpoint: write a new folder, and rename it when it is complete": lambda f: (
        f["resumed"] and f["in place"]
    ),
    "what the killed run was writing is no checkpoint: does the search for the newest one find it?": lambda f: (
        f["clause"] == "raised" and f["resumed"] and "metadata" in f["raised"]
    ),
    "as text step-5 comes after step-10: sort by number": lambda f: f["steps"] == STEPS - SAVE_EVERY,
    "without a unit of its own the root stays whole: fully_shard(model) after its blocks": lambda f: (
        f["clause"] == "raised" and "mixed" in f["raised"]
    ),
    "it starts anew: is the checkpoint found, and is the scheduler, which counts the steps, a part of it?": lambda f: (
        f["resumed"] and f["steps"] == STEPS
    ),
    "the scheduler is a part of the checkpoint": lambda f: f["clause"] == "the learning rate" and f["resumed"],
    "each rank clips by the norm of its own rows": lambda f: f["the gradient norm"] > 1.01 * MAX_NORM,
    "a micro-batch's loss is divided by the number of micro-batches, and FSDP takes the mean over the ranks": lambda f: (
        f["clause"] == "the gradient norm" and f["step"] == 1
    ),
    "are the gradients of the step before still in there? zero_grad()": lambda f: f["clause"] == "the gradient norm",
    "is it the mean over all micro-batches and all ranks?": lambda f: f["clause"] == LOSS and not f["resumed"],
}
start = functools.partial(scripts.start, ONE_GPU)


def watch(script: str, folder: str, notes: str, dies_at: int, seed: int) -> None:
    """Run a script on this rank as torchrun would; a line per optimizer step in a file of `notes`.

    Rank 1 dies in the first save after step `dies_at`, when rank 0 has written its part.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from transformers.models.llama import LlamaForCausalLM

    rank, steps, seen, models = dist.get_rank(), 0, {"rows": [], "at_once": 0}, []
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t  # noqa: E731
    store = _leave_the_group()

    def forward(module: nn.Module, args: Any) -> None:
        if isinstance(module, LlamaForCausalLM):
            models[:] = [module]
        elif isinstance(module, nn.Embedding) and torch.is_grad_enabled():
            seen["rows"] += args[0][:, :2].tolist()
            seen["at_once"] = max(seen["at_once"], len(args[0]))

    def gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        every = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen["squares"] = sum(gradient.double().square().sum().item() for gradient in every)
        seen["lr"] = float(optimizer.param_groups[0]["lr"])

    def write(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        if not seen["rows"]:  # get_state_dict() on a fresh optimizer makes a step, too
            return
        steps += 1
        weights = list(models[0].parameters())
        moments = [t for state in optimizer.state.values() for t in state.values() if getattr(t, "ndim", 0)]
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        seen["units"] = sum(isinstance(module, FSDPModule) for module in models[0].modules())
        seen["root"] = isinstance(models[0], FSDPModule)
        seen["strangers"] = len(stepped - {id(p) for p in weights})
        seen["weights"], seen["moments"] = (sum(local(t).nbytes for t in part) for part in (weights, moments))
        with open(f"{notes}/rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(seen | {"shapes": [p.shape for p in weights]}) + "\n")
        seen.update(rows=[], at_once=0)

    write_data, written = FileSystemWriter.write_data, Path(notes, "written")

    def save(writer: FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
        dying = dies_at and steps >= dies_at
        if dying and rank == 1:
            in_place = Path(writer.path, ".metadata").exists()
            while not written.exists():
                time.sleep(0.01)
            Path(notes, "died").write_text(json.dumps(in_place))
            os.kill(os.getpid(), signal.SIGKILL)
        result = write_data(writer, *args, **kwargs)
        if dying:
            written.touch()
        return result

    FileSystemWriter.write_data = save
    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(gradients)
    register_optimizer_step_post_hook(write)
    options = {"batch-size": BATCH, "accumulate": ACCUMULATE, "max-norm": MAX_NORM, "save-every": SAVE_EVERY}
    sys.argv = [script, *(f"--{name}={value}" for name, value in {"folder": folder, "seed": seed, **options}.items())]
    runpy.run_path(script, run_name="__main__")
    del store


def _leave_the_group() -> Any:
    """The script makes the process group, as under torchrun; rank 0 keeps the store where its ranks meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = torch.tensor(store.port if store else 0)
    dist.all_reduce(port)
    dist.destroy_process_group()
    os.environ |= {"MASTER_PORT": str(port.item()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store


@lab.exercise("One script, fully sharded", importance=5, difficulty=4, minutes=30)
def fully_sharded(path: Callable[[], Any]) -> str:
    """By what the script does: one process's training on 2 ranks, killed in a save, and resumed on 2 and on 3."""
    script = scripts.script_of(path())
    seed, alone, losses, weights = one_process()
    with tempfile.TemporaryDirectory() as folder:
        facts = {"resumed": False}
        seen, _, died = _run(script, f"{folder}/run", 2, facts, seed, DIES_AT)
        _right(seen, alone, 0, facts)
        if died is None:
            raise NotYet(
                f"after step {DIES_AT} rank 1 writes no rows: every rank calls dcp.save() every save_every steps"
            )
        facts |= {"resumed": True, "in place": died}
        shutil.copytree(f"{folder}/run", f"{folder}/again")
        for where, ranks in (("again", 2), ("run", 3)):
            seen, run, _ = _run(script, f"{folder}/{where}", ranks, facts, seed)
            _right(seen, alone[SAVED_AT:], SAVED_AT, facts)
            contract = Contract(HINTS, facts, f"{ranks} ranks, resumed after step {SAVED_AT}")
            logged = scripts.logged_losses(f"{folder}/{where}", saved_at=SAVED_AT, steps=STEPS)
            contract.values(LOSS, logged, losses, rtol=1e-3)
            if ranks == 2:
                _same_bits(contract, Path(folder, where, "losses.jsonl"))
            contract.values("model.safetensors", _exported(Path(folder, where)), weights, rtol=1e-3, atol=1e-4)
            reduced = sum(c.bytes for c in run.collectives if c.kind == "reduce_scatter" and c.rank == 0)
            whole = 4 * sum(w.numel() for w in weights.values())
            contract.holds(reduced >= whole * len(seen[0]), f"reduce-scatters take in {reduced:,} bytes of gradients")
    held = f"{seen[0][-1]['weights']:,} bytes of weights and {seen[0][-1]['moments']:,} of moments"
    return (
        f"killed while it saved step {DIES_AT}: from step {SAVED_AT} on, 2 ranks log the same bits as before, and 3 the losses "
        f"and weights of one process. Each of 3 holds {held}; the whole has {whole:,} and {2 * whole:,}"
    )


@functools.cache
def one_process() -> tuple[int, list[dict[str, Any]], list[float], dict[str, torch.Tensor]]:
    """A seed, and the script for one GPU in one process: its steps, its losses, its weights."""
    with tempfile.TemporaryDirectory() as folder:
        seed = fresh_seed()
        seen, *_ = _run(ONE_GPU, folder, 1, {}, seed)
        return seed, seen[0], scripts.logged_losses(folder, saved_at=STEPS, steps=STEPS), _exported(Path(folder))


def _exported(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    file = folder / "model" / "model.safetensors"
    if not file.exists():
        raise NotYet("no model.safetensors in {folder}/model: at the end rank 0 calls save_pretrained()")
    return load_file(file)


def _same_bits(contract: Contract, log: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_step = {step: [line["loss"] for line in lines if line["step"] == step] for step in range(1, STEPS + 1)}
    twice = {step: pair for step, pair in by_step.items() if len(pair) == 2}
    contract.holds(bool(twice), "no step is in losses.jsonl from before the crash and after it")
    told = "; ".join(f"step {step}: {one!r}, then {other!r}" for step, (one, other) in twice.items() if one != other)
    contract.holds(not told, f"on the same number of ranks the same bits come out, not {told}")


def _run(
    script: Path, folder: str, ranks: int, facts: dict[str, Any], seed: int, dies_at: int = 0
) -> tuple[list[list[dict[str, Any]]], Run | None, bool | None]:
    """What each rank's steps looked like; the run, if it came to its end; whether the killed save went over another one."""
    Path(folder).mkdir(exist_ok=True)
    run, failure = None, None
    with tempfile.TemporaryDirectory() as notes:
        try:
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
                run = run_ranks(watch, str(script), folder, notes, dies_at, seed, ranks=ranks, timeout=45.0)
        except (NotYet, RankFailed) as error:
            failure = error
        died = Path(notes, "died")
        if failure and not died.exists():
            if isinstance(failure, RankFailed) and failure.where:
                facts["raised"] = f"{failure.cause_type}: {failure.cause_message}"
                told = (
                    f"your script raised {facts['raised'][:300]} on rank {failure.rank} of {ranks} at {failure.where}"
                )
                raise Contract(HINTS, facts).broken(told, "raised") from failure
            raise failure
        files = [Path(notes, f"rank{rank}.jsonl") for rank in range(ranks)]
        seen = [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]
        return seen, run, json.loads(died.read_text()) if died.exists() else None


def _right(seen: list[list[dict[str, Any]]], expected: list[dict[str, Any]], done: int, facts: dict[str, Any]) -> None:
    """Whether every rank's steps are the expected ones, those after `done`; a killed run has fewer."""
    ranks = len(seen)
    for rank, steps in enumerate(seen):
        about = f"rank {rank} of {ranks}" + (f", resumed after step {done}" if done else "")
        contract = Contract(HINTS, facts | {"steps": len(steps)}, about)
        least = len(expected) if done else DIES_AT
        count = f"the optimizer steps {len(steps)} times, not {least}: every rank trains on its rows"
        contract.holds(least <= len(steps) <= len(expected), count, "steps")
        for number, (step, right, *together) in enumerate(zip(steps, expected, *seen, strict=False), start=done + 1):
            contract.about, contract.facts["step"] = f"{about}, step {number}", number
            contract.holds(step["root"], "the root is no unit: after the blocks comes fully_shard(model)")
            units = f"{step['units']} units, not {BLOCKS + 1}: fully_shard each block, and the model for what is left"
            contract.holds(step["units"] > BLOCKS, units)
            strangers = f"{step['strangers']} of the optimizer's tensors are no parameters of the model any more: make it after sharding"
            contract.holds(not step["strangers"], strangers)
            for what, held, each in ((WEIGHTS, step["weights"], 4), (MOMENTS, step["moments"], 8)):
                mine, most = (each * _elements(right["shapes"], ranks, r) for r in (rank, 0))
                contract.memory(what, held, at_least=0.8 * mine, at_most=most)
            micro = BATCH // ACCUMULATE // ranks
            contract.holds(
                step["at_once"] == micro, f"{step['at_once']} rows go through the model at once, not {micro}"
            )
            contract.values("the learning rate", step["lr"], right["lr"], rtol=1e-6)
            if len(together) == ranks:
                rows = sorted(row for each in together for row in each["rows"])
                told = "the ranks' rows are not the rows of the step's batch, each once: does each rank take its own share?"
                contract.holds(rows == sorted(right["rows"]), told, "rows")
                norm = sum(each["squares"] for each in together) ** 0.5
                contract.values("the gradient norm", norm, right["squares"] ** 0.5, rtol=1e-3)


def _elements(shapes: list[list[int]], ranks: int, rank: int) -> int:
    return sum(len(chunk_rows(shape[0], ranks, rank)) * math.prod(shape[1:]) for shape in shapes)
