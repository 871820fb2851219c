"""Lab 2, exercise 3: a full fine-tune that does not fit a card, turned into one that does and says what it will hold."""

from __future__ import annotations

import functools
import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel
from transformers.models.llama import LlamaForCausalLM

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, number, scripts
from course_checks.harness.tensors import live_tensors
from course_checks.lab02.common import lab, write_llama
from course_lib.models import no_progress_bars
from course_lib.models.data import byte_tokens, english
from course_lib.notebook.contents import ROOT
from course_lib.observe.memory import AllocatorLog, optimizer_tensors, storage_of, tensor_bytes
from course_lib.units import MIB, nice_bytes

FULL = ROOT / "labs" / "02_single_gpu" / "full.py"
CARD, BATCH, STEPS, LENGTH = 14 * MIB, 16, 4, 96
MEASURED, LEARNED = 2, 0.3  # the step whose memory is looked at; by how much the loss must fall
SIZES = {"layers": 6, "hidden": 192, "intermediate": 512, "vocab": 2048}
KINDS = ("packed weights", "other weights", "trained weights", "moments", "gradients", "in 16 bits")
PEAK, LOSS, STARTS = "the peak of a step", "the loss in losses.jsonl", "the loss that backward() starts from"
HINTS = {
    "the mean is over all labels of the step": lambda f: f["clause"] == STARTS,
    "from_pretrained() leaves a model in evaluation mode, and then nothing is checkpointed": lambda f: (
        f["clause"] == PEAK and not f["training"]
    ),
    "the weights are not packed": lambda f: f["clause"] == PEAK and not f["packed weights"],
    "so many rows at once": lambda f: f["clause"] == PEAK and f["at_once"] > 2,
    "is each block checkpointed?": lambda f: f["clause"] == PEAK,
}
start = functools.partial(scripts.start, FULL)


def measure(path: str | Path) -> None:
    """Run a script on the check's model for three steps, and print what the check measures."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        steps = _train(scripts.script_of(path), Path(folder, "base"), run, rows_of(1), SIZES, BATCH, MEASURED + 1)
        plan = (run / "plan.json").read_text() if (run / "plan.json").exists() else "none"
    print("losses:", *(f"{line['starts']:.3f}" for line in steps))
    print(f"{PEAK}: {nice_bytes(steps[MEASURED]['peak'])}; the card has {nice_bytes(CARD)}")
    held = steps[MEASURED]["held"]
    print(f"between two steps: {sum(held.values()):,} bytes: {_told(held)}; plan.json: {plan}")


def watch(script: str, folder: str, notes: str, base: str, options: list[str]) -> None:
    """Run a script as `python script` would; a line per optimizer step, with the memory of the second and the third."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU's allocator tells of each tensor
    seen: dict[str, Any] = {"rows": [], "at_once": 0, "starts": 0.0}
    there: list[tuple[str, int, StorageWeakRef]] = []
    log: AllocatorLog | None = None
    steps, before, stepped = 0, 0, None
    backward = torch.Tensor.backward

    def forward(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Embedding) and torch.is_grad_enabled():
            if not seen["rows"] and log is None:  # not while the memory is looked at
                models = (thing for thing in gc.get_objects() if isinstance(thing, LlamaForCausalLM))
                model = next(model for model in models if model.get_input_embeddings() is module)
                seen["expected"] = mean_loss(model, torch.load(f"{base}/rows.pt"), steps, int(options[1]))
            if steps == 1 and not there:
                there.extend(by_kind(stepped))
            elif steps == 2 and "held" not in seen:  # what has stayed for a whole step: no loss, no batch
                gc.collect()
                seen["held"] = dict.fromkeys(KINDS, 0)
                for kind, size, storage in there:
                    seen["held"][kind] += 0 if storage.expired() else size
            seen["rows"] += args[0].tolist()
            seen["at_once"], seen["training"] = max(seen["at_once"], len(args[0])), module.training

    def started(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen["starts"] += loss.item()
        backward(loss, *args, **kwargs)

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps, before, stepped, log
        steps, stepped = steps + 1, optimizer
        if steps == 1:
            older = live_tensors()
            before, log = tensor_bytes(older), AllocatorLog(older)
            del older  # or they would all stay
            log.__enter__()
        elif steps == 3:
            log.__exit__(None, None, None)
            seen["peak"], log = log.peaks(before)["peak"], None
        with open(f"{notes}/rank0.jsonl", "a") as file:
            file.write(json.dumps(seen | {"lr": optimizer.param_groups[0]["lr"]}) + "\n")
        seen.update(rows=[], at_once=0, starts=0.0, expected=None)

    def loads(cls: type, *args: Any, **kwargs: Any) -> Any:
        seen.setdefault("planned", Path(folder, "plan.json").exists())
        return load(cls, *args, **kwargs)

    load, PreTrainedModel.from_pretrained = PreTrainedModel.from_pretrained.__func__, classmethod(loads)
    torch.Tensor.backward = started
    register_module_forward_pre_hook(forward)
    register_optimizer_step_post_hook(step)
    scripts.run_as_main(script, "--model", base, "--data", f"{base}/rows.pt", "--folder", folder, *options)


def by_kind(optimizer: torch.optim.Optimizer) -> list[tuple[str, int, StorageWeakRef]]:
    """(kind, bytes, reference) of each storage of the process between two steps."""
    kinds = {storage_of(t)._cdata: "moments" for t in optimizer_tensors(optimizer)}
    kinds |= {storage_of(p)._cdata: "trained weights" for group in optimizer.param_groups for p in group["params"]}
    kinds |= {
        storage_of(p.grad)._cdata: "gradients"
        for g in optimizer.param_groups
        for p in g["params"]
        if p.grad is not None
    }
    storages = {}
    for tensor in live_tensors():
        storage = storage_of(tensor)
        kind = "packed weights" if tensor.dtype == torch.uint8 else "other weights"
        kind = "in 16 bits" if tensor.dtype in (torch.bfloat16, torch.float16) else kinds.get(storage._cdata, kind)
        storages[storage._cdata] = (
            kind,
            0 if tensor.dtype == torch.int64 else storage.nbytes(),
            StorageWeakRef(storage),
        )
    return list(storages.values())


def rows_of(seed: int) -> dict[str, torch.Tensor]:
    """Long answers out of a text, some of them without a prompt, and short ones that say one letter again and again."""
    text, generator = byte_tokens(english()), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (BATCH * STEPS,), generator=generator).tolist()
    ids = torch.stack([text[first : first + LENGTH] for first in starts])
    short = torch.rand(len(ids), generator=generator) < 0.5
    begins = torch.where(short, LENGTH - 5, torch.randint(-20, 40, (len(ids),), generator=generator))
    ids[short, -12:] = ids[short, -12:-11]
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < begins[:, None], -100)}


def rows_of_step(rows: dict[str, torch.Tensor], step: int, batch: int) -> dict[str, torch.Tensor]:
    return {name: tensor[step * batch : (step + 1) * batch] for name, tensor in rows.items()}


def mean_loss(model: nn.Module, rows: dict[str, torch.Tensor], step: int = 0, batch: int = BATCH) -> float:
    with torch.no_grad():
        return model(**rows_of_step(rows, step, batch)).loss.item()


@lab.exercise("A full fine-tune that does not fit", importance=5, difficulty=4, minutes=35)
def fits(path: Callable[[], Any]) -> str:
    """By what the script does: the same rows and loss within the card, an adapter that has learned, bytes that were planned."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    script, seed = scripts.script_of(path()), fresh_seed()
    with tempfile.TemporaryDirectory() as folder, named_seed(seed), no_progress_bars():
        rows, base, run = rows_of(seed), Path(folder, "base"), Path(folder, "run")
        steps = _train(script, base, run, rows, SIZES, BATCH, STEPS)
        for step, line in enumerate(steps):
            contract = Contract(HINTS, line | line.get("held", {}), f"step {step + 1}")
            if line["expected"] is not None:
                contract.values(STARTS, line["starts"], line["expected"], rtol=1e-3)
            if step == MEASURED:
                contract.memory(PEAK, line["peak"], at_least=MIB, at_most=CARD)
        contract, held = Contract(HINTS), steps[MEASURED]["held"]
        contract.holds(not held["gradients"], "when a step begins, the last one's gradients are still there")
        contract.holds(not held["in 16 bits"], f"{nice_bytes(held['in 16 bits'])} are in 16 bits")
        adams = held["moments"] > held["trained weights"] / 3  # two moments in 8 bits take half
        contract.holds(adams, "the optimizer has no two moments: keep AdamW, or take its 8-bit kind")
        logged = scripts.logged_losses(str(run), saved_at=STEPS, steps=STEPS)
        contract.values(LOSS, logged, [line["starts"] for line in steps], rtol=1e-3)
        saved = "no adapter is in {folder}: save_pretrained() of PEFT's model writes it"
        contract.holds((run / "adapter_config.json").exists(), saved)
        model = AutoModelForCausalLM.from_pretrained(base)
        learned = mean_loss(model, rows) - mean_loss(PeftModel.from_pretrained(model, run), rows)
        told = f"with your adapter the loss of the first step's rows falls by {learned:.2f}, not by {LEARNED}"
        contract.holds(learned >= LEARNED, told)
        contract.holds(steps[0]["planned"], "when the weights are loaded, there is no {folder}/plan.json yet")
        off = _planned(run, held, SIZES)
        sizes = {"layers": 5 + seed % 3, "hidden": 128, "intermediate": 512, "vocab": 512 + seed % 64, "kv_heads": 1}
        run, rate = Path(folder, "another"), ["--lr", "0.001234"]
        steps_of_another = _train(script, Path(folder, "other"), run, rows, sizes, 4, MEASURED + 1, *rate)
        contract.holds(steps_of_another[0]["lr"] == 0.001234, "--lr does not arrive at the optimizer")
        off = max(off, _planned(run, steps_of_another[MEASURED]["held"], sizes))
    peak = nice_bytes(steps[MEASURED]["peak"])
    return f"a step takes {peak} of {nice_bytes(CARD)}; the loss falls by {learned:.2f}; the plan is {off:.1%} off"


def _train(
    script: Path,
    base: Path,
    run: Path,
    rows: dict[str, torch.Tensor],
    sizes: dict[str, int],
    batch: int,
    steps: int,
    *more: str,
) -> scripts.Lines:
    """A line per step of the script, on a model of these sizes; NotYet where it does not take the steps' rows."""
    write_llama(base, **sizes, seed=1, scale=2.0)
    torch.save(rows, base / "rows.pt")
    options = ["--batch-size", str(batch), "--steps", str(steps), *more]
    (seen,), failed = scripts.watched(watch, script, str(run), str(base), options, ranks=1)
    if failed:
        raise failed
    if len(seen) != steps:
        raise NotYet(f"the optimizer steps {len(seen)} times in {steps} steps")
    for step, line in enumerate(seen):
        if sorted(line["rows"]) != sorted(rows_of_step(rows, step, batch)["input_ids"].tolist()):
            raise NotYet(f"step {step + 1} trains on {len(line['rows'])} rows; are they its {batch}, each once?")
    return seen


def _planned(run: Path, held: dict[str, int], sizes: dict[str, int]) -> float:
    """How far plan.json is off from what the process held between two steps; NotYet above 5 %."""
    try:
        planned = json.loads((run / "plan.json").read_text())
    except ValueError as error:
        raise NotYet(f"plan.json is no JSON: {error}") from error
    if not isinstance(planned, dict) or "bytes" not in planned:
        raise NotYet('plan.json should say {"bytes": …}')
    yours, measured = number(planned["bytes"], "bytes in plan.json"), sum(held.values())
    if (off := abs(yours / measured - 1)) > 0.05:
        told = f"you plan {nice_bytes(yours)}, and between two steps the process holds {nice_bytes(measured)}"
        raise NotYet(f"{sizes}: {told}: {_told(held)}")
    return off


def _told(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {nice_bytes(size)}" for name, size in held.items() if size)
