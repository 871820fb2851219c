"""Lab 7, exercise 2: DDP, FSDP2 and ZeRO by a few lines each, and the proof of what a run really was."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from course_checks.harness import NotYet, close, returned
from course_checks.lab07 import runs
from course_checks.lab07.common import lab

METHODS = ("alone", "DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel")
BASE = {
    "micro_batch_size": 2,
    "max_steps": 2,
    "sequence_len": 64,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "bf16": False,
    "optimizer": "adamw_torch",
    "gradient_accumulation_steps": 1,
}
SHARDING = {"fsdp_version", "fsdp_config", "deepspeed", "fsdp"}
WANTED = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}


@lab.exercise("Three methods by three lines", importance=5, difficulty=3, minutes=30)
def switched(overlays: Callable[..., Any], prove: Callable[..., Any]) -> str:
    """The proof is held against what ten recorded runs held; then Axolotl runs the overlays on two real ranks."""
    for name, (about, witness) in recorded().items():
        _right_proof(prove(json.loads(json.dumps(witness))), witness, about or name)
    given = returned(overlays(), dict, "what overlays() returns")
    if set(given) != set(WANTED):
        raise NotYet(
            f"overlays() should return one overlay for each of {', '.join(WANTED)}, and has {', '.join(map(str, given))}"
        )
    layers = {name: runs.read_yaml(given[name], f"the overlay {name}") for name in WANTED}
    for name, layer in layers.items():
        _only_the_method(name, layer)
    _fsdp(layers["fsdp2"])
    _zero(layers["zero3"])
    shown = []
    for name, layer in layers.items():
        run = runs.run({**BASE, **layer}, 2, f"the overlay {name}")
        method, parameters, states = true_proof(run.witness)
        if method != WANTED[name]:
            wrapper = run.witness[0]["wrapper"]
            raise NotYet(f"with the overlay {name} Axolotl trained by {method}: the wrapper is {wrapper}, exit code 0")
        _right_proof(prove(run.witness), run.witness, f"your overlay {name} on two ranks")
        shown.append(
            f"{method}: {parameters:.0%} of the parameters and {states:.0%} of the states on a rank, loss {run.losses[-1]:.6f}"
        )
    return f"{len(recorded())} recorded runs read; on two real ranks " + "; ".join(shown)


@functools.cache
def recorded() -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Name of a run -> (what it was, what each rank held); the file says on what machine they were made."""
    told = json.loads(Path(__file__).with_name("witnesses.json").read_text(encoding="utf-8"))["runs"]
    return {name: (run["about"], run["witness"]) for name, run in told.items()}


def true_proof(witness: list[dict[str, Any]]) -> tuple[str, float, float]:
    """(method, largest share of the parameters that a rank holds, largest share of Adam's states)."""
    first = witness[0]
    parameters = max(w["local_elements"] / w["total_elements"] for w in witness)
    states = max(w["optimizer_elements"] / (2 * w["trainable_elements"]) for w in witness)
    if first["world_size"] == 1:
        method = "alone"
    elif first["wrapper"] == "DeepSpeedEngine":
        method = f"ZeRO-{first['zero_stage']}"
    elif first["wrapper"].startswith("FSDP"):
        method = "FSDP2"
    elif first["wrapper"] == "DistributedDataParallel":
        method = "DDP"
    else:
        method = "tensor parallel"
    return method, parameters, states


def _right_proof(value: Any, witness: list[dict[str, Any]], about: str) -> None:
    value = returned(value, (tuple, list), "what prove() gives")
    if len(value) != 3:
        raise NotYet(
            f"prove() should return (method, share of the parameters, share of the states), not {str(value)[:60]}"
        )
    method, parameters, states = true_proof(witness)
    first = witness[0]
    held = f"wrapper {first['wrapper']}, world size {first['world_size']}, ZeRO stage {first['zero_stage']}, parameters of class {first['param_class']}"
    if value[0] != method:
        if value[0] not in METHODS:
            raise NotYet(f"{about}: {value[0]!r} is none of {', '.join(METHODS)}")
        raise NotYet(f"{about}: it was {method}, and you say {value[0]} ({held})")
    mine = [returned(v, (int, float), "a share") for v in value[1:]]
    if mine[0] > 1.5 and abs(mine[0] - first["local_elements"]) < 1:
        raise NotYet(f"{about}: {mine[0]} elements; give their share of all, between 0 and 1")
    for told, key in ((mine[0], "parameters"), (mine[1], "states")):
        if abs(told - 1 / len(witness)) < 1e-9 and abs((parameters if key == "parameters" else states) - told) > 1e-9:
            raise NotYet(
                f"{about}: you give 1 / {len(witness)} for the {key}. Read what lies there ({held}): not every method divides them, "
                "and rows do not always divide by the ranks"
            )
    close(mine[0], parameters, rtol=1e-6, what=f"{about}: the share of the parameters on the rank that holds most")
    if states < 1 and abs(mine[1] - 2 * states) < 1e-9:
        raise NotYet(f"{about}: Adam keeps two states for each trained parameter: the whole is 2 x trainable_elements")
    if abs(mine[1] - max(w["optimizer_elements"] / (2 * w["total_elements"]) for w in witness)) < 1e-9 != states:
        if first["trainable_elements"] != first["total_elements"]:
            raise NotYet(
                f"{about}: the optimizer keeps states of the trained parameters alone: divide by 2 x trainable_elements"
            )
    close(mine[1], states, rtol=1e-6, what=f"{about}: the share of Adam's states on the rank that holds most")


def _only_the_method(name: str, layer: Mapping[str, Any]) -> None:
    others = [key for key in layer if key not in SHARDING and key not in runs.GIVEN and layer[key] != BASE.get(key)]
    if others:
        raise NotYet(
            f"the overlay {name} also sets {others[0]}: what changes besides the method cannot be told from it afterwards"
        )


def _fsdp(layer: Mapping[str, Any]) -> None:
    if "deepspeed" in layer:
        raise NotYet(
            "the overlay fsdp2 names a DeepSpeed configuration: FSDP2 and DeepSpeed would both shard the model"
        )
    if "fsdp" in layer:
        raise NotYet(
            "the overlay fsdp2: `fsdp:` is the list of FSDP1, which is gone. FSDP2 has fsdp_version: 2 and fsdp_config"
        )
    if "fsdp_config" not in layer:
        raise NotYet("the overlay fsdp2 has no fsdp_config; without it Axolotl trains with DDP, and says nothing")
    if layer.get("fsdp_version") != 2:
        raise NotYet("the overlay fsdp2 does not say fsdp_version: 2")
    config = returned(layer["fsdp_config"], dict, "fsdp_config")
    if config.get("auto_wrap_policy") != "TRANSFORMER_BASED_WRAP":
        raise NotYet(
            "the overlay fsdp2: without auto_wrap_policy: TRANSFORMER_BASED_WRAP the whole model is one unit, gathered at once"
        )
    if config.get("transformer_layer_cls_to_wrap") != "LlamaDecoderLayer":
        raise NotYet(
            f"the overlay fsdp2 wraps {config.get('transformer_layer_cls_to_wrap')}; the tiny model is a Llama, its blocks are "
            "of class LlamaDecoderLayer"
        )


def _zero(layer: Mapping[str, Any]) -> None:
    if any(key.startswith("fsdp") for key in layer):
        raise NotYet("the overlay zero3 sets fsdp keys: FSDP2 and DeepSpeed would both shard the model")
    config = layer.get("deepspeed")
    if isinstance(config, str):
        if not Path(config).is_file():
            raise NotYet(
                f"the overlay zero3: there is no file {config}; `deepspeed:` takes a path or the configuration itself"
            )
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise NotYet("the overlay zero3 has no `deepspeed:` with a configuration or the path of one")
    stage = (config.get("zero_optimization") or {}).get("stage")
    if stage != 3:
        raise NotYet(
            f"the overlay zero3: the stage is {stage}; zero_optimization: {{stage: 3}} shards the parameters too"
        )
    missing = [k for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps") if config.get(k) != "auto"]
    if missing:
        raise NotYet(f'the overlay zero3: say "{missing[0]}": "auto", so that the batch stays what the YAML says')
    if config.get("gradient_clipping") != "auto":
        raise NotYet('the overlay zero3: say "gradient_clipping": "auto"; DeepSpeed clips by a default of its own')
