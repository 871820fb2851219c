"""Lab 1, exercise 4: training steps that the lesson did not count, with PyTorch's own tools."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_checks.harness import Contract, fresh_seed, number, refused, returned
from course_checks.lab01.common import lab
from course_lib.observe.fake import LiveStorages
from course_lib.observe.memory import AllocatorLog, MemoryProbe, SavedForBackward
from course_lib.units import nice_bytes

# What the probe calls them. Only the peak has a tolerance, for those who sum up the profiler's operations: what one takes and
# gives back is seen at its end. The smallest thing that one can forget, the weights, is 3 % of the peak.
PROBES = {"weights": "parameters", "optimizer": "optimizer_state", "gradients": "gradients", "activations": "activations", "peak": "peak"}  # fmt: skip
PEAK_TOLERANCE = 0.005
HINTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "are the buffers in it?": lambda f: f["key"] == "weights" and f["yours"] < f["true"],
    "the state does not exist before the first step": lambda f: f["key"] == "optimizer" and not f["yours"],
    "count each storage once, only while autograd keeps it, and never a weight's": lambda f: (
        f["key"] == "activations" and f["yours"] > f["true"]
    ),
    "a view keeps its whole storage alive: count storages": lambda f: (
        f["key"] == "activations" and f["yours"] < f["true"]
    ),
    "does it start from what was allocated before the step?": lambda f: f["key"] == "peak" and f["yours"] < f["true"],
}
INSTRUMENTS = (MemoryProbe, "measure"), (LiveStorages, "__enter__"), (AllocatorLog, "__enter__"), (SavedForBackward, "__enter__")  # fmt: skip
REFUSED = "that is one of the course's own instruments: count it with PyTorch's own tools"
Training = tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints two lines at every run


def gpt2(rows: int) -> Training:
    """A tied embedding, dropout, and a padded vocabulary: of the logits' storage a view is kept."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 500, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).train()
    logits = lambda ids: model(ids).logits[..., :300].clamp(-30, 30)  # noqa: E731
    return _training(model, torch.optim.AdamW(model.parameters()), logits, (rows, 32))


def convolutional(rows: int) -> Training:
    """BatchNorm's buffers, momentum, and gradients that stay from step to step, as zeros."""
    first = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    model = nn.Sequential(*first, nn.Conv2d(16, 300, 3), nn.BatchNorm2d(300), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _training(model, optimizer, lambda ids: model(torch.randn(rows, 3, 16, 16)), (rows, 1), keep=True)


def unseen(rows: int) -> Training:
    """Frozen weights, trained ones that no gradient reaches, and two micro-batches."""
    width = 8 * rows
    layers = [nn.Linear(40, width), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(width), nn.Linear(width, 300)]
    model = nn.Sequential(nn.Embedding(300, 40).requires_grad_(False), *layers)
    model[-1].unused = nn.Linear(20, 20)
    model[-1].register_buffer("table", torch.zeros(300), persistent=False)
    return _training(model, torch.optim.RMSprop(model.parameters(), momentum=0.9), model, (rows, 48), (rows - 2, 40))


def _training(model: nn.Module, optimizer: Any, logits: Any, *batches: tuple[int, int], keep: bool = False) -> Training:
    def step() -> None:
        for size in batches:
            ids = torch.randint(300, size)
            cross_entropy(logits(ids).view(ids.numel(), -1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)

    return model, optimizer, step


@lab.exercise("A step that the lesson did not count", importance=4, difficulty=4, minutes=40)
def count_step(count: Callable[..., Any]) -> str:
    """Three models, each beside the probe on its twin; oneDNN, whose memory depends on the CPU, is off for both."""
    draw, contract, alive = random.Random(fresh_seed()), Contract(HINTS), []  # none is freed while the next is counted
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.callback(setattr, torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = False
        for make in (gpt2, convolutional, unseen):
            rows = draw.randint(5, 12)
            model, optimizer, step = make(rows)
            step()
            probe = MemoryProbe(model, optimizer)
            with probe.measure():
                step()
            alive += [step, theirs := make(rows)]
            gc.collect()
            with refused(REFUSED, *INSTRUMENTS):
                yours = returned(count(*theirs), dict, f"what you count of {make.__name__}")
            for key, probes in PROBES.items():
                contract.holds(key in yours, f"your dict lacks {key!r}")
                mine, true = number(yours[key], f"{key!r} of {make.__name__}"), probe.bytes[probes]
                contract.facts.update(key=key, yours=mine, true=true)
                told = f"{key!r} of {make.__name__}: you count {mine:,.0f} bytes, and there are {true:,}"
                contract.holds(abs(mine - true) <= (PEAK_TOLERANCE * true if key == "peak" else 0), told)
            contract.say(
                f"{make.__name__}: peak {nice_bytes(yours['peak'])}, activations {nice_bytes(yours['activations'])}"
            )
    return contract.evidence()
