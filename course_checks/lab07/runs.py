"""The tiny run that exercises 1 and 2 give to Axolotl: its model, its texts, and what of its YAML is given."""

from __future__ import annotations

import atexit
import difflib
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from course_checks.harness import NotYet, nothing, without_limit
from course_checks.lab07.common import AXOLOTL_TIMEOUT
from course_lib.launch import RankFailed
from course_lib.models.data import english
from course_tools.axolotl import AxolotlRun, make_inputs, merged, train

# What stands in the YAML already: where things are, and what has to do with the machine.
GIVEN: dict[str, Any] = {
    "base_model": "tiny",
    "special_tokens": {"pad_token": "<|im_end|>"},
    "datasets": [{"path": "texts.jsonl", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared",
    "output_dir": "out",
    "val_set_size": 0,
    "attn_implementation": "sdpa",
    "logging_steps": 1,
    "save_strategy": "no",
    "plugins": [
        "course_tools.axolotl.cpu_ranks.CPURanks",
        "course_tools.axolotl.token_mean.TokenMean",
        "course_tools.axolotl.witness.Witness",
    ],
}
# Keys that the exercises may need, or that somebody may reach for. Axolotl has hundreds, and refuses none that it lacks.
KNOWN = """
    micro_batch_size gradient_accumulation_steps batch_size num_epochs max_steps learning_rate lr_scheduler warmup_steps
    warmup_ratio weight_decay optimizer adam_beta1 adam_beta2 adam_epsilon max_grad_norm sequence_len sample_packing
    pad_to_sequence_len shuffle_merged_datasets curriculum_sampling seed bf16 fp16 tf32 train_on_inputs group_by_length
    gradient_checkpointing deepspeed fsdp_version fsdp_config dp_shard_size dp_replicate_size tensor_parallel_size
    context_parallel_size eval_sample_packing dataloader_num_workers strict excess_length_strategy lr_scheduler_kwargs
""".split()


def read_yaml(value: Any, what: str) -> dict[str, Any]:
    """The mapping of a learner's YAML, given as text or as a dict.

    Raises:
        NotYet: nothing there, no YAML (with line and column), no mapping, or a key that is given already.
    """
    if value is None or value is ...:
        raise nothing(what)
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
            raise NotYet(f"{what} is no YAML: {where}{error.problem}") from None
    if value is None:
        raise NotYet(f"{what} is empty")
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise NotYet(f"{what} should be lines of `key: value`, and is {type(value).__name__}")
    given = [key for key in value if key in GIVEN and value[key] != GIVEN[key]]
    if given:
        raise NotYet(f"{what} sets {given[0]}, which is given: leave that line out")
    for key in value:
        if key not in KNOWN and key not in GIVEN:
            near = difflib.get_close_matches(key, KNOWN, 1, 0.85)
            if near:
                raise NotYet(
                    f"{what}: is {key} misspelt? Axolotl knows {near[0]}, and lets a key pass that it does not know"
                )
    return {key: item for key, item in value.items() if item is not None}


@functools.cache
def folder() -> Path:
    """The model and the texts, made once a session and removed at its end."""
    made = Path(tempfile.mkdtemp(prefix="lab07-axolotl-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    make_inputs(made, layers=2, hidden=32)
    (made / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()), encoding="utf-8")
    return made


@functools.cache
def texts() -> tuple[str, ...]:
    """Forty paragraphs of 41 to 89 letters."""
    paragraphs = (" ".join(text.split()) for text in english().split("\n\n"))
    return tuple(text for text in paragraphs if 40 < len(text) < 90)[:40]


def _fingerprint(config: Mapping[str, Any]) -> str:
    """A folder of its own for the prepared data of each YAML: Axolotl's own name for it does not tell shuffled from not."""
    return hashlib.sha256(repr(sorted(config.items(), key=str)).encode()).hexdigest()[:12]


def run(config: Mapping[str, Any], ranks: int, what: str) -> AxolotlRun:
    """Let Axolotl train. Raises NotYet where it refuses the YAML."""
    here = folder()
    paths = {
        "base_model": str(here / "tiny"),
        "datasets": [{**GIVEN["datasets"][0], "path": str(here / "texts.jsonl")}],
        "dataset_prepared_path": str(here / "prepared" / _fingerprint(config)),
        "output_dir": str(here / "out"),
    }
    try:
        with without_limit():
            return train(merged(GIVEN, config, paths), ranks=ranks, timeout=AXOLOTL_TIMEOUT)
    except RankFailed as failed:
        said = " ".join(failed.cause_message.split())[:400]
        raise NotYet(f"Axolotl does not run {what}: {failed.cause_type}: {said}") from failed
