"""Lab 2, exercise 1: an activation checkpoint that gives the dropout of the first pass again."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torchs

from course_checks.harness import LiveTensors, NotYet, close, refused
from course_checks.lab02.common import lab, tensor_like
from course_lib.launch.failures import is_learners

# what torch.utils.checkpoint goes through, reentrant or not
GIVEN = ((torchs, "_checkpoint_without_reentrant_generator"), (torchs.CheckpointFunction, "apply"))
ROWS, WIDTH, SLACK = 512, 64, 32_000  # a random state is 5,056 bytes, and there are two blocks


class Block(nn.Module):
    """A residual MLP with dropout inside and one frozen parameter; counts how often it ran."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.runs = nn.Dropout(dropout), 0
        self.down.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.down(self.dropout(nn.functional.gelu(self.up(x))))


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


@lab.exercise("A checkpoint that dropout cannot fool", importance=5, difficulty=4, minutes=25)
def checkpointed(checkpoint: Callable[..., Any]) -> str:
    """Same output, gradients and random stream as without it; between forward and backward only the inputs stay."""
    evidence = ""
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for dropout in (0.0, 0.5):
            for needs_gradient in (True, False):
                expected = _run(plain, device, dropout, needs_gradient)
                with refused("that is PyTorch's own checkpoint: write what it does", *GIVEN):
                    told = _run(checkpoint, device, dropout, needs_gradient)
                _right_numbers(told, expected, dropout)
                evidence = _right_memory(told, expected)
    return f"gradients and random stream as without it; {evidence}"


def _run(checkpoint: Callable[..., Any], device: str, dropout: float, needs_gradient: bool) -> dict[str, Any]:
    """Two blocks and the first again, forward and backward, with a look at memory and random stream after each."""
    torch.manual_seed(0)
    blocks = [Block(dropout).to(device), Block(dropout).to(device)]
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=needs_gradient)
    weights = torch.linspace(-1, 1, ROWS * WIDTH, device=device).view(ROWS, WIDTH)
    torch.manual_seed(1)
    with LiveTensors() as made:
        outputs = [x]
        for block in (*blocks, blocks[0]):
            y = tensor_like(checkpoint(block, outputs[-1]), x.detach(), "what checkpointed(block, x) returns")
            outputs.append(y)
    held = made.alive(besides=outputs, collect=checkpoint is not plain)
    alive = sum(new.bytes for new in held)
    told: dict[str, Any] = {"y": y.detach().clone(), "after forward": _next_numbers(device)}
    runs = [block.runs for block in blocks]
    wanted = {f"block {i} {name}": p for i, block in enumerate(blocks) for name, p in block.named_parameters()}
    wanted = {name: tensor for name, tensor in (wanted | {"x": x}).items() if tensor.requires_grad}
    told["gradients"] = _gradients((y * weights).sum(), wanted, _cut_off(needs_gradient))
    told["after backward"] = _next_numbers(device)
    told |= {
        "alive": alive,
        "runs": (runs, [block.runs for block in blocks]),
        "recomputed": all(block.runs == 2 * run for block, run in zip(blocks, runs, strict=True)),
        "flags": [t.requires_grad for t in (x, *blocks[0].parameters())],
        "left": [t.grad is not None for t in (x, *blocks[0].parameters())],
    }
    return told


def _gradients(loss: torch.Tensor, wanted: dict[str, torch.Tensor], why_not: str) -> dict[str, torch.Tensor | None]:
    """By name. Raises NotYet when no gradient can flow (`why_not`), or when autograd itself stops."""
    if not loss.requires_grad:
        raise NotYet(why_not)
    try:
        return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))
    except RuntimeError as error:
        if any(is_learners(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise  # the verdict names the learner's line
        raise NotYet(f"backward() stops: {' '.join(str(error).split())[:250]}") from error


def _next_numbers(device: str) -> torch.Tensor:
    """The next four random numbers of each stream that the block could have used."""
    streams = [torch.rand(4)] + ([torch.rand(4, device=device).cpu()] if device != "cpu" else [])
    return torch.stack(streams)


def _cut_off(needs_gradient: bool) -> str:
    if needs_gradient:
        return (
            "the output requires no gradient: computed under no_grad it is cut off, so let an autograd.Function tie it to "
            "its inputs"
        )
    return (
        "x needs no gradient here (it comes from a frozen embedding), and so the output does not either and the block's "
        "parameters get none: hand the parameters to the Function as inputs too"
    )


def _right_numbers(told: dict[str, Any], expected: dict[str, Any], dropout: float) -> None:
    if not torch.equal(told["after forward"], expected["after forward"]):
        raise NotYet(
            "after your forward the random stream is not where block(x) leaves it: the next dropout would be another one. "
            "Read the state before the block, and do not set it in forward"
        )
    close(told["y"], expected["y"], rtol=1e-5, atol=1e-6, what="with the same seed the output")
    got, wanted = told["gradients"], expected["gradients"]
    for name in wanted:
        if got[name] is None:
            if name == "x":
                raise NotYet(
                    "x has no gradient: return the recomputed input's gradient, or the blocks before learn nothing"
                )
            raise NotYet(f"{name} has no gradient: the recomputation must reach the block's parameters as well")
    try:
        close(got, wanted, rtol=2e-4, atol=1e-4, what="the gradient")
    except NotYet:
        if dropout:
            raise NotYet(
                "without dropout your gradients are right, with dropout they are wrong: the recomputation draws another "
                "mask. Keep the random state from before the forward and set it again before you recompute"
            ) from None
        raise
    if not torch.equal(told["after backward"], expected["after backward"]):
        raise NotYet(
            "after backward() the random stream is not where it was before: the recomputation used it up or set it back. "
            "Put the state that you found in backward in its place again (torch.random.fork_rng does)"
        )
    if told["flags"] != expected["flags"] or any(told["left"]):
        raise NotYet("you change requires_grad or .grad of what you are given; return gradients, and detach the input")


def _right_memory(told: dict[str, Any], expected: dict[str, Any]) -> str:
    alive, without = told["alive"], expected["alive"]
    if alive > SLACK:
        why = (
            "the block runs again and its intermediates are kept as well"
            if told["recomputed"]
            else "nothing is recomputed, the block's intermediates are all kept"
        )
        raise NotYet(
            f"right numbers, and {alive:,} bytes stay alive between forward and backward beside input and output, where "
            f"the plain blocks keep {without:,}: {why}. Keep the input alone"
        )
    before, after = told["runs"]
    if before != [2, 1] or after != [4, 2]:
        raise NotYet(
            f"the second block ran {before[1]} times in forward and {after[1] - before[1]} times in backward: once each"
        )
    return f"{alive:,} bytes stay beside input and output where the plain blocks keep {without:,}; each ran once more"
