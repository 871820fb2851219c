"""Lab 5: what its checks measure memory with, and the machines to choose for."""

import torch

from course_checks.harness import tensors
from course_checks.lab05 import choosing


def test_what_is_alive_counts_wherever_it_hides() -> None:
    before = tensors.live_bytes()
    weight = torch.nn.Parameter(torch.zeros(500))
    weight.sum().backward()  # a gradient that no line of Python has seen
    hidden = [{"somewhere": (torch.zeros(1000)[:10],)}]
    assert tensors.live_bytes() - before == 2000 + 2000 + 4000
    del hidden, weight
    assert tensors.settled_bytes(before) == before


def test_the_machines_differ_in_their_answers() -> None:
    assert len({setting for setting, _ in map(choosing.answer, choosing.MACHINES)}) == len(choosing.MACHINES)
    tight, impossible = choosing.TIGHT
    assert choosing.fits(tight, (3, "none")) and not choosing.fits(tight, (2, "optimizer"))
    assert choosing.answer(impossible) is None
