"""Lab 5, exercise 6: a DeepSpeed configuration with mistakes in it, and what it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import Contract, number, returned
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
    "DeepSpeed ignores a top-level key that it does not know: check each spelling": lambda f: f["clause"] == "clipping",
    'only Hugging Face\'s Trainer fills in "auto"; DeepSpeed drops it, and falls back to false': lambda f: (
        f["clause"] == "bf16"
    ),
    "offload_optimizer belongs in zero_optimization, with the device cpu; stage 2 ignores offload_param": lambda f: (
        f["clause"] == "offload"
    ),
    "in bf16, 2 bytes for each weight that this rank holds": lambda f: f["clause"] == "a GPU's bytes",
    "a master copy and two moments in fp32, of this rank's share": lambda f: (
        f["clause"] == "a rank's bytes on the host"
    ),
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
    seen |= {"clipping": engine.gradient_clipping(), "gpu": probe.resident(), "host": probe.on_host()}
    return seen | {"parameters": parameters}


@lab.exercise("A configuration, mended", importance=4, difficulty=2, minutes=10, keeps_inputs=False)
def mended(mend: Callable[..., Any]) -> str:
    """DeepSpeed's own engine follows the recipe on two ranks, and the bytes are those of the two formulas."""
    bills = {}
    for parameters, ranks in ((8_030_261_248, 8), (1_711_376_384, 6)):
        answer = mend(copy.deepcopy(COLLEAGUES), parameters, ranks)
        config, *bills[parameters, ranks] = returned(answer, tuple, "(configuration, GPU bytes, host bytes)")
    config = returned(config, dict, "the configuration")
    seen = under_deepspeed(on_a_rank, config, ranks=RANKS).results[0]
    contract = Contract(HINTS, about=f"on {RANKS} ranks")
    for name, value in RECIPE.items():
        contract.holds(seen[name] == value, f"{name} is {seen[name]}, and the recipe says {value}", name)
    state = seen["host"]["optimizer_state"] + seen["host"]["master"]
    contract.holds(state > 0, "no byte of the optimizer is on the host", "offload")
    left = {"gradient_cliping", "offload_param"} & {*config, *config["zero_optimization"]}
    contract.holds(not left, f"{' '.join(left)} is still there; DeepSpeed ignores it, and the next reader will not")
    for (n, ranks), (gpu, host) in bills.items():
        contract.about = f"{n:,} parameters on {ranks} ranks"
        contract.values("a GPU's bytes", gpu, {1: 2 * n, 2: 2 * n, 3: 2 * n / ranks}, rtol=0.001)
        contract.values("a rank's bytes on the host", number(host, "the host's bytes"), 12 * n / ranks, rtol=0.001)
    per_weight, per_state = seen["gpu"]["parameters"] / seen["parameters"], state / seen["parameters"] * RANKS
    return (
        f"stage 2 in bf16, clipped at 0.5. Measured: {per_weight:.2f} bytes per parameter on each of {RANKS} devices, and "
        f"{per_state:.2f} on the host for each of a rank's share"
    )
