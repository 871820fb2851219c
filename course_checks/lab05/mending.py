"""Lab 5, exercise 7: a DeepSpeed configuration with mistakes in it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, close, in_bytes, returned, run_ranks
from course_checks.lab05 import on_ranks
from course_checks.lab05.common import lab
from course_checks.lab05.config import Config, batch_sizes, check_config

RANKS, TIMEOUT = 2, 60.0  # seconds: DeepSpeed is imported on each rank
GLOBAL_BATCH, MICRO_BATCH, ACCUMULATE, LR = 8, 2, 2, 1e-3

COLLEAGUES: Config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_cliping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {
        "stage": 4,
        "reduce_bucket_size": 200_000,
        "allgather_bucket_size": 200_000,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


@lab.exercise("A configuration, mended", importance=4, difficulty=2, minutes=15, keeps_inputs=False)
def mended_config(mend: Callable[..., Any]) -> str:
    """DeepSpeed runs it on two ranks, and it is the training that was asked for: stage 2, the optimizer on the host."""
    given = copy.deepcopy(COLLEAGUES)
    config = returned(mend(given), dict, "the mended configuration")
    try:
        text = json.dumps(config)
    except (TypeError, ValueError) as error:
        raise NotYet(f"that cannot be written as JSON: {error}") from error
    _as_asked(json.loads(text))
    told = run_ranks(on_ranks.train_by_config, config, ranks=RANKS, timeout=TIMEOUT)
    first = told.results[0]
    assert (first["wrapper"], first["stage"]) == ("DeepSpeedEngine", 2), "check_config has let something else pass"
    close(first["losses"], first["expected"], rtol=1e-4, what="the losses of two steps by your configuration")
    host, weights = first["on_host"], first["weights"]
    return (
        f"{first['wrapper']}, stage 2 on {RANKS} ranks: of {in_bytes(8 * weights)} of Adam's moments each rank has "
        f"{in_bytes(host['optimizer_state'])} on the host and {in_bytes(first['resident']['optimizer_state'])} on its device; "
        "the losses are one rank's on the whole batch"
    )


def _as_asked(config: Config) -> None:
    """Raise NotYet for a configuration that DeepSpeed refuses, or that is another training than the recipe's."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise NotYet('"zero_optimization" is gone: without it DeepSpeed runs plain data parallelism')
    if "gradient_cliping" in config:
        raise NotYet(
            "one slip is still in there that no error will ever tell: DeepSpeed reads past a key that it does not know. Read "
            "every key at the top aloud"
        )
    try:
        check_config(config, ranks=RANKS)
    except ValueError as error:
        raise NotYet(f"on {RANKS} ranks: {error}") from error
    sizes = batch_sizes(config, ranks=RANKS)
    if sizes != (GLOBAL_BATCH, MICRO_BATCH, ACCUMULATE):
        raise NotYet(
            f"the batch sizes agree, and are another training's: a step of {sizes[0]} sequences, {sizes[1]} at a time on a rank, "
            f"{sizes[2]} times; the recipe has {GLOBAL_BATCH}, {MICRO_BATCH} and {ACCUMULATE}"
        )
    if config.get("gradient_clipping") != 0.0:
        have = config.get("gradient_clipping", "left out, and DeepSpeed's own default is 1.0")
        raise NotYet(f"the recipe clips no gradients, which is 0.0; gradient_clipping is {have}")
    if (stage := zero.get("stage", 0)) != 2:
        why = (
            "weights would be shared out, too, and gathered again for every use"
            if stage == 3
            else "gradients stay whole"
        )
        raise NotYet(
            f"stage {stage} is not what was asked for: {why if stage in (1, 3) else 'nothing is shared out'}; the recipe "
            "shares out states and gradients"
        )
    if (zero.get("offload_optimizer") or {}).get("device") != "cpu":
        raise NotYet(
            "the optimizer's states are no longer on the host: offload_optimizer was right, offload_param was the slip"
        )
    optimizer = config.get("optimizer") or {}
    kind, lr = str(optimizer.get("type")), (optimizer.get("params") or {}).get("lr")
    if kind.lower() != "adamw" or lr != LR:
        raise NotYet(f"the optimizer is {kind} with lr {lr}; the recipe has AdamW with {LR}")
