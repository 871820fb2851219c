"""Lab 5, exercise 6: a DeepSpeed configuration with mistakes in it, and what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import Contract, NotYet, number, returned
from course_checks.lab05.common import lab, under_deepspeed
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe.holdings import ZeroProbe
from course_lib.on_cpu.deepspeed import prepare_deepspeed

RANKS = 2
RECIPE = {"batch": (16, 4, 2), "stage": 2, "bf16": True, "clipping": 0.5}
COLLEAGUES = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_cliping": 0.5,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 200_000,
        "offload_param": {"device": "cpu"},
    },
}
HINTS = {
    "DeepSpeed reads past a key at the top that it does not know: read each aloud": lambda f: f["clause"] == "clipping",
    'only Hugging Face\'s Trainer fills in what is "auto"; to DeepSpeed itself it means false': lambda f: (
        f["clause"] == "bf16"
    ),
    "stage 2 keeps the weights on the GPU, and passes over offload_param": lambda f: f["clause"] == "offload",
    "in bf16: 2 bytes of weights and 2 of gradients per parameter": lambda f: f["clause"] == "the GPU's bytes",
    "a master copy and two moments in fp32, of this rank's share": lambda f: f["clause"] == "the host's bytes",
}


def on_a_rank(config: dict[str, Any]) -> dict[str, Any]:
    """A step by the configuration; what the engine says of itself, and the bytes that it holds."""
    prepare_deepspeed()
    import deepspeed

    model = tiny_llama(hidden=64, layers=2)
    parameters = sum(p.numel() for p in model.parameters())
    config = config | {
        "zero_force_ds_cpu_optimizer": False
    }  # its own Adam for the host would have to be compiled first
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    rows = sample_batch(0, global_batch=batch[0], seq_len=16, rank=dist.get_rank(), world_size=RANKS)
    probe = ZeroProbe(engine)
    for micro_batch in rows.chunk(batch[2]):
        engine.backward(engine(input_ids=micro_batch, labels=micro_batch).loss)
        engine.step()
    seen = {"batch": batch, "stage": engine.zero_optimization_stage(), "bf16": engine.bfloat16_enabled()}
    return seen | {"clipping": engine.gradient_clipping(), "host": probe.on_host(), "parameters": parameters}


@lab.exercise("A configuration, mended", importance=4, difficulty=2, minutes=10, keeps_inputs=False)
def mended(mend: Callable[..., Any]) -> str:
    """DeepSpeed's own engine follows the recipe on two ranks, and the bytes are those of the two formulas."""
    asked = {"parameters": 8_030_261_248, "ranks": 8}
    answer = returned(
        mend(json.loads(json.dumps(COLLEAGUES)), **asked), tuple, "(configuration, GPU's bytes, host's bytes)"
    )
    if len(answer) != 3:
        raise NotYet(f"give (configuration, GPU's bytes, host's bytes), not {len(answer)} things")
    try:
        config = json.loads(json.dumps(returned(answer[0], dict, "the configuration")))
    except (TypeError, ValueError) as error:
        raise NotYet(f"that cannot be written as JSON: {error}") from error
    run = under_deepspeed(on_a_rank, config, ranks=RANKS)
    seen, contract = run.results[0], Contract(HINTS, about=f"DeepSpeed's engine on {RANKS} ranks")
    for name, value in RECIPE.items():
        if seen[name] != value:
            raise contract.broken(f"{name} is {seen[name]}, and the recipe says {value}", name)
    state = seen["host"]["optimizer_state"] + seen["host"]["master"]
    if not state:
        raise contract.broken("no byte of the optimizer lies on the host", "offload")
    n, ranks = asked["parameters"], asked["ranks"]
    contract.about = f"{n:,} parameters on {ranks} ranks"
    contract.values("the GPU's bytes", number(answer[1], "the GPU's bytes"), 2 * n + 2 * n / ranks, rtol=0.001)
    contract.values("the host's bytes", number(answer[2], "the host's bytes"), 12 * n / ranks, rtol=0.001)
    per_parameter = state / seen["parameters"] * RANKS
    return (
        f"stage 2 in bf16, clipped at 0.5; {per_parameter:.2f} bytes per parameter of the rank's share lie on the host"
    )
