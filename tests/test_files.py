"""Files are replaced whole or not at all; names are offered when one is mistyped."""

from __future__ import annotations

import os

import numpy as np
import pytest

from course_lib import files
from course_lib.validation import check_counts, did_you_mean, pick, positive


def test_the_new_content_replaces_the_old_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.txt"
    files.write_atomically(path, "old")
    path.chmod(0o640)
    files.write_atomically(path, "größer\r\n", durable=True)
    assert path.read_bytes() == "größer\r\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]


def test_permissions_can_be_given_and_a_new_file_has_them_from_the_start(tmp_path):
    path = tmp_path / "private.json"
    old = os.umask(0)
    try:
        files.write_atomically(path, "{}", mode=0o600)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write_atomically(path, b"old")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.txt"]


def test_names_are_offered():
    assert did_you_mean("Fsdp2", ["ddp", "fsdp", "zero-3"]) == ["fsdp"]
    assert did_you_mean("zero_3", ["ddp", "fsdp", "zero-3"]) == ["zero-3"]
    assert did_you_mean("qqq", ["ddp", "fsdp"]) == []
    with pytest.raises(ValueError, match="did you mean 'qlora'"):
        pick("method", "qlorra", ["full", "lora", "qlora"])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_what_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match="ranks=.*whole number of at least 1"):
        check_counts(ranks=value)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "2", None])
def test_what_is_no_positive_number_is_refused(value):
    with pytest.raises(ValueError, match="seconds=.*a number above 0"):
        positive(seconds=value)


def test_numpy_integers_are_counts():
    check_counts(ranks=np.int64(2))
