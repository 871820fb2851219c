"""Lab 7, exercise 5: a script becomes one YAML, trained by FSDP2 on two ranks, killed and resumed."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import os
import random
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from course_checks.harness import Contract, NotYet, fresh_seed, scripts, without_limit
from course_checks.lab07.common import FOLDER, lab
from course_lib.launch import RankFailed
from course_lib.models.data import english
from course_tools.axolotl import AxolotlRun, make_inputs, train
from course_tools.axolotl.overlays import read

Config = dict[str, Any]
SCRIPT, PLACES = FOLDER / "train.py", FOLDER / "places.yml"
GIVEN: Config = read(PLACES)
STEPS, RANKS, UNITS, MOST_LOST, DIES_AT = 12, 2, 3, 4, 7  # units: two blocks, and one for the rest
SAYS: dict[str, tuple[Any, Any, str]] = {  # what the script says, Axolotl's default, and where it is said
    "max_steps": (STEPS, None, "STEPS, at the top"),
    "sequence_len": (64, 512, "--max-len, which nobody sets"),
    "learning_rate": (2e-3, None, "LR, which the wiki page sets"),
    "lr_scheduler": ("linear", "cosine", "warm_up_then_straight_down"),
    "warmup_steps": (3, None, "warm_up_then_straight_down"),
    "weight_decay": (0.1, 0.0, "the wiki page's --weight-decay"),
    "adam_beta2": (0.95, 0.999, "the betas inside main()"),
    "max_grad_norm": (0.5, 1.0, "--clip, which nobody sets"),
    "shuffle_merged_datasets": (False, False, "rows in the order of the file"),
    "curriculum_sampling": (True, False, "rows in the order of the file"),
    "sample_packing": (False, False, "a row for each text"),
    "bf16": (False, "auto", "no word of 16 bits: fp32"),
}
LOSS = "the loss"


def _differs(key: str, config: Config) -> bool:
    wanted, default, _ = SAYS[key]
    value = config.get(key, default)
    return float(value) != wanted if isinstance(wanted, float) else value != wanted


def _misspelt(config: Config) -> bool:
    strangers = [key for key in config if key not in SAYS]
    return any(set(difflib.get_close_matches(key, SAYS, 1, 0.91)) - set(config) for key in strangers)


HINTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "without the optimizer's state no run goes on as it was": lambda f: f["config"].get("save_only_model"),
    "a key that Axolotl does not know is read past without a word: look for one that is misspelt": lambda f: (
        f["clause"] == LOSS and _misspelt(f["config"])
    ),
    "how many sequences does a step of all ranks take, and how many does the script's?": lambda f: (
        f["clause"] == LOSS
        and RANKS * f["config"].get("micro_batch_size", 1) * f["config"].get("gradient_accumulation_steps", 1) != 4
    ),
    **{
        f"what does your file say of {key}? The script: {where}": lambda f, key=key: (
            f["clause"] in (LOSS, "steps") and _differs(key, f["config"])
        )
        for key, (_, _, where) in SAYS.items()
    },
    "does the second start look for checkpoints?": lambda f: f["clause"] == "again" and f["saved"],
}
start = functools.partial(scripts.start, PLACES)


@lab.exercise("One file, killed and resumed", importance=5, difficulty=3, minutes=30)
def one_file(path: Callable[[], Any]) -> str:
    """The file trains what the script trains, sharded on two ranks; what it does after a SIGKILL; what it keeps."""
    config = _read(scripts.script_of(path()))
    contract = Contract(HINTS, {"config": config})
    with tempfile.TemporaryDirectory() as folder, without_limit():
        losses = _inputs(folder)
        here = {
            "base_model": f"{folder}/tiny",
            "datasets": [GIVEN["datasets"][0] | {"path": f"{folder}/texts.jsonl"}],
            "dataset_prepared_path": f"{folder}/prepared",
            "output_dir": f"{folder}/out",
        }
        _train(config | here, contract, die_at=DIES_AT)
        saved = _saved(folder)
        contract.facts["saved"] = saved
        run = _train(config | here, contract)
        contract.holds(len(run.losses) == STEPS, f"{len(run.losses)} steps were trained, not {STEPS}", "steps")
        mine, theirs = ({f"step {step}": loss for step, loss in enumerate(each, 1)} for each in (run.losses, losses))
        contract.values(LOSS, mine, theirs, rtol=2e-5)  # fp32: the two agree to 1e-7
        held = run.witness[-1]
        contract.holds(
            held["wrapper"].startswith("FSDP"), f"Axolotl ended well, and the model's class is {held['wrapper']}"
        )
        scattered = [call for call in run.run.collectives if call.rank == 0 and call.kind == "reduce_scatter"]
        largest, whole = max((call.wire_bytes for call in scattered), default=0), 4 * held["total_elements"] / RANKS
        units = f"gradients are scattered in pieces of up to {largest / whole:.0%}: is every decoder layer a unit, and nothing else?"
        contract.holds(largest < 0.7 * whole and len(scattered) % UNITS == 0, units)
        contract.holds(bool(saved), f"rank 1 was killed in step {DIES_AT}, and there was no checkpoint")
        gap = saved[-1] - (saved[-2] if saved[1:] else 0)
        contract.holds(gap <= MOST_LOST, f"{gap} steps lie between two saves, and no more than {MOST_LOST} may be lost")
        again, left = len(scattered) // UNITS, STEPS - max(saved)
        contract.holds(again == left, f"the second start trained {again} steps, and {left} were left", "again")
        kept = _saved(folder)
        contract.holds(len(kept) == 2, f"checkpoints of steps {kept} are there in the end, and two should be")
    share = held["local_elements"] / held["total_elements"]
    off = max(abs(a / b - 1) for a, b in zip(run.losses, losses, strict=True))
    return (
        f"killed in step {DIES_AT} and resumed after step {max(saved)}, {STEPS} losses from {run.losses[0]:.4f} to "
        f"{run.losses[-1]:.4f} are the script's but for {off:.0e}; {held['wrapper']}, {share:.0%} of the weights on each rank"
    )


def _read(file: Path) -> Config:
    """The mapping of a learner's YAML. Raises NotYet."""
    try:
        config = read(file)
    except ValueError as error:
        raise NotYet(str(error)) from None
    if config.keys() <= GIVEN.keys():
        raise NotImplementedError
    plugins = [plugin for plugin in GIVEN["plugins"] if plugin in (config.get("plugins") or ())]  # more may be there
    if lost := [key for key, value in GIVEN.items() if (config | {"plugins": plugins}).get(key) != value]:
        raise NotYet(f"{file.name} should keep what {PLACES.name} says of {lost[0]}")
    return config


def _inputs(folder: str) -> list[float]:
    """Write a fresh model and fresh texts, as `make_inputs` does; the script's losses on them."""
    make_inputs(folder, layers=2, hidden=32, seed=(seed := fresh_seed()))
    texts = [text for text in english().split("\n\n") if 60 < len(text) < 200]
    lines = [json.dumps({"text": " ".join(text.split())}) for text in random.Random(seed).sample(texts, 4 * STEPS)]
    Path(folder, "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with mock.patch.dict(os.environ, LR="2e-3", ACCUMULATE="2"), contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(SCRIPT))["main"](["--weight-decay", "0.1", "--folder", folder])


def _train(config: Config, contract: Contract, die_at: int | None = None) -> AxolotlRun | None:
    """Let Axolotl train; None after the planned death."""
    try:
        return train(config, ranks=RANKS, die_at=die_at, timeout=150.0)
    except RankFailed as failed:
        if die_at and "SIGKILL" in str(failed).partition("\n")[0]:
            return None
        said = " ".join(failed.cause_message.split())[:300]
        raise contract.broken(f"Axolotl does not run your file: {failed.cause_type}: {said}") from failed


def _saved(folder: str) -> list[int]:
    """The steps of the checkpoints there."""
    return sorted(int(path.name.partition("-")[2]) for path in Path(folder, "out").glob("checkpoint-*"))
