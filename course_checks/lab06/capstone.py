"""Lab 6, exercise 6: a script for one GPU on FSDP2, killed while it saves, and resumed on two ranks and on three."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_checks.harness import Contract, NotYet, fresh_seed, scripts
from course_checks.lab06.common import chunk_rows, lab, local
from course_lib.launch import RankFailed
from course_lib.notebook.contents import ROOT

ONE_GPU = ROOT / "labs" / "06_fsdp" / "one_gpu.py"
BATCH, STEPS, SAVE_EVERY, BLOCKS, MAX_NORM = 12, 16, 5, 2, 1.15
OPTIONS = f"--batch-size {BATCH} --save-every {SAVE_EVERY} --max-norm {MAX_NORM}".split()
SAVED_AT, DIES_AT = 2 * SAVE_EVERY, 3 * SAVE_EVERY
LR, NORM, LOSS = "the learning rate", "the gradient norm", "the loss of a step"
HINTS = {
    "the save overwrote the only checkpoint: write a new folder, then rename it": lambda f: f["in place"],
    "is that the folder which the killed run was writing?": lambda f: "metadata" in f["raised"] and f["done"],
    "without fully_shard(model) the rest stays whole": lambda f: "mixed" in f["raised"],
    "make the optimizer after sharding, which makes new parameters": lambda f: f["strangers"],
    "as text, step-5 comes after step-10": lambda f: f["done"] and f["begins"] == SAVE_EVERY,
    "is the scheduler, which counts the steps, in the checkpoint?": lambda f: f["done"] and f["begins"] == 0,
    "is everything restored, the optimizer's rate and moments included?": lambda f: (
        f["done"] and f["clause"] in (LR, NORM)
    ),
    "is it the norm of all ranks' rows that clips?": lambda f: f[NORM] > 1.0001 * MAX_NORM,
    "get_state_dict() makes an empty step on a fresh optimizer, and Adam counts it": lambda f: f["counted"] > f["step"],
    "FSDP takes the mean over the ranks already": lambda f: abs(f["ranks"] * f[NORM] / f["unclipped"] - 1) < 1e-3,
    "zero_grad()? --max-norm? The same optimizer?": lambda f: f["clause"] == NORM,
    "is it the mean over the ranks?": lambda f: f["clause"] == LOSS,
}
start = functools.partial(scripts.start, ONE_GPU)


def watch(script: str, folder: str, notes: str, seed: int, dies_at: int) -> None:
    """Run a script as torchrun would, and note each optimizer step. At `dies_at` rank 1 dies in its save, after rank 0's."""
    from torch.distributed.checkpoint import FileSystemWriter, SavePlan
    from torch.distributed.checkpoint.planner import WriteItemType
    from torch.distributed.fsdp import FSDPModule
    from transformers.models.llama import LlamaForCausalLM

    rank, store, model, steps = dist.get_rank(), _leave_the_group(), nn.Module(), 0
    seen: dict[str, Any] = {"rows": []}

    def forward(module: nn.Module, args: Any) -> None:
        nonlocal model
        if isinstance(module, LlamaForCausalLM):
            model = module
        elif isinstance(module, nn.Embedding) and torch.is_grad_enabled():
            seen["rows"] += args[0][:, :2].tolist()

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        if not seen["rows"]:  # get_state_dict() makes a step, too, on a fresh optimizer
            return
        steps, weights = steps + 1, list(model.parameters())
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        moments = [t for state in optimizer.state.values() for t in state.values() if getattr(t, "ndim", 0)]
        seen["squares"] = sum(local(p.grad).double().square().sum().item() for p in stepped if p.grad is not None)
        seen["counted"] = int(max((state.get("step", 0) for state in optimizer.state.values()), default=0))
        seen["lr"] = float(optimizer.param_groups[0]["lr"])
        seen["units"] = sum(isinstance(module, FSDPModule) for module in model.modules())
        seen["strangers"] = len({id(p) for p in stepped} - {id(p) for p in weights})
        seen["weights"], seen["moments"] = (sum(local(t).nbytes for t in part) for part in (weights, moments))
        seen["shapes"] = [p.shape for p in weights]
        write(**seen)
        seen["rows"] = []

    def write(**line: Any) -> None:
        with open(f"{notes}/rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def save(writer: FileSystemWriter, plan: SavePlan, *args: Any, **kwargs: Any) -> Any:
        last = dies_at and steps >= dies_at
        if last and rank == 1:
            store.wait(["rank 0 has written"])
            shards = sum(item.type == WriteItemType.SHARD for item in plan.items)
            write(shards=shards, in_place=Path(writer.path, ".metadata").exists())
            os.kill(os.getpid(), signal.SIGKILL)
        result = write_data(writer, plan, *args, **kwargs)
        if last:
            store.set("rank 0 has written", "")
        return result

    def clipped(*args: Any, **kwargs: Any) -> torch.Tensor:
        norm = clip(*args, **kwargs)
        seen["unclipped"] = None if isinstance(norm, DTensor) else float(norm)  # one process's: what hints compare with
        return norm

    clip, nn.utils.clip_grad_norm_ = nn.utils.clip_grad_norm_, clipped
    write_data, FileSystemWriter.write_data = FileSystemWriter.write_data, save
    register_module_forward_pre_hook(forward)
    register_optimizer_step_post_hook(step)
    scripts.run_as_main(script, "--folder", folder, "--seed", str(seed), *OPTIONS)


def _leave_the_group() -> dist.TCPStore:
    """The script makes the process group, as under torchrun: leave it the store where the ranks meet, rank 0's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = torch.tensor(store.port if store else 0)
    dist.all_reduce(port)
    store = store or dist.TCPStore("127.0.0.1", int(port))
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.item()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store


@lab.exercise("One script, fully sharded", importance=5, difficulty=4, minutes=30)
def fully_sharded(path: Callable[[], Any]) -> str:
    """By what the script does: one process's training on 2 ranks, killed in a save, and resumed on 2 and on 3."""
    script, (seed, alone, losses) = scripts.script_of(path()), one_process()
    facts = {"done": 0, "seed": seed, "alone": alone}
    with tempfile.TemporaryDirectory() as folder:
        seen, death = _run(script, f"{folder}/run", 2, facts, DIES_AT)
        _right(seen, facts)
        if not death.get("shards"):
            raise NotYet(
                f"after step {DIES_AT} rank 1 writes no rows: every rank calls dcp.save(), with its own shards"
            )
        if not list(Path(folder, "run").rglob(".metadata")):
            raise NotYet("rank 1 died in a save, and no complete checkpoint is left: delete old ones after the new one")
        facts |= {"done": SAVED_AT, "in place": death["in_place"]}
        shutil.copytree(f"{folder}/run", f"{folder}/again")
        for where, ranks in ((f"{folder}/again", 2), (f"{folder}/run", 3)):
            seen, _ = _run(script, where, ranks, facts)
            _right(seen, facts)
            contract = Contract(HINTS, facts, f"{ranks} ranks, resumed after step {SAVED_AT}")
            logged = scripts.logged_losses(where, saved_at=SAVED_AT, steps=STEPS)
            contract.values(LOSS, logged, losses, rtol=1e-4)
            if ranks == 2:  # the other copy's log still ends with the crash
                lines = map(json.loads, Path(folder, "run", "losses.jsonl").read_text().splitlines())
                other = [line for line in lines if line["loss"] != logged[line["step"] - 1]]
                contract.holds(not other, f"before the crash {other[:1]} was logged, and then not the same bits")
    held = f"{seen[0][-1]['weights']:,} bytes of {alone[0]['weights']:,} of weights, twice as much of Adam's moments"
    same = f"killed while it saved step {DIES_AT}, resumed after step {SAVED_AT}: 2 ranks log the same bits as before the crash"
    return f"{same}; 3 ranks take one process's steps, and each holds {held}"


@functools.cache
def one_process() -> tuple[int, scripts.Lines, list[float]]:
    """A seed, and the script for one GPU in one process: its steps, its losses."""
    with tempfile.TemporaryDirectory() as folder:
        steps = _run(ONE_GPU, folder, 1, {"seed": (seed := fresh_seed()), "alone": []})[0][0]
        return seed, steps, scripts.logged_losses(folder, saved_at=STEPS, steps=STEPS)


def _run(
    script: Path, folder: str, ranks: int, facts: dict[str, Any], dies_at: int = 0
) -> tuple[list[scripts.Lines], dict[str, Any]]:
    """Each rank's optimizer steps, and what rank 1 noted when it died in a save."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        seen, failed = scripts.watched(watch, script, folder, facts["seed"], dies_at, ranks=ranks)
    if death := [line for lines in seen for line in lines if "shards" in line]:
        return [[line for line in lines if line not in death] for lines in seen], death[0]
    if isinstance(failed, RankFailed) and failed.where:
        facts = facts | _begun(seen, facts["alone"]) | {"raised": failed.cause_message}
        first_line = failed.cause_message.partition("\n")[0]
        sentence = (
            f"your script raised {failed.cause_type}: {first_line}, on rank {failed.rank} of {ranks} at {failed.where}"
        )
        raise Contract(HINTS, facts).broken(sentence) from failed
    if failed:
        raise failed
    return seen, {}


def _begun(seen: list[scripts.Lines], alone: scripts.Lines) -> dict[str, Any]:
    """After which of one process's steps training began, and how many strangers the optimizer steps."""
    first = next(iter(seen[0]), {"rows": [[]], "strangers": 0})
    begins = [done for done, right in enumerate(alone) if all(row in right["rows"] for row in first["rows"])]
    return {"strangers": first["strangers"], "begins": begins[0] if begins else None}


def _right(seen: list[scripts.Lines], facts: dict[str, Any]) -> None:
    """Whether every rank's steps are the expected ones; a killed run may miss the last."""
    ranks, done, expected = len(seen), facts["done"], facts["alone"][facts["done"] :]
    facts = facts | _begun(seen, facts["alone"])
    for rank, steps in enumerate(seen):
        about = f"rank {rank} of {ranks}" + (f", resumed after step {done}" if done else "")
        contract, least = Contract(HINTS, facts, about), STEPS - done if done else DIES_AT
        contract.holds(least <= len(steps) <= STEPS - done, f"the optimizer steps {len(steps)} times, not {least}")
        for number, (step, right, *together) in enumerate(zip(steps, expected, *seen, strict=False), start=done + 1):
            contract.about = f"{about}, step {number}"
            facts |= {"step": number, "counted": step["counted"]}
            units = f"{step['units']} units, not {BLOCKS + 1}: fully_shard each block, then the model for the rest"
            contract.holds(step["units"] > BLOCKS, units)
            contract.holds(not step["strangers"], f"{step['strangers']} of the optimizer's tensors are not the model's")
            for what, each in (("weights", 4), ("moments", 8)):  # the first rank has the most rows
                least, most = (each * _elements(right["shapes"], ranks, of) for of in (rank, 0))
                contract.memory(f"its share of {what}", step[what], at_least=least, at_most=most)
            contract.values(LR, step["lr"], right["lr"], rtol=1e-6)
            rows = f"the ranks' rows are not those of the step's batch, each once: does each take its own {BATCH // ranks}?"
            contract.holds(sorted(sum((each["rows"] for each in together), [])) == sorted(right["rows"]), rows)
            norm, right_norm = sum(each["squares"] for each in together) ** 0.5, right["squares"] ** 0.5
            facts |= {"ranks": ranks, "unclipped": right["unclipped"]}
            contract.values(NORM, norm, right_norm, rtol=1e-4)


def _elements(shapes: list[list[int]], ranks: int, rank: int) -> int:
    return sum(len(chunk_rows(shape[0], ranks, rank)) * math.prod(shape[1:]) for shape in shapes)
