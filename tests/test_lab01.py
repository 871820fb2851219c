"""Lab 1's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import functools
import math

import pytest
import torch
from planted import lab01 as planted
from planted.contract import Contract

from course_checks.lab01 import LADDER, MACHINES, activations, choosing, lab, measured, mending, states
from course_checks.lab01.common import NO_SLIP
from course_checks.lab01.published import PARAMETERS, ZERO_TABLE_1, last_digit
from course_lib.memory import PRESETS


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first model imports transformers, the first optimizer much of PyTorch; a check's time is taken warm."""
    measured.step_peak(1, (16, 2, 1, 8, 32), 32, 1, 8)


class TestChecks(Contract):
    lab, planted = lab, planted


def test_a_partial_and_numpy_numbers_are_as_good_as_a_function_and_ints():
    numpy = pytest.importorskip("numpy")
    assert lab.worst_moment(functools.partial(planted.right_moments)).status == "passed"
    assert lab.count_parameters(lambda *widths: numpy.int64(planted.right_count(*widths))).status == "passed"
    assert lab.logit_peak(lambda *case: numpy.float64(planted.right_logits(*case))).status == "passed"
    not_a_number = lab.logit_peak(lambda *case: math.nan)
    assert "is nan" in not_a_number.message


@pytest.mark.parametrize(("rows", "length", "widths", "attention"), activations.CASES)
def test_the_courses_own_form_is_what_the_hooks_count(rows, length, widths, attention):
    case = activations.Case(rows, length, widths, attention)
    assert activations.kept(case, NO_SLIP) == measured.block_activations(*case)


@pytest.mark.parametrize("case", mending.CASES)
def test_the_mended_form_is_near_a_real_step(case):
    assert mending.peak(case, NO_SLIP) == pytest.approx(measured.step_peak(*case), rel=0.03)


def test_measuring_leaves_threads_and_random_numbers_alone():
    torch.manual_seed(3)
    wanted, threads = torch.rand(1), torch.get_num_threads()
    torch.manual_seed(3)
    measured.block_activations(1, 8, (16, 2, 1, 8, 32), "flash")
    measured.step_peak(1, (16, 2, 1, 8, 32), 32, 1, 8)
    assert torch.equal(torch.rand(1), wanted) and torch.get_num_threads() == threads


def test_published_counts_are_those_of_the_presets():
    shapes = {
        "Llama-2-7B": "llama-2-7b",
        "Llama-2-13B": "llama-2-13b",
        "Llama-3.1-8B": "llama-3.1-8b",
        "Llama-3.1-70B": "llama-3.1-70b",
        "Llama-3.2-1B": "llama-3.2-1b",
        "SmolLM2-135M": "smollm2-135m",
    }
    for name, preset in shapes.items():
        widths, published = PARAMETERS[name]
        shape = PRESETS[preset]
        assert (
            shape.layers,
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.intermediate,
            shape.vocab,
            shape.tied,
        ) == widths
        assert shape.parameters == published


def test_the_table_of_the_paper_is_its_formula():
    for (billions, ranks), row in ZERO_TABLE_1.items():
        for stage, printed in enumerate(row, 1):
            exact = states.share((int(billions * 1e9), ranks, stage, (2, 2, 12)), NO_SLIP) / 1e9
            assert abs(exact - float(printed)) <= max(0.003 * float(printed), last_digit(printed))


def test_no_two_machines_of_the_lab_ask_the_same_and_one_fits_nothing():
    found = [choosing.first_that_fits(machine) for machine in [*MACHINES, *choosing.MORE]]
    methods = {(one["method"], one["activation_checkpointing"], one["strategy"]) for one in found if one}
    assert len(methods) >= 7 and found.count(None) == 1
    assert len(LADDER) == 8
