"""The rule for spikes: what it tells, what it lets pass, and how often it cries wolf."""

from __future__ import annotations

import json
import math
import random

import pytest
from refusals import assert_refused

from course_lib.training.resumable.spikes import SpikeDetector


def fed(losses):
    detector = SpikeDetector()
    return detector, [detector.update(step, loss) for step, loss in enumerate(losses)]


def laplace(rng, scale):
    return rng.choice((-1, 1)) * rng.expovariate(1 / scale)


def test_false_alarms_are_as_rare_as_documented():
    for name, noise, least, most in (
        ("normal, 1 % of the loss", lambda rng, step: rng.gauss(3, 0.03), 0, 0),
        ("normal, 5 %", lambda rng, step: rng.gauss(3, 0.15), 0, 0),
        ("normal, 20 %", lambda rng, step: rng.gauss(3, 0.6), 0, 0),
        ("falling from 11 to 3", lambda rng, step: rng.gauss(3 + 8 * math.exp(-step / 200), 0.15), 0, 0),
        ("heavy tails, 5 %", lambda rng, step: 3 + laplace(rng, 0.15), 5, 40),  # about 1 in 1,000
    ):
        rng = random.Random(0)
        _, verdicts = fed(noise(rng, step) for step in range(20_000))
        assert least <= sum(not verdict.ok for verdict in verdicts) <= most, name


def test_a_spike_is_told_and_stays_out_of_the_window():
    rng = random.Random(1)
    losses = [rng.gauss(3, 0.05) for _ in range(40)]
    losses[30:33] = [6.0, 6.1, 6.2]
    detector, verdicts = fed(losses)
    assert [step for step, verdict in enumerate(verdicts) if not verdict.ok] == [30, 31, 32]
    assert [verdict.in_a_row for verdict in verdicts[29:34]] == [0, 1, 2, 3, 0]
    assert verdicts[30].kind == "spike" and "step 30" in verdicts[30].reason and max(detector.losses) < 4


def test_only_a_real_rise_is_a_spike_and_the_grace_covers_no_nan():
    detector, _ = fed([3.0] * 20)
    assert detector.limit == pytest.approx(3 * 1.16)  # threshold x floor
    assert detector.update(20, 3.4).ok and detector.update(21, 0.1).ok and not detector.update(22, 3.6).ok
    detector, verdicts = fed([5.0, 50.0, 5.0, math.nan, math.inf, 5.0])
    assert [verdict.kind for verdict in verdicts] == ["ok", "ok", "ok", "nan", "nan", "ok"]
    assert detector.limit == math.inf and detector.update(6, 5.0, math.inf).kind == "nan"


def test_a_gradient_norm_tells_what_a_loss_does_not():
    detector = SpikeDetector()
    assert all(detector.update(step, 3.0, 1.0).ok for step in range(10))
    assert detector.update(10, 3.0, 9.0).ok
    verdict = detector.update(11, 3.0, 10.5)
    assert verdict.kind == "spike" and "gradient norm" in verdict.reason
    assert 10.5 not in detector.norms and len(detector.losses) == 11


def test_it_goes_on_after_a_resume_as_if_nothing_had_happened():
    rng = random.Random(2)
    undisturbed, resumed = SpikeDetector(), SpikeDetector()
    for step in range(400):
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = SpikeDetector()
        resumed.load_state_dict(state)
        loss, norm = 3 + laplace(rng, 0.3), abs(laplace(rng, 1.0))
        assert resumed.update(step, loss, norm) == undisturbed.update(step, loss, norm), f"step {step}"


def test_settings_that_cannot_be_are_refused():
    wrong = {"window": 3, "grace": 33, "threshold": 0.0, "floor": math.nan, "norm_factor": 1.0}
    assert_refused(
        (lambda name=name, value=value: SpikeDetector(**{name: value}), ValueError, f"{name}={value}")
        for name, value in wrong.items()
    )
