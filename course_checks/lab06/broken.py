"""Lab 6, exercise 3: an FSDP2 program that runs, and is wrong in more than one part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from course_checks.harness import (
    Contract,
    NotYet,
    fresh_seed,
    healthy_untouched,
    learnable_tokens,
    named_seed,
    number,
    put_together,
    returned,
    run_ranks,
)
from course_checks.lab06.common import lab, local, rows_bytes, tied_llama
from course_lib.notebook import table
from course_lib.notebook.page import Page
from course_lib.observe.memory import SavedForBackward
from course_lib.units import nice_bytes

ROWS, LENGTH, OPTIONS = 12, 24, {"lr": 0.01, "weight_decay": 0.1}
MAX_NORMS = (0.5, 0.5, 100.0, 0.5)  # of each step; the third clips nothing
BLOCKS, VOCAB = 4, 61
WEIGHTS, MOMENTS, KEPT = "its share of the weights", "its share of the moments", "what it keeps for backward"
NORM, CLIPPED, LOSS = "the gradient's norm", "the norm after clipping", "the loss"
HINTS = {
    "to_empty() gives each of a tied matrix's two names a tensor of its own": lambda f: f["clause"] == "elements",
    "what is in no block is still whole: it needs a unit, too": lambda f: (
        f["clause"] == WEIGHTS and f["units"] == BLOCKS
    ),
    "one unit is gathered whole: make one of each block": lambda f: f["clause"] == "units",
    "look at bytes: what does a checkpoint keep, and what does the module inside it need?": lambda f: (
        f["clause"] == KEPT
    ),
    "which tensors does the optimizer hold? fully_shard() puts new ones into the model": lambda f: (
        f["clause"] == MOMENTS
    ),
    "the norm is below max_norm: multiply by no more than 1": lambda f: f["clause"] == CLIPPED and f[CLIPPED] > f[NORM],
    "no rank has all gradients: squares add up over the ranks": lambda f: f["clause"] == NORM,
}


class Program:
    """A colleague's program in seven parts; what each is meant to do stands in the exercise's text. Spoiler below."""

    def build(self, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
        with torch.device("meta"):
            model = tied_llama(layers=BLOCKS, vocab=VOCAB)
        model.to_empty(device="cpu")
        model.load_state_dict(weights)
        model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(model.config)
        return model

    def recompute(self, model: LlamaForCausalLM) -> None:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))

    def shard(self, model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)

    def prepare(self, model: LlamaForCausalLM, mesh: DeviceMesh) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        self.shard(model, mesh)
        return optimizer

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.tensor_split(dist.get_world_size())[dist.get_rank()]

    def loss(self, model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
        return model(input_ids=rows, labels=rows, use_cache=False).loss

    def clip(self, model: LlamaForCausalLM, max_norm: float) -> float:
        gradients = [local(p.grad) for p in model.parameters()]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / norm.item()))
        return norm.item()


HEALTHY = ("share", "loss")


def batch_of(seed: int, step: int) -> torch.Tensor:
    return learnable_tokens(ROWS, LENGTH, VOCAB, seed + step)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held_bytes(tensors: Any) -> int:
    """On this rank, of tensors with a dimension."""
    return sum(local(t).nbytes for t in tensors if t.dim())


def on_a_rank(parts: Callable[[], Any], seed: int) -> dict[str, Any]:
    """A run put together from its parts, and the same training in one process."""
    twin, program = tied_llama(layers=BLOCKS, vocab=VOCAB, seed=seed), put_together(parts, Program)
    weights = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    model = returned(program.build(weights), nn.Module, "the model")
    for (name, buffer), right in zip(model.named_buffers(), twin.buffers(), strict=True):
        if not torch.equal(buffer, right):  # whatever lay in memory: it may well be nan
            raise NotYet(f"the buffer {name} is not what a Llama makes: it is in no state dict")
    program.recompute(model)
    optimizer = program.prepare(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = returned(optimizer, torch.optim.Optimizer, "the optimizer")
    apply_activation_checkpointing(twin, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    twin_optimizer, colleague = torch.optim.AdamW(twin.parameters(), **OPTIONS), Program()
    seen: dict[str, Any] = {name: [] for name in ("losses", "alone", "norms", "right", "clipped")}
    for step, max_norm in enumerate(MAX_NORMS):
        batch = batch_of(seed, step)
        rows = program.share(batch)
        with SavedForBackward(twin) as right:
            graph = colleague.loss(twin, rows)
        with SavedForBackward(model) as kept:
            loss = returned(program.loss(model, rows), torch.Tensor, "the loss")
        seen["kept"], seen["needed"] = kept.now, right.now
        del graph
        loss.backward()
        seen["norms"].append(number(program.clip(model, max_norm), "the norm that clip() returns"))
        seen["clipped"].append(nn.utils.get_total_norm([whole(p.grad) for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        seen["losses"].append(total.item())
        alone = colleague.loss(twin, batch)
        alone.backward()
        seen["right"].append(nn.utils.clip_grad_norm_(twin.parameters(), max_norm).item())
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        seen["alone"].append(alone.item())
    seen["units"] = sum(isinstance(module, FSDPModule) for module in model.modules())
    seen["elements"], seen["weights"] = sum(p.numel() for p in model.parameters()), held_bytes(model.parameters())
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    seen["moments"] = held_bytes(t for state in states for t in state.values())
    return seen


def observe(parts: type, ranks: int = 2) -> Page:
    """What is to be seen from outside: bytes, printed, and losses and norms beside one process's."""
    run = run_ranks(on_a_rank, lambda: parts, 1, ranks=ranks, timeout=60.0)
    model = list(tied_llama(layers=BLOCKS, vocab=VOCAB).parameters())
    print(f"In one process: {sum(p.numel() for p in model):,} parameters, {nice_bytes(held_bytes(model))} of weights.")
    print(
        f"A process that recomputes each block keeps {nice_bytes(run.results[0]['needed'])} of these rows for backward."
    )
    print(f"In this program: {run.results[0]['elements']:,} parameters.")
    for rank, seen in enumerate(run.results):
        print(
            f"Rank {rank} of {ranks} holds {nice_bytes(seen['weights'])} of weights between steps, and the optimizer "
            f"{nice_bytes(seen['moments'])} of their moments; forward keeps {nice_bytes(seen['kept'])} for backward."
        )
    rows = []
    for step, (loss, alone) in enumerate(zip(run.results[0]["losses"], run.results[0]["alone"], strict=True)):
        norms = {f"norm, rank {rank}": seen["norms"][step] for rank, seen in enumerate(run.results)}
        row = {"step": step, "loss": loss, "loss of one process": alone} | norms
        rows.append(row | {"norm in one process": run.results[0]["right"][step]})
    return table(rows, caption="Losses are means over all ranks; norms are those that clip() returns")


@lab.exercise("A program that runs", importance=5, difficulty=3, minutes=25)
def repaired(repaired: Callable[[], Any]) -> str:
    """A share of all weights and moments, blocks recomputed, one process's norms and losses; healthy parts untouched."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (2, 3):
            run = run_ranks(on_a_rank, repaired, seed, ranks=ranks, timeout=60.0)
            model = tied_llama(layers=BLOCKS, vocab=VOCAB)
            elements = sum(p.numel() for p in model.parameters())
            for rank, seen in enumerate(run.results):
                contract = Contract(HINTS, {"units": seen["units"]}, f"rank {rank} of {ranks}")
                sentence = f"the model has {seen['elements']:,} parameters, not {elements:,}"
                contract.holds(seen["elements"] == elements, sentence, "elements")
                share = rows_bytes(model, ranks, rank)
                contract.memory(WEIGHTS, seen["weights"], at_least=share, at_most=share)
                contract.holds(
                    seen["units"] > BLOCKS, f"{seen['units']} units for {BLOCKS} blocks and the rest", "units"
                )
                contract.memory(KEPT, seen["kept"], at_least=seen["needed"] / 2, at_most=1.2 * seen["needed"])
                contract.memory(MOMENTS, seen["moments"], at_least=2 * share, at_most=2 * share)
                for step, (right, max_norm) in enumerate(zip(seen["right"], MAX_NORMS, strict=True)):
                    contract.about = f"rank {rank} of {ranks}, step {step}"
                    contract.values(LOSS, seen["losses"][step], seen["alone"][step], rtol=1e-4)
                    contract.values(NORM, seen["norms"][step], right, rtol=1e-3)
                    contract.values(CLIPPED, seen["clipped"][step], min(right, max_norm), rtol=1e-3)
    healthy_untouched(repaired(), Program, HEALTHY)
    weights, moments, kept = (nice_bytes(seen[what]) for what in ("weights", "moments", "kept"))
    held = f"{weights} of weights and {moments} of moments, and keeps {kept} for backward"
    return f"one process's norms and losses on 2 and 3 ranks; the last of 3 holds {held}"
