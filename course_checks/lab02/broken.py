"""Lab 2, exercise 4: a QLoRA run that trains nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from course_checks.harness import (
    Contract,
    NotYet,
    fresh_seed,
    healthy_untouched,
    learnable_tokens,
    named_seed,
    put_together,
    returned,
)
from course_checks.lab02.common import lab, write_llama
from course_lib.models import no_progress_bars
from course_lib.notebook import table
from course_lib.notebook.page import Page
from course_lib.observe.memory import SavedForBackward
from course_lib.training.methods import prepare, trainable
from course_lib.units import nice_bytes

ROWS, LENGTH, STEPS, WARM_UP, RATE, RANK = 4, 32, 6, 3, 2e-3, 4
SIZES = {"layers": 3, "hidden": 64, "intermediate": 192, "vocab": 97}
TRAINED, KEPT, LEARNING_RATE, LOSS = (
    "trained parameters",
    "what a step keeps for backward",
    "the learning rate",
    "the loss",
)
HINTS = {
    "prepare_model_for_kbit_training() freezes every parameter that it finds": lambda f: (
        f["clause"] == TRAINED and not f["trained"]
    ),
    "from_pretrained() leaves a model in evaluation mode": lambda f: f["clause"] == KEPT and not f["training"],
    "is each block checkpointed, without reentrance?": lambda f: f["clause"] == KEPT,
    "who moves the scheduler on?": lambda f: f["clause"] == LEARNING_RATE and not f[LEARNING_RATE],
    "print the names of the parameters, and the optimizer's groups": lambda f: f["clause"] == "groups",
}


class Program:
    """A colleague's program in five parts; what each is meant to do stands in the exercise's text."""

    def load(self, folder: str) -> nn.Module:
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**nf4))

    def adapt(self, model: nn.Module) -> nn.Module:
        lora = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        a = [p for name, p in named.items() if "lora_A" in name]
        b = [p for name, p in named.items() if name.endswith("lora_B.weight")]
        return torch.optim.AdamW([{"params": a, "lr": RATE}, {"params": b, "lr": 16 * RATE}], weight_decay=0.0)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: min(1.0, step / WARM_UP))

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, ids: torch.Tensor
    ) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()


HEALTHY = ("load", "schedule")


def run(parts: Callable[[], Any], seed: int) -> dict[str, Any]:
    """A run put together from its parts, and a plain one on the same adapters."""
    program = put_together(parts, Program)
    with tempfile.TemporaryDirectory() as folder, no_progress_bars(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_llama(Path(folder), **SIZES, seed=seed)
        model = returned(program.adapt(returned(program.load(folder), nn.Module, "the model")), nn.Module, "the model")
        twin = prepare(
            AutoModelForCausalLM.from_pretrained(folder),
            method="qlora",
            lora_rank=RANK,
            activation_checkpointing="full",
        )
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    shapes = {name: p.shape for name, p in twin.named_parameters() if "lora_" in name}
    if {name: p.shape for name, p in adapters.items()} != shapes or _alphas(model) != _alphas(twin):
        raise NotYet(
            f"adapt() should add adapters of rank {RANK} with lora_alpha=32 beside every linear layer of the blocks"
        )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    twin.load_state_dict({name: p.detach().clone() for name, p in adapters.items()}, strict=False)
    optimizer = returned(program.optimizer(model), torch.optim.Optimizer, "the optimizer")
    schedule, norms, rates = program.schedule(optimizer), [], []
    optimizer.register_step_pre_hook(lambda *_: norms.append(_norm(adapters.values())))
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    halves = [[p for name, p in twin.named_parameters() if half in name] for half in ("lora_A", "lora_B")]
    right = torch.optim.AdamW([{"params": half} for half in halves], weight_decay=0.0)
    seen: dict[str, Any] = {name: [] for name in ("losses", "alone", "right norms")}
    for step in range(STEPS):
        ids = learnable_tokens(ROWS, LENGTH, SIZES["vocab"], seed + step)
        with SavedForBackward(model) as kept:
            seen["losses"].append(returned(program.step(model, optimizer, schedule, ids), float, "the loss"))
        for group, rate in zip(right.param_groups, (RATE, 16 * RATE), strict=True):
            group["lr"] = rate * min(1.0, step / WARM_UP)
        with SavedForBackward(twin) as needed:
            loss = twin(input_ids=ids, labels=ids).loss
            loss.backward()
        seen["right norms"].append(_norm(trainable(twin)))
        right.step()
        right.zero_grad()
        seen["alone"].append(loss.item())
    if len(rates) != STEPS:
        raise NotYet(f"the optimizer steps {len(rates)} times in {STEPS} steps")
    seen |= {"rates": rates, "left": sum(p.grad is not None and bool(p.grad.any()) for p in adapters.values())}
    seen["decays"] = [group["weight_decay"] for group in optimizer.param_groups]
    groups = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    elements = [sum(p.numel() for p in half) for half in halves]
    seen |= {
        "kept": kept.highest,
        "needed": needed.highest,
        "groups": groups,
        "elements": elements,
        "norms": norms,
        "training": all(module.training for module in model.modules()),
    }
    return seen | {
        "trained": len(trained & set(adapters)),
        "others": len(trained - set(adapters)),
        "all": len(adapters),
    }


def _alphas(model: nn.Module) -> set[float]:
    return {config.lora_alpha for config in getattr(model, "peft_config", {}).values()}


def _norm(parameters: Any) -> float:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()


def observe(parts: type) -> Page:
    """What a Trainer would log, beside a run that trains, and the bytes of a step."""
    seen = run(lambda: parts, 1)
    print(
        f"Each step keeps {nice_bytes(seen['kept'])} for backward; the run that trains keeps {nice_bytes(seen['needed'])}."
    )
    columns = {"loss": "losses", "grad_norm": "norms", "learning_rate": "rates", "loss of the run that trains": "alone"}
    columns |= {"its grad_norm": "right norms"}
    rows = [{"step": step + 1} | {name: seen[key][step] for name, key in columns.items()} for step in range(STEPS)]
    return table(rows, caption="A colleague's QLoRA run, and one that trains the same adapters on the same rows")


@lab.exercise("A run that trains nothing", importance=5, difficulty=3, minutes=20)
def repaired(repaired: Callable[[], Any]) -> str:
    """All adapters trained at their rates, blocks recomputed, and the losses of a plain run; healthy parts untouched."""
    seed = fresh_seed()
    with named_seed(seed):
        seen = run(repaired, seed)
        contract = Contract(HINTS, dict(seen))
        told = f"{seen['trained']} of {seen['all']} adapter matrices are trained, and {seen['others']} other parameters"
        contract.holds(seen["trained"] == seen["all"] and not seen["others"], told, TRAINED)
        contract.memory(KEPT, seen["kept"], at_least=seen["needed"] / 2, at_most=1.2 * seen["needed"])
        told = f"the optimizer's groups hold {seen['groups']} elements, and A and B have {seen['elements']}"
        contract.holds(seen["groups"] == seen["elements"], told, "groups")
        contract.holds(not any(seen["decays"]), f"the groups' weight decay is {seen['decays']}, not 0")
        contract.holds(not seen["left"], "when a step ends, its gradients are still there", "left")
        for step in range(STEPS):
            contract.about = f"step {step + 1}"
            contract.values(LEARNING_RATE, seen["rates"][step], RATE * min(1.0, step / WARM_UP), rtol=1e-6)
            contract.values(LOSS, seen["losses"][step], seen["alone"][step], rtol=1e-3)
    healthy_untouched(repaired(), Program, HEALTHY)
    return f"all {seen['all']} adapter matrices train, with the losses of a plain run; a step keeps {nice_bytes(seen['kept'])}"
