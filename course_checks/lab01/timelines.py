"""Lab 1, exercise 1: three runs of train.py that run out of memory, who is to blame, and cures that are really tried."""

from __future__ import annotations

import functools
import gc
import pickle
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from course_checks.harness import Contract, number, returned
from course_checks.lab01.common import lab
from course_lib.launch.threads import one_thread
from course_lib.memory import allocator
from course_lib.observe.memory import record_allocations
from course_lib.observe.snapshots import Snapshot, emulate_snapshot, read_snapshot
from course_lib.units import MIB, nice_bytes

SCRIPT = Path(__file__).with_name("train.py")
LINES = ["", *SCRIPT.read_text().splitlines()]
MARK = 7  # bytes, which the script takes where it would print: so the recording tells how many steps are done
RUNS: dict[str, dict[str, int]] = {
    "A": {"layers": 2, "hidden": 64, "vocab": 8192, "batch": 1, "length": 1024, "steps": 2, "validate": False},
    "B": {"layers": 6, "hidden": 256, "vocab": 256, "batch": 1, "length": 16, "steps": 3, "validate": False},
    "C": {"layers": 2, "hidden": 64, "vocab": 2048, "batch": 4, "length": 64, "steps": 22, "validate": True},
}
# Made up. With a cure that is right the runs need 38, 74 and 30 MiB; with any other at least 120, 94 and 76.
CARDS = {"A": 104 * MIB, "B": 86 * MIB, "C": 56 * MIB}
TO_BLAME = {"A": ("logits = ", "return cross_"), "B": ("optimizer.step",), "C": ("held_out_losses.",)}
_LISTS, _KEEP = "    train_losses, held", "held_out_losses.append(loss_of(model, held_out))"
_BACKWARD = "        loss = loss_of(model, ids)\n        loss.backward()\n"
_UPDATE = "        optimizer.step()\n        optimizer.zero_grad()\n"
_CHUNKS = """    pairs = zip(*(t.flatten(0, 1).split(64) for t in (hidden[:, :-1], ids[:, 1:])))
    part = lambda h, t: cross_entropy(model.lm_head(h), t, reduction="sum") / ids[:, 1:].numel()
    return sum(torch.utils.checkpoint.checkpoint(part, h, t, use_reentrant=False) for h, t in pairs)
"""
_INSIDE = """    each = {p: torch.optim.AdamW([p], lr=1e-3, fused=True) for p in model.parameters()}

    def update(p):
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(update)
"""
_MICRO_BATCHES = """        for ids in ids.split(1):
            loss = loss_of(model, ids) / batch
            loss.backward()
"""
CURES: dict[str, dict[str, str]] = {  # what is written in the place of which text of the script
    "compute the loss in chunks": {"    logits = ": f"{_CHUNKS}    logits = "},
    "checkpoint every block": {_LISTS: f'    set_checkpointing(model, "full")\n{_LISTS}'},
    "keep loss.item(), not the loss": {_KEEP: f"{_KEEP[:-1]}.item())"},
    "validate under no_grad": {_KEEP: f"with torch.no_grad():\n                {_KEEP}"},
    "update each weight inside backward": {_LISTS: _INSIDE + _LISTS, _UPDATE: ""},
    "accumulate over micro-batches of 1": {_BACKWARD: _MICRO_BATCHES},
    "empty_cache() after every step": {_UPDATE: f"{_UPDATE}        torch.cuda.empty_cache()\n"},
}
HINTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "it only calls: which line in there asks for that much?": lambda f: f["run"] == "A" and "= loss_of" in f["text"],
    "every step asks for that anew; which line keeps it?": lambda f: f["run"] == "C" and f["line"] < 28 and f["held"],
    "a traceback names who asked last, not who holds most": lambda f: f["line"] in f["broke"] and not f["right"],
    "which row of the table does this cure remove?": lambda f: f["right"],
}


def script_of(run: str, cure: str = "", **other: Any) -> tuple[Any, Callable[[], Any]]:
    """The run's model, and its training to call; `other` settings in the place of the run's."""
    from course_lib.training.activation_checkpointing import set_checkpointing

    source = SCRIPT.read_text()
    for old, new in CURES[cure].items() if cure else ():
        assert source.count(old) == 1, f"train.py has changed: {old!r}"
        source = source.replace(old, new)
    script = {"set_checkpointing": set_checkpointing, "print": lambda _: script["torch"].ByteTensor(MARK)}
    exec(compile(source, cure or str(SCRIPT), "exec"), script)
    gc.collect()  # else what an earlier run has left may go in the middle of this one
    model = script["build"](**RUNS[run])
    return model, lambda: script["train"](model, **RUNS[run] | other)


@functools.cache
def crash(run: str) -> SimpleNamespace:
    """Of this run on its card: the snapshot, whole steps, the traceback's lines, bytes at the peak by line, the message."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        file, (model, train) = Path(folder, "snapshot.pickle"), script_of(run)
        emulate_snapshot(file, train, model.parameters(), CARDS[run])
        seen, trace = read_snapshot(file), pickle.loads(file.read_bytes())["device_traces"][0]
    until_peak = trace[: int(seen.allocated.argmax()) + 1]
    gone = {event["addr"] for event in until_peak if event["action"] == "free_completed"}  # no address comes twice
    alive = [event for event in until_peak if event["action"] == "alloc" and event["addr"] not in gone]
    held = [sum(event["size"] for event in alive if n in _lines(event)) for n in range(len(LINES))]
    done = sum(event["action"] == "alloc" and event["size"] == MARK for event in trace)
    message = _message(run, done, seen, trace[-1])
    return SimpleNamespace(snapshot=seen, done=done, broke=_lines(trace[-1]), held=held, message=message)


def _lines(event: Mapping[str, Any]) -> list[int]:
    return [frame["line"] for frame in reversed(event["frames"]) if frame["filename"] == str(SCRIPT)]


def _message(run: str, done: int, seen: Snapshot, oom: Mapping[str, Any]) -> str:
    """In PyTorch's words. What a request is served from is a segment, so that is what it says that it tried."""
    tried = allocator.replay([(True, 0, oom["size"])]).reserved_peak
    used, allocated = int(seen.reserved[-1]), int(seen.allocated[-1])
    places = [f'  File "train.py", line {line}\n    {LINES[line].strip()}' for line in _lines(oom)]
    error = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {nice_bytes(tried)}. GPU 0 has a total capacity of "
        f"{nice_bytes(CARDS[run])} of which {nice_bytes(oom['device_free'])} is free. Including non-PyTorch memory, this process "
        f"has {nice_bytes(used)} memory in use. Of the allocated memory {nice_bytes(allocated)} is allocated by PyTorch, and "
        f"{nice_bytes(used - allocated)} is reserved by PyTorch but unallocated."
    )
    steps = f"{done} of {RUNS[run]['steps']} steps done"
    return "\n".join([steps, "Traceback (most recent call last):", *places, *textwrap.wrap(error, 100)])


@functools.cache
def cured(run: str, cure: str) -> tuple[int, int]:
    """The run on the same card with this cure: whole steps done, and the most that was reserved."""
    with one_thread():
        model, train = script_of(run, cure)
        events = [event[1:] for event in record_allocations(train, model.parameters())]
    replayed = allocator.replay(events, CARDS[run])
    return sum(new and size == MARK for new, _, size in events[: len(replayed.timeline)]), replayed.reserved_peak


@lab.exercise("Three runs out of memory", importance=5, difficulty=3, minutes=20)
def findings(findings: Callable[..., Any]) -> str:
    """A line that fills the card, and a cure with which the run sees all its steps through."""
    yours, contract = returned(findings(), Mapping, "your findings"), Contract(HINTS)
    for run, settings in RUNS.items():
        contract.facts.clear()
        pair = returned(yours.get(run) or (), tuple, f"your finding on run {run}")
        contract.holds(len(pair) == 2 and None not in pair, f"run {run} wants two things: a line, and a cure's name")
        line, cure = number(pair[0], f"the line of run {run}"), returned(pair[1], str, f"the cure of run {run}")
        contract.holds(line in range(1, len(LINES)), f"train.py has no line {line}")
        contract.holds(cure in CURES, f"{cure!r} is no name in CURES")
        seen, text, line = crash(run), LINES[int(line)].strip(), int(line)
        held, right = seen.held[line], text.startswith(TO_BLAME[run])
        contract.facts.update(run=run, line=line, text=text, held=held, broke=seen.broke, right=right, cure=cure)
        holds = f"holds {nice_bytes(held)} of the {nice_bytes(seen.snapshot.peak)} at the peak"
        contract.holds(right, f"run {run}: line {line}, `{text}`, {holds}")
        done, reserved = cured(run, cure)
        ends = f"runs out of memory in step {done + 1} of {settings['steps']}; without it, in step {seen.done + 1}"
        contract.holds(done == settings["steps"], f'run {run} with "{cure}" {ends}')
        contract.say(f"{run} completes its {done} steps with {nice_bytes(reserved)} of {nice_bytes(CARDS[run])}")
    return contract.evidence()
