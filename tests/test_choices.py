"""What the whole library shares: the table of choices, checks of arguments, and files that are replaced whole."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
from refusals import assert_refused

from course_lib import files
from course_lib.choices import (
    CHOICES,
    Widths,
    check_choice,
    check_combination,
    check_schedule,
    tensor_parallel_degrees,
    why_not,
    why_not_tensor_parallel,
)
from course_lib.validation import check_counts, did_you_mean, pick, positive

TINY = Widths(heads=4, kv_heads=2, intermediate=352, vocab=256)


def test_what_does_not_go_together_is_refused() -> None:
    rows = [
        ({"strategy": "fsdp", "offload": "optimizer"}, "FSDP2"),
        ({"strategy": "ddp", "offload": "optimizer", "ranks": 2}, "ddp cannot"),
        ({"strategy": "zero2", "offload": "all", "ranks": 2}, "zero2 cannot"),
        ({"strategy": "fsdp", "offload": "all", "optimizer": "adamw8bit"}, "adamw8bit"),
        ({"strategy": "zero2", "offload": "optimizer", "optimizer": "adamw_bf16"}, "adamw_bf16"),
        ({"strategy": "fsdp", "offload": "all", "optimizer": "muon"}, "on the GPU"),
        ({"strategy": "zero1", "optimizer": "muon"}, "flat shares"),
        ({"ranks": 2}, "strategy='single'"),
        ({"strategy": "zero3", "pp": 4}, "takes no zero3"),
        ({"strategy": "zero1", "offload": "optimizer", "pp": 4}, "offload='optimizer'"),
        ({"strategy": "fsdp", "optimizer": "paged_adamw8bit"}, "DTensors"),
        ({"method": "qlora", "tp": 2}, "bitsandbytes"),
    ]
    assert_refused((partial(check_combination, **choices), ValueError, fragment) for choices, fragment in rows)
    assert not why_not(optimizer="muon", strategy="fsdp") and not why_not(optimizer="adamw_bf16", strategy="zero3")
    assert not why_not(strategy="zero1", offload="optimizer", optimizer="adamw8bit")
    assert not why_not(strategy="zero1", pp=4, ranks=2) and not why_not(strategy="fsdp", offload="all", ranks=2)


def test_every_choice_is_checked_and_the_nearest_is_offered() -> None:
    for name, values in CHOICES.items():
        for value in values:
            check_choice(name, value)
        assert_refused([(partial(check_choice, name, values[0] + "x"), ValueError, f"{name}='{values[0]}x'")])
    assert_refused(
        [
            (partial(check_choice, "precision", "nf4"), ValueError, "qlora"),
            (partial(pick, "method", "qlorra", ["full", "lora", "qlora"]), ValueError, "'qlora'"),
        ]
    )
    assert did_you_mean("Fsdp2", ["ddp", "fsdp", "zero-3"]) == ["fsdp"]
    assert did_you_mean("zero_3", ["ddp", "fsdp", "zero-3"]) == ["zero-3"]
    assert did_you_mean("qqq", ["ddp", "fsdp"]) == []


def test_tensor_parallelism_needs_equal_parts() -> None:
    assert tensor_parallel_degrees(TINY) == [1, 2]
    assert not why_not_tensor_parallel(TINY, 2) and "2 kv heads" in why_not_tensor_parallel(TINY, 4)
    assert "4 kv heads" in why_not_tensor_parallel(Widths(28, 4, 18944, 152064), 7)
    assert "32,001" in why_not_tensor_parallel(Widths(12, 12, 48, 32_000), 3)  # the vocabulary, padded
    assert_refused([(partial(why_not_tensor_parallel, TINY, 0), ValueError, "tp=0")])


def test_schedules_and_their_numbers() -> None:
    check_schedule("1f1b", 4, 3)
    check_schedule("interleaved", 4, 8, 2)
    assert_refused(
        [
            (partial(check_schedule, "interleave", 4, 8, 2), ValueError, "'interleaved'"),
            (partial(check_schedule, "interleaved", 4, 8, 1), ValueError, "virtual_stages=1"),
            (partial(check_schedule, "interleaved", 4, 6, 2), ValueError, "num_microbatches=6"),
            (partial(check_schedule, "gpipe", 4, 8, 2), ValueError, "virtual_stages=2"),
            (partial(check_schedule, "1f1b", 0, 8, 1), ValueError, "stages=0"),
        ]
    )


def test_what_is_no_count_or_no_positive_number_is_refused() -> None:
    check_counts(ranks=np.int64(2))
    positive(seconds=np.float32(0.5))
    assert_refused((partial(check_counts, ranks=bad), ValueError, "ranks=") for bad in (0, 1.5, True, "2", None))
    assert_refused(
        (partial(positive, seconds=bad), ValueError, "seconds=")
        for bad in (0, -1.0, float("inf"), float("nan"), True, "2")
    )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path, private = tmp_path / "a.txt", tmp_path / "private.json"
    files.write_atomically(path, "old")
    path.chmod(0o640)
    files.write_atomically(path, "größer\r\n", durable=True)
    assert path.read_bytes() == "größer\r\n".encode() and path.stat().st_mode & 0o777 == 0o640
    files.write_atomically(private, "{}", mode=0o600)
    assert private.stat().st_mode & 0o777 == 0o600

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == "größer\r\n".encode() and sorted(os.listdir(tmp_path)) == ["a.txt", "private.json"]
