"""Lab 5: its checks against the planted answers, and what they measure memory with."""

import torch
from planted import lab05 as planted
from planted.contract import Contract

from course_checks.harness import tensors
from course_checks.lab05 import lab, machines


class TestChecks(Contract):
    lab, planted = lab, planted


def test_what_is_alive_counts_wherever_it_hides():
    before = tensors.live_bytes()
    weight = torch.nn.Parameter(torch.zeros(500))
    weight.sum().backward()  # a gradient that no line of Python has seen
    hidden = [{"somewhere": (torch.zeros(1000)[:10],)}]
    assert tensors.live_bytes() - before == 2000 + 2000 + 4000
    assert tensors.bytes_behind_views([], 4000) == 4000
    del hidden, weight
    assert tensors.settled_bytes(before) == before


def test_a_setting_needs_what_the_paper_says_at_rest():
    """Stage 3 over stage 1 saves the weights' and gradients' shares; offloading lies in the host, not on the card."""
    machine = machines.MACHINES[0]
    by_setting = {setting: machines.gpu_bytes(machine, setting) for setting in machines.SETTINGS}
    assert by_setting[3, "none"] < by_setting[2, "none"] < by_setting[1, "none"]
    assert by_setting[2, "optimizer"] < by_setting[2, "none"]
    assert machines.host_bytes(machine, (2, "none")) == 0
    assert machines.host_bytes(machine, (3, "all")) > machines.host_bytes(machine, (3, "optimizer")) > 0
