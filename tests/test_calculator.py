"""The calculator moves with its menus, says its verdict, and answers what `estimate` answers."""

import pytest

from course_lib.memory import CARDS, estimate
from course_lib.notebook.widgets.calculator import START, answer, calculator


def controls(widget):
    return {control.description: control for column in widget.children[0].children for control in column.children}


def test_answer_is_the_estimate():
    setting = {name: value for name, value in START.items() if name != "card"}
    need, words = answer(card_name="t4", **(setting | {"gpus": 1, "method": "qlora"}))
    assert need == estimate("llama-3.1-8b", method="qlora", precision="fp16-mixed")  # a T4 has no bf16
    assert need.fits(CARDS["t4"].memory) is False and "does not fit" in words


def test_a_slider_redraws_picture_and_words():
    widget = calculator()
    words, _, picture = widget.children[1].value.partition("<img alt='")
    controls(widget)["tokens each"].value = 16384
    words_now, _, picture_now = widget.children[1].value.partition("<img alt='")
    assert words_now != words and picture_now != picture
    assert "data:image/png;base64,iVBOR" in picture_now and "peak" in picture_now


def test_one_gpu_shares_with_nobody():
    widget = calculator(gpus=1)
    assert controls(widget)["shared by"].disabled
    controls(widget)["GPUs"].value = 8
    assert not controls(widget)["shared by"].disabled


def test_start_can_be_chosen_and_a_wrong_name_is_told():
    assert "smollm2-135m" in calculator(model="smollm2-135m").children[1].value
    with pytest.raises(ValueError, match="no 'gpu'"):
        calculator(gpu=2)
