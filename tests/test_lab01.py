"""Lab 1: its checks against the planted answers, what they leave alone, and its machines."""

import torch
from planted import lab01 as planted
from planted.contract import Contract

from course_checks.lab01 import LADDER, MACHINES, choosing, lab, measured

SMALL = (16, 2, 1, 8, 32)  # widths of a block


class TestChecks(Contract):
    lab, planted = lab, planted
    on_ranks = False


def test_measuring_leaves_threads_and_random_numbers_alone():
    torch.manual_seed(3)
    expected, threads = torch.rand(1), torch.get_num_threads()
    torch.manual_seed(3)
    measured.block_activations(1, 8, SMALL, "flash")
    measured.step_peak(1, SMALL, 32, 1, 8)
    assert torch.equal(torch.rand(1), expected) and torch.get_num_threads() == threads


def test_no_two_machines_of_the_lab_ask_the_same_and_one_fits_nothing():
    rungs = [choosing.first_that_fits(machine) for machine in [*MACHINES, *choosing.MORE]]
    methods = {(rung["method"], rung["activation_checkpointing"], rung["strategy"]) for rung in rungs if rung}
    assert len(methods) >= 7 and rungs.count(None) == 1
    assert len(LADDER) == 8
