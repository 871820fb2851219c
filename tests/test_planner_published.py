"""Every published configuration: its figures as printed, found feasible, ranked, and its utilisation predicted."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from course_lib.memory import shape_of
from course_lib.parallel.grid import Grid
from course_tools.planning import check_settings, plan
from course_tools.planning.cases import CASES

TABLE = Path(__file__).parent / "published" / "closed_form.csv"
with TABLE.open(newline="", encoding="utf-8") as lines:
    ROWS = {
        row["id"]: (json.loads(row["inputs"]), float(row["expected"]))
        for row in csv.DictReader(lines)
        if row["kind"] in ("hardware_util", "mfu", "mfu_from_tflops", "hw_util")
    }
NAMES = {
    "kor_mfu_22B": "korthikanti-22b",
    "kor_mfu_175B": "korthikanti-175b",
    "kor_mfu_530B": "korthikanti-530b",
    "kor_mfu_1T": "korthikanti-1t",
    "mega_util_1008.0": "megatron-1008b",
    "fsdp_175b_b1": "fsdp-175b-1",
    "fsdp_175b_b2": "fsdp-175b-2",
}


FITTING = ("Nothing is wrong", "4 = 4, and there are 8 GPUs, so half of them", "= 16 GPUs are needed, and there are 8")


def case_of(row: str):
    name = NAMES.get(row) or row.replace("mega_util_", "megatron-").replace("llama3_405b_", "llama-3-").replace(
        "_", "-"
    )
    return CASES[name if name in CASES else f"{name}b"]


@pytest.mark.parametrize("row", ROWS)
def test_a_case_asks_what_the_published_row_says(row: str) -> None:
    given, printed = ROWS[row]
    case = case_of(row)
    assert case.percent == printed
    if "gpus" in given and not isinstance(given["gpus"], str):
        assert case.question().machines.gpus == given["gpus"] == case.grid.size
        assert (case.grid.tp, case.grid.pp, case.seq_len) == (given["tp"], given["pp"], given["seq"])
    if "hidden" in given:
        shape = shape_of(case.model)
        assert (shape.layers, shape.hidden, shape.heads, shape.vocab) == tuple(
            given[name] for name in ("layers", "hidden", "heads", "vocab")
        )
        assert case.global_batch == given["global_batch"]
    if "batch_per_dp" in given:
        assert (case.grid.dp, case.grid.cp) == (given["dp"], given["cp"])
        assert case.global_batch == given["dp"] * given["batch_per_dp"]
    if "micro_batch" in given:
        assert case.fixed["micro_batch_size"] == given["micro_batch"]
    assert case.question().machines.card.peak_flops == given["peak_tflops"] * 1e12


@pytest.mark.parametrize("name", CASES)
def test_a_published_grid_fits_and_is_among_the_first_ten(name: str, record_property) -> None:
    case = CASES[name]
    ours = case.predicted()
    assert ours.grid == case.grid and ours.memory_bytes <= ours.machines.card.memory
    answer = plan(
        case.model, case.machines, global_batch=case.global_batch, seq_len=case.seq_len, keep=10, **case.asked
    )
    rank = answer.rank(case.grid)
    record_property("rank", rank)
    assert rank is not None and rank <= 10, f"{name} is not among {answer.grids}"
    if case.percent is not None:
        residual = case.percent_of(ours) - case.percent
        record_property("residual, points", round(residual, 1))
        # 8 points are asked for; a change of the model that loses more than this wants a look
        assert abs(residual) <= 6


def test_one_grid_is_all_that_data_parallelism_has_so_its_strategies_are_what_counts() -> None:
    case = CASES["70b-lora"]
    answer = plan(case.model, case.machines, global_batch=case.global_batch, seq_len=case.seq_len, **case.asked)
    assert answer.best.strategy == "fsdp" and {found.strategy for found in answer.plans} == {"fsdp", "zero3"}
    assert {one.settings.strategy for one in answer.refused} == {"ddp", "zero1", "zero2"}
    assert {answer.best.precision, case.predicted().precision} == {"fp16-mixed"}, "a V100 has no bf16"
    full = CASES["14b-zero3"]
    first = plan(full.model, full.machines, global_batch=16, seq_len=2048, methods="full", offload="none", axes="dp")
    assert {found.strategy for found in first.plans} == {"zero3", "fsdp"}


def test_the_talks_175b_row_takes_half_of_its_cards() -> None:
    row = {"global_batch": 1536, "seq_len": 2048, "strategy": "zero1", "dp": 2, "pp": 49, "tp": 2}
    verdict = check_settings("gpt3-175b", "49x8xa100-40gb", **row)
    assert verdict.fits and len(verdict.wrong) == 1
    assert "49 x 2 x 2 = 196, and there are 392 GPUs, so half of them would have nothing to do" in verdict.wrong[0]
    # the repository of those who trained it has TP 4 in the name of the script
    assert {found.grid for found in verdict.would} == {Grid(dp=2, tp=4, pp=49), Grid(dp=4, tp=2, pp=49)}
    assert all(found.gpus == 392 and found.memory_bytes <= 40 * 2**30 for found in verdict.would)
    assert "PP 49 x DP 2 x TP 4" in str(verdict)
    assert not check_settings("gpt3-175b", "49x8xa100-40gb", **row | {"tp": 4}).wrong


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "Nothing is wrong"),
        ({"dp": 4}, "4 = 4, and there are 8 GPUs, so half of them"),
        ({"dp": 16}, "= 16 GPUs are needed, and there are 8"),
        ({"tp": 3, "dp": 1}, "32 attention heads do not divide over 3"),
        ({"tp": 16, "dp": 1}, "leaves the node of 8 GPUs"),
        ({"pp": 64, "dp": 1}, "32 layers, too few for PP 64"),
        ({"dp": 5}, "global_batch=64 does not divide by DP 5"),
        ({"dp": 4, "pp": 2, "strategy": "zero3"}, "DeepSpeed's pipeline takes no zero3"),
        ({"dp": 4, "pp": 2, "offload": "optimizer"}, "takes no offload='optimizer'"),
        ({"strategy": "single"}, "for one data-parallel rank"),
        ({"dp": 1, "tp": 8}, "take strategy='single'"),
        ({"method": "qlora", "tp": 2, "dp": 4}, "keeps each quantized matrix in one piece"),
        ({"cp": 3, "dp": 1}, "does not divide by CP 3"),
    ],
)
def test_a_configuration_is_told_what_is_wrong_with_it(changed, says) -> None:
    row = {"global_batch": 64, "seq_len": 2048, "strategy": "zero1", "dp": 8} | changed
    verdict = check_settings("llama-3.1-8b", "8x80GiB", **row)
    assert says in str(verdict) and verdict.fits is (says in FITTING)


def test_what_does_not_fit_is_told_by_how_much_and_what_would() -> None:
    verdict = check_settings("llama-3.1-8b", "2x24GiB", global_batch=16, seq_len=2048, strategy="ddp", dp=2)
    assert "It does not fit, by 152.2 GiB" in str(verdict) and not verdict.fits and verdict.plan is None
    assert verdict.would and all(found.memory_bytes <= 24 * 2**30 for found in verdict.would)
    assert "What would do: full training by ZeRO" in str(verdict)


def test_bad_settings_are_bad_input() -> None:
    row = {"global_batch": 64, "seq_len": 2048, "strategy": "zero1", "dp": 8}
    for changed, says in (
        ({"strategy": "zero4"}, "strategy='zero4'"),
        ({"dp": 0}, "dp=0"),
        ({"micro_batch_size": 3}, "micro_batch_size=3: a rank has 8 sequences"),
        ({"virtual_stages": 2}, "virtual stages must divide"),
        ({"colour": 1}, "no choice"),
    ):
        with pytest.raises(ValueError, match=says):
            check_settings("llama-3.1-8b", "8xa100-80gb", **row | changed)
