"""Lab 6, exercise 2: a tied Llama from its folder onto ranks of which none can hold it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.models.llama import LlamaForCausalLM

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, phases, returned, run_ranks
from course_checks.lab06.common import lab, rows_bytes, tied_llama
from course_lib.models import no_progress_bars
from course_lib.observe.host import resident_peak
from course_lib.units import nice_bytes

RANKS, LIMIT = 3, 18 * 2**20
LARGE = {"layers": 6, "vocab": 1003, "hidden": 360, "intermediate": 1000}  # 35 MiB in fp32, largest matrix 1.4
SMALL = {"layers": 2, "vocab": 61}  # loaded first: it imports what the large one then has
PEAK, DTYPES, BUFFERS = "the peak of loading", "dtypes", "buffers"
GATHERED, REDUCED = "gathered", "what it reduces in a step"
HINTS = {
    "the whole model is there in fp32: build it on the meta device, and shard it before to_empty()": lambda f: (
        f["clause"] == PEAK and f[PEAK] > f["whole"]
    ),
    "no rank needs whole files: dcp.load reads the rows that it is asked for": lambda f: f["clause"] == PEAK,
    "the policy casts what is gathered; rows stay in the dtype in which the model was built": lambda f: (
        f["clause"] == DTYPES
    ),
    "it is in no file, and to_empty() left garbage in it: make it again": lambda f: f["clause"] == BUFFERS,
    "each fully_shard() takes the policy, and param_dtype is what a unit is gathered in": lambda f: (
        f["clause"] == GATHERED
    ),
    "reduce_dtype is what gradients are summed in": lambda f: f["clause"] == REDUCED and f[REDUCED] < 0.6 * f["whole"],
}


def on_a_rank(load: Callable[..., Any], small: str, large: str) -> list[dict[str, Any]]:
    """What the learner's function makes of each folder, beside the whole model."""
    mesh, models = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for folder in (small, large):
        with resident_peak() as peak:
            try:
                model = returned(load(folder, mesh), nn.Module, "the model")
            except CheckpointException as error:  # its message is every rank's traceback
                raise NotYet(f"dcp.load() raises on rank {dist.get_rank()}: {str(error).splitlines()[-1]}") from error
        whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        seen: dict[str, Any] = {"peak": peak["resident"], "whole": sum(p.nbytes for p in whole.parameters())}
        seen["units"] = [isinstance(module, FSDPModule) for module in (model, *model.model.layers)]
        seen["plain"] = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        seen["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        if seen["tied"] and not seen["plain"]:
            pairs = zip(model.named_parameters(), whole.parameters(), strict=True)
            seen["off"] = [name for (name, p), right in pairs if not torch.equal(p.full_tensor().float(), right)]
            seen["dtypes"] = {str(p.dtype) for p in model.parameters()}
            seen["held"] = sum(p.to_local().nbytes for p in model.parameters())
            seen["share"] = rows_bytes(whole, dist.get_world_size(), dist.get_rank())
            buffers = dict(model.named_buffers())
            pairs = [(name, buffers.get(name), right) for name, right in whole.named_buffers()]
            seen["buffers"] = [name for name, made, right in pairs if made is None or not torch.equal(made, right)]
            seen |= step(model, whole)
        models.append(seen)
        del model, whole
    return models


def step(model: nn.Module, whole: nn.Module) -> dict[str, Any]:
    """Losses of the model, in a step between two barriers, and of the whole one; what units are gathered in."""
    tokens = torch.arange(96).view(4, 24) * 7 % SMALL["vocab"]
    with torch.no_grad():
        right = whole(input_ids=tokens, labels=tokens).loss.item()
    dist.barrier()
    gathered: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_pre_hook(lambda module, _: gathered.add(str(module.weight.dtype)))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    dist.barrier()
    whole_again = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return {"right": right, "loss": loss.item(), GATHERED: gathered, "whole again": whole_again}


@lab.exercise("A model from its folder", importance=5, difficulty=3, minutes=10)
def loaded(load: Callable[..., Any]) -> str:
    """The file's weights in fp32 rows, tied, with whole buffers, gathered in bf16; and no rank ever had the whole."""
    seed = fresh_seed()
    with named_seed(seed), tempfile.TemporaryDirectory() as folder, no_progress_bars():
        for name, sizes in (("small", SMALL), ("large", LARGE)):
            model = tied_llama(**sizes, seed=seed).bfloat16()
            model.save_pretrained(f"{folder}/{name}", max_shard_size="3MB")
        run = run_ranks(on_a_rank, load, f"{folder}/small", f"{folder}/large", ranks=RANKS, timeout=60.0)
        for rank, models in enumerate(run.results):
            for number, seen in enumerate(models):
                contract = Contract(HINTS, {"whole": seen["whole"]}, f"rank {rank} of {RANKS}")
                _right(contract, seen)
                calls = phases(run, rank)[2 * number + 1]
                reduced, slack = sum(c.bytes for c in calls if c.kind == "reduce_scatter"), seen["whole"] / 10 + 4096
                contract.memory(REDUCED, reduced, at_least=seen["whole"], at_most=seen["whole"] + slack)  # padded rows
            contract.memory(PEAK, seen["peak"], at_least=0.8 * seen["share"], at_most=LIMIT)
    peak = max(models[1]["peak"] for models in run.results)
    return (
        f"{nice_bytes(seen['whole'])} of weights on {RANKS} ranks: {nice_bytes(peak)} at most while they load, "
        f"{nice_bytes(seen['held'])} kept; a step gathers in bf16, and reduces in fp32"
    )


def _right(contract: Contract, seen: dict[str, Any]) -> None:
    contract.holds(seen["units"][0], "the model you return is no unit: fully_shard(model) takes what is in no block")
    contract.holds(all(seen["units"]), f"{sum(seen['units'][1:])} of {len(seen['units']) - 1} blocks are units")
    contract.holds(not seen["plain"], f"{' '.join(seen['plain'][:1])} is not sharded")
    contract.holds(seen["tied"], "embedding and head are two tensors; the folder's config ties them")
    sentence = f"the parameters are {', '.join(seen['dtypes'])}, and should be torch.float32"
    contract.holds(seen["dtypes"] == {"torch.float32"}, sentence, DTYPES)
    contract.holds(not seen["off"], f"{' '.join(seen['off'][:1])} is not what the folder says")
    contract.holds(not seen["buffers"], f"the buffer {' '.join(seen['buffers'][:1])} is not the whole model's", BUFFERS)
    contract.memory("its share of the weights", seen["held"], at_least=seen["share"], at_most=seen["share"])
    sentence = f"units are gathered in {', '.join(sorted(seen[GATHERED]))}, and should be in torch.bfloat16"
    contract.holds(seen[GATHERED] == {"torch.bfloat16"}, sentence, GATHERED)
    contract.holds(not seen["whole again"], f"after a step {' '.join(seen['whole again'][:1])} is still whole")
    contract.values("the loss", seen["loss"], seen["right"], rtol=0.01)
