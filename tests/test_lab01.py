"""Lab 1: what its checks leave alone."""

import mutants
import torch

from course_checks.lab01 import lab, measured, timelines


def test_a_stub_is_not_attempted() -> None:
    def stub(*_):
        raise NotImplementedError

    assert {getattr(lab, name)(stub).status for name in lab.exercises} == {"not attempted"}


def test_measuring_leaves_threads_and_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected, threads = torch.rand(1), torch.get_num_threads()
    torch.manual_seed(3)
    for cached in (measured.step_peak, timelines.crash, timelines.cured):
        cached.cache_clear()
    measured.step_peak(1, (16, 2, 1, 32), 32, 1, 8)
    timelines.crash("B")
    timelines.cured("B", "update each weight inside backward")
    mutants.judged(lab, "count_step", mutants.solution(lab)[1]["count_step"])
    assert torch.equal(torch.rand(1), expected) and torch.get_num_threads() == threads and torch.backends.mkldnn.enabled


def test_a_cure_trains_as_the_script_does() -> None:
    """Which changes a run's memory, must not change what it learns."""
    weights = {}
    for cure in ("", *timelines.CURES):
        torch.manual_seed(0)
        model, train = timelines.script_of("C", cure, steps=3)
        train()
        weights[cure] = torch.cat([p.detach().flatten() for p in model.parameters()])
    for cure, each in weights.items():
        assert (each - weights[""]).abs().max() < 1e-4, cure
