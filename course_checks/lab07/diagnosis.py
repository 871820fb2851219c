"""Lab 7, exercise 3: five YAMLs with one mistake each; what an answer changes, and what it should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from course_checks.harness import NotYet, plain, returned
from course_checks.lab07.broken_runs import BROKEN
from course_checks.lab07.common import lab

GPUS = 8  # of "wide.yml"
MEANT = 128  # sequences a step, in "batch.yml" and "wide.yml"
TYPO, RIGHT = "gradient_acumulation_steps", "gradient_accumulation_steps"
OFF = (None, False, "no", "false")
# the keys that have to do with the mistake, and why any other key is not the one
ABOUT: dict[str, tuple[tuple[str, ...], str]] = {
    "batch.yml": ((TYPO, RIGHT), "Read every key letter by letter: Axolotl lets a key pass that it does not know"),
    "colab.yml": (("bf16", "fp16"), "What can a card of compute capability 7.5 not do?"),
    "shards.yml": (("deepspeed", "fsdp_version", "fsdp_config"), "Two keys each claim the model for themselves"),
    "wide.yml": ((RIGHT, "micro_batch_size"), "Multiply the batch out, and ask which ranks see the same sequences"),
    "night.yml": (("save_only_model",), "What lies in each checkpoint, and what does resuming need?"),
}


@lab.exercise("Five broken YAMLs", importance=5, difficulty=3, minutes=30)
def broken_yamls(mended: Callable[..., Any]) -> str:
    """Each YAML with the answer's changes laid over it must do what its comment says, and nothing else may change."""
    answer = returned(mended(), dict, "what mended() returns")
    unknown = sorted(set(map(str, answer)) - set(BROKEN))
    if unknown:
        raise NotYet(f"{unknown[0]!r} is none of the files {', '.join(BROKEN)}")
    for name, text in BROKEN.items():
        changes = answer.get(name)
        if not changes:
            raise NotYet(f"{name} still waits for its change, {{key: value}}: {ABOUT[name][1]}")
        changes = returned(changes, dict, f"the change of {name}")
        _only_the_mistake(name, changes)
        config = {**yaml.safe_load(text), **changes}
        words = JUDGES[name]({key: value for key, value in config.items() if value is not None}, changes)
        if words:
            raise NotYet(f"{name}: {words}")
    keys = ", ".join(f"{name} by {' and '.join(answer[name])}" for name in BROKEN)
    return f"five runs that do what their comments say: {keys}"


def _only_the_mistake(name: str, changes: Mapping[str, Any]) -> None:
    before, (allowed, hint) = yaml.safe_load(BROKEN[name]), ABOUT[name]
    others = [key for key in changes if key not in allowed]
    if others:
        where = "" if others[0] in before else ", which is not in the file,"
        raise NotYet(f"{name}: {others[0]}{where} has nothing to do with the mistake. {hint}")
    if all(key in before and before[key] == value for key, value in changes.items()):
        raise NotYet(f"{name}: that is what stands there already. {hint}")


def _typo(config: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    if RIGHT not in config:
        return (
            f"{TYPO} is misspelt. Axolotl lets a key pass that it does not know and accumulates once, 16 sequences a step; "
            "write the right key too, with the value that was meant"
        )
    if config[RIGHT] != 8:
        return f"the comment says 128 sequences a step: 2 x 8 ranks x {config[RIGHT]} are {16 * config[RIGHT]}"
    if TYPO in config:
        return f"the misspelt line is still there, and the next reader takes it for the one that counts: {{{TYPO!r}: None}} removes it"
    return None


def _t4(config: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    bf16, fp16 = config.get("bf16", "auto"), config.get("fp16")
    if bf16 not in (*OFF, "auto"):
        return (
            "a T4 has no bf16, compute capability 8.0 is the first that has; with bf16: true Axolotl also ignores fp16"
        )
    if fp16 is not True and bf16 == "auto":
        return "bf16 left out or auto asks PyTorch, and PyTorch counts a bf16 that it emulates, slowly: on this card say fp16: true"
    if fp16 is not True:
        return "without bf16 and without fp16 it computes in fp32: twice the memory, and the T4's fp16 units idle. Turn fp16 on"
    return None


def _both(config: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    if config.get("deepspeed") and "fsdp_config" not in config:
        return "now it shards with ZeRO-3; the comment wants FSDP2, like the team's other runs"
    if config.get("deepspeed"):
        return "FSDP2 and DeepSpeed would both shard the model: {'deepspeed': None} removes the one that was not meant"
    if config.get("fsdp_version") != 2 or "fsdp_config" not in config:
        return "deepspeed is gone, and FSDP2 too: what is left is DDP, and 8B parameters with Adam do not fit a card"
    if "fsdp_config" in changes and changes["fsdp_config"] != yaml.safe_load(BROKEN["shards.yml"])["fsdp_config"]:
        return "fsdp_config was right as it was"
    return None


def _wide(config: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    micro, accumulate = plain(config.get("micro_batch_size", 1)), plain(config.get(RIGHT, 1))
    if (
        isinstance(micro, bool)
        or isinstance(accumulate, bool)
        or not isinstance(micro, int)
        or not isinstance(accumulate, int)
    ):
        return f"give whole numbers for micro_batch_size and {RIGHT}"
    data_ranks = GPUS // config["tensor_parallel_size"]
    batch = micro * accumulate * data_ranks
    told = f"{micro} x {accumulate} x {data_ranks} = {batch} sequences a step, and the comment wants {MEANT}"
    if micro * accumulate * GPUS == MEANT:
        return f"{told}. The two ranks of a tensor parallel pair work on the same sequences: {data_ranks} ranks bring data, not {GPUS}"
    if batch != MEANT:
        return told
    if micro > 2:
        return f"{micro} sequences at once: the comment says that two are all that fits. Accumulate instead"
    return None


def _night(config: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    if config.get("save_only_model") not in OFF:
        return (
            "each checkpoint holds the weights alone: Adam's moments, the schedule and the place in the data begin anew every "
            "8 hours. save_only_model has to be false"
        )
    return None


JUDGES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]] = {
    "batch.yml": _typo,
    "colab.yml": _t4,
    "shards.yml": _both,
    "wide.yml": _wide,
    "night.yml": _night,
}
