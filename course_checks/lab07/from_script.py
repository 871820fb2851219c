"""Lab 7, exercise 1: a script with its numbers in five places becomes one YAML, and Axolotl gives the same losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from course_checks.harness import NotYet
from course_checks.lab07 import runs, scattered_script
from course_checks.lab07.common import lab

ENVIRONMENT, ARGUMENTS = {"LR": "2e-3", "ACCUMULATE": "2"}, ["--weight-decay", "0.1"]  # the wiki page's
RTOL = 2e-5  # fp32 over six steps: the two agree to 1e-7


class Setting(NamedTuple):
    """One key: the script's value, what Axolotl takes where the key is missing, and where the script says it."""

    key: str
    wanted: Any
    default: Any
    where: str


SETTINGS = (
    Setting(
        "learning_rate",
        2e-3,
        None,
        "LR in the environment is 2e-3, by the wiki page; 1e-3 stands in the code for those who forget it",
    ),
    Setting("max_steps", scattered_script.STEPS, None, "the constant STEPS at the top; the schedule ends there too"),
    Setting(
        "sequence_len", 64, 512, "--max-len, an argument that nobody sets, cuts long texts into pieces of 64 tokens"
    ),
    Setting("lr_scheduler", "linear", "cosine", "warm_up_then_straight_down goes down in a straight line"),
    Setting("warmup_steps", 2, 0, "warm_up_then_straight_down has its own constant, warmup = 2"),
    Setting("weight_decay", 0.1, 0.0, "the wiki page passes --weight-decay 0.1; the 0.0 in the parser is never used"),
    Setting("adam_beta2", 0.95, 0.999, "the optimizer is built with betas=(0.9, 0.95), inside main()"),
    Setting("max_grad_norm", 0.5, 1.0, "--clip, an argument that nobody sets, is 0.5"),
    Setting("bf16", False, "auto", "the script computes in fp32 everywhere; with auto a newer GPU computes in bf16"),
    Setting(
        "curriculum_sampling",
        True,
        False,
        "the script takes the rows in the order of the file, and Axolotl shuffles them each epoch",
    ),
    Setting(
        "shuffle_merged_datasets",
        False,
        True,
        "the script takes the rows in the order of the file, and Axolotl shuffles a dataset when it loads it",
    ),
)


@lab.exercise("From a script to a YAML", importance=5, difficulty=3, minutes=35)
def one_file(run_yaml: Callable[..., Any]) -> str:
    """Axolotl trains by the learner's YAML on a real rank; each of its losses is that of the script."""
    config = runs.read_yaml(run_yaml(), "your YAML")
    if words := named_difference(config):
        raise NotYet(words)
    mine, theirs = runs.run(config, 1, "your YAML").losses, script_losses()
    if len(mine) != len(theirs):
        raise NotYet(f"Axolotl logged {len(mine)} losses, and the script {len(theirs)}")
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True), 1):
        if abs(a - b) > RTOL * abs(b):
            others = [key for key in config if key not in {s.key for s in SETTINGS} and key not in runs.GIVEN]
            raise NotYet(
                f"the losses part at step {step}: Axolotl's is {a:.6f}, the script's {b:.6f}. What the script says is in your "
                f"YAML; what else is there: {', '.join(others) or 'nothing'}"
            )
    apart = max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True))
    return f"{len(mine)} losses from {mine[0]:.4f} to {mine[-1]:.4f}, at most {apart:.0e} from the script's; {len(config)} keys, one file"


def named_difference(config: Mapping[str, Any]) -> str | None:
    """The words for the first setting that is not the script's; None where all are."""
    told = _batch(config)
    if told:
        return told
    if config.get("sample_packing"):
        return "sample_packing puts several texts into one row; the script gives each text a row and pads it"
    if config.get("fp16"):
        return "the script computes in fp32: leave fp16 out"
    for setting in SETTINGS:
        if setting.key == "warmup_steps" and "warmup_ratio" in config and "warmup_steps" not in config:
            if int(_number(config, "warmup_ratio") * scattered_script.STEPS) == setting.wanted:
                continue  # Axolotl rounds down; with fewer than a hundred steps it counts whole ones
        value = config.get(setting.key, setting.default)
        if _same(value, setting.wanted, config, setting.key):
            continue
        if setting.key in config:
            return f"{setting.key} is {value} in your YAML, and another in the script: {setting.where}"
        missing = {
            "learning_rate": "and Axolotl takes no default",
            "max_steps": f"and Axolotl goes on to the end of the epoch ({len(runs.texts())} texts)",
            "warmup_steps": "and Axolotl's default, 3 % of the steps, is none of six",
        }.get(setting.key, f"and Axolotl's default is {str(value).lower() if isinstance(value, bool) else value}")
        return f"your YAML says nothing of {setting.key}, {missing}: {setting.where}"
    if str(config.get("optimizer", "adamw_torch_fused")) not in ("adamw_torch", "adamw_torch_fused"):
        return f"the script's optimizer is torch's AdamW, adamw_torch in Axolotl, and yours {config['optimizer']}"
    return None


def _batch(config: Mapping[str, Any]) -> str | None:
    micro, accumulate = (int(_number(config, key, 1)) for key in ("micro_batch_size", "gradient_accumulation_steps"))
    wanted = scattered_script.BATCH * int(ENVIRONMENT["ACCUMULATE"])
    if micro * accumulate == wanted:
        return None
    told = f"{micro} x {accumulate} = {micro * accumulate} sequences a step, and the script takes {wanted}: "
    if accumulate == 1 and micro == scattered_script.BATCH:
        return told + "the wiki page sets ACCUMULATE=2, gradient_accumulation_steps in Axolotl"
    if accumulate == int(ENVIRONMENT["ACCUMULATE"]) and micro == 1:
        return told + "BATCH is 2, micro_batch_size in Axolotl, whose default is 1"
    return told + "BATCH at once, and ACCUMULATE times"


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    try:
        return float(value)  # PyYAML reads 2e-3 as text, and Axolotl makes a number of it
    except (TypeError, ValueError):
        raise NotYet(f"{key}: {value!r} is no number") from None


def _same(value: Any, wanted: Any, config: Mapping[str, Any], key: str) -> bool:
    if isinstance(wanted, bool):
        return (value in (False, None, "false")) if wanted is False else value is True
    if isinstance(wanted, str):
        return value == wanted
    return value is not None and abs(_number({key: value}, key) - wanted) < 1e-12


@functools.cache
def script_losses() -> tuple[float, ...]:
    """What the script gives, called as the wiki page says."""
    from course_lib.models import load

    model, tokenizer = load(runs.folder() / "tiny")
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in runs.texts()]
    return tuple(scattered_script.main(dict(ENVIRONMENT), list(ARGUMENTS), model, rows))
