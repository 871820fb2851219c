"""Lesson 2's figures: drawn, small, described by the numbers that were given, and refused where there is nothing."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from course_lib.figures import single_gpu

ROW = dict(technique="full", weights=2**20, gradients=2**20, optimizer=2**21, activations=2**19, peak=5 * 2**20)
STATE = np.abs(np.random.default_rng(0).normal(size=512)) * 1e-6
STATE[300] = 1e-2

PICTURES = {
    "memory": (
        lambda: single_gpu.memory_by_technique([ROW, ROW | dict(technique="lora", predicted=2**20)]),
        "lora 5 MiB",
    ),
    "gradients": (
        lambda: single_gpu.gradient_window({"plain": [2.0**-30, 1.0, 0.0], "scaled": [2.0**-14, 2.0**16]}),
        "plain: 50.0 % below fp16's smallest number; scaled: 0.0 %",
    ),
    "state": (
        lambda: single_gpu.blockwise_state(STATE, {"flat": STATE * (STATE > 1e-4)}, block=256, title="A state"),
        f"flat: {100 * 511 / 512:.1f} % became 0",
    ),
    "levels": (
        lambda: single_gpu.four_bit_levels(np.linspace(-1, 1, 64), {"even": np.linspace(-1, 1, 16)}),
        "-1.00, -0.87",
    ),
    "learning": (
        lambda: single_gpu.learning({"lora": [3, 2]}, {"lora": (3, 1.5)}, title="T"),
        "lora from 3.00 to 1.50",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_not_blank_and_says_its_numbers(name):
    draw, said = PICTURES[name]
    image = draw()
    assert said in image.alt
    assert len(image.data) < 60_000
    pixels = np.asarray(Image.open(io.BytesIO(image.data)).convert("L"))
    assert pixels.std() > 10


def test_nothing_to_draw_is_a_sentence():
    for call in (
        lambda: single_gpu.memory_by_technique([]),
        lambda: single_gpu.gradient_window({}),
        lambda: single_gpu.gradient_window({"zeros": [0.0]}),
        lambda: single_gpu.blockwise_state(STATE, {"short": STATE[:5]}, block=256, title="A state"),
        lambda: single_gpu.learning({"a": [1]}, {}, title="T"),
    ):
        with pytest.raises(ValueError, match=r"[.:]"):
            call()
