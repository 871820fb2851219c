"""Tokens per second, TFLOP/s and MFU of the course's step, beside Hugging Face's Trainer on the same model in the same run.

Beside them the rate of a large bf16 matrix product, which is the most that this card gives.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.gpu.models import Training, free, llama
from benchmarks.gpu.running import Part, Piece, Row
from course_lib.memory import PRESETS, flops_per_token
from course_lib.memory.cards import CARDS

WARM_UP, STEPS = 3, 6


def pieces(part: Part) -> Iterator[Piece]:
    yield "product", lambda: product(part)
    full = {"method": "full", "precision": "bf16", "activation_checkpointing": "full", "seq_len": 2048}
    lora = full | {"method": "lora", "precision": "bf16-mixed"}
    trainings = [
        ("llama-3.1-8b", full | {"micro_batch_size": 4}),
        ("llama-3.1-8b", lora | {"micro_batch_size": 4}),
        ("llama-3.2-1b", full | {"micro_batch_size": 16}),
        ("llama-3.2-1b", full | {"micro_batch_size": 8, "activation_checkpointing": "none"}),
        ("llama-3.2-1b", lora | {"micro_batch_size": 16}),
    ]
    if part.small:
        trainings = [("tiny", full | {"precision": "fp32", "micro_batch_size": 2, "seq_len": 32})]
    for model, settings in trainings:
        name = " ".join([model, *(f"{key}={value}" for key, value in settings.items())])
        yield name, lambda model=model, settings=settings: beside_the_trainer(part, model, settings)
    # last, for compiling takes long
    model, settings = trainings[0]
    compiled = {} if part.small else {"compiled": True, "loss": "chunked"}
    yield "compiled blocks", lambda: trained(part, model, settings | compiled, "compiled", ours)


def product(part: Part) -> Iterable[Row]:
    """A square product of random numbers; of zeros it would be faster, for the card would draw less power."""
    size, dtype = (64, torch.float32) if part.small else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=part.device, dtype=dtype) for _ in range(2))
    seconds = seconds_of(lambda: a @ b, part)
    yield "product", str(dtype), {"size": size, "seconds": seconds, "tflops": 2 * size**3 / seconds / 1e12}


def seconds_of(call: Callable[[], Any], part: Part, repeats: int = 20) -> float:
    """Median seconds of a call, by the clock, the GPU's work included."""
    found = []
    for _ in range(repeats + WARM_UP):
        began = time.perf_counter()
        call()
        if part.on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[WARM_UP:])


def beside_the_trainer(part: Part, model: str, settings: dict[str, Any]) -> Iterable[Row]:
    yield from trained(part, model, settings, "course", ours)
    yield from trained(part, model, settings, "Trainer", the_trainers)


def trained(
    part: Part, model: str, settings: dict[str, Any], way: str, run: Callable[[Part, str, dict[str, Any]], float]
) -> Iterable[Row]:
    """Tokens a second, the model's FLOP/s (causal attention, nothing counted twice), and their share of the data sheet's."""
    free(part.device)
    seconds = run(part, model, settings)
    tokens = settings["micro_batch_size"] * settings["seq_len"] / seconds
    frozen = settings["method"] != "full"
    rate = tokens * flops_per_token(PRESETS[model], settings["seq_len"], frozen=frozen, causal=True)
    values = {
        "step_seconds": seconds,
        "tokens_per_second": tokens,
        "tflops": rate / 1e12,
        "settings": settings,
    }
    if peak := card_peak(part):
        values["mfu"] = rate / peak
    if part.on_gpu:
        values["reserved"] = torch.cuda.max_memory_reserved()
    free(part.device)
    yield "training", f"{model} {settings['method']} {settings['activation_checkpointing']}: {way}", values


def card_peak(part: Part) -> float:
    """The data sheet's dense 16-bit FLOP/s of this card; 0 where the course does not know it."""
    if not part.on_gpu:
        return 0.0
    named = torch.cuda.get_device_name().lower().replace(" ", "")
    total = torch.cuda.get_device_properties(0).total_memory
    near = [card for card in CARDS.values() if card.name.split("-")[0].removeprefix("rtx") in named]
    return min(near, key=lambda card: abs(card.memory - total)).peak_flops if near else 0.0


def ours(part: Part, model: str, settings: dict[str, Any]) -> float:
    """Median seconds of a step."""
    return seconds_of(Training(model, device=part.device, **settings).step, part, 2 if part.small else STEPS)


def the_trainers(part: Part, model: str, settings: dict[str, Any]) -> float:
    """Same model, optimizer, precision and batch; no clipping, nothing logged."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    size, length = settings["micro_batch_size"], settings["seq_len"]
    how = {name: settings[name] for name in ("method", "precision", "activation_checkpointing")}
    net = llama(model, device=part.device, **how)
    steps = WARM_UP + (2 if part.small else STEPS)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, PRESETS[model].vocab, (steps * size, length))]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if part.on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=size, max_steps=steps, learning_rate=1e-4, max_grad_norm=0.0,
            lr_scheduler_type="constant", optim="adamw_torch_fused", bf16=settings["precision"] == "bf16-mixed",
            use_cpu=not part.on_gpu, report_to=[], logging_strategy="no", logging_nan_inf_filter=False, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=net, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    took = [after - before for before, after in zip(times, times[1:], strict=False)]
    return statistics.median(took[WARM_UP - 1 :])
