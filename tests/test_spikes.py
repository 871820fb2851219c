"""The rule for spikes: what it tells, what it lets pass, and how often it cries wolf."""

from __future__ import annotations

import json
import math
import random

import pytest

from course_lib.training.resumable.spikes import SpikeDetector

STEPS = 20_000


def fed(losses, **how):
    detector = SpikeDetector(**how)
    return detector, [detector.update(step, loss) for step, loss in enumerate(losses)]


def laplace(rng, scale):
    return rng.choice((-1, 1)) * rng.expovariate(1 / scale)


@pytest.mark.parametrize(
    ("name", "noise", "alarms"),
    [
        ("normal, 1% of the loss", lambda rng, step: rng.gauss(3, 0.03), (0, 0)),
        ("normal, 5%", lambda rng, step: rng.gauss(3, 0.15), (0, 0)),
        ("normal, 20%", lambda rng, step: rng.gauss(3, 0.6), (0, 0)),
        ("falling from 11 to 3", lambda rng, step: rng.gauss(3 + 8 * math.exp(-step / 200), 0.15), (0, 0)),
        ("heavy tails, 5%", lambda rng, step: 3 + laplace(rng, 0.15), (5, 40)),  # about 1 in 1,000, as documented
    ],
)
def test_false_alarms_are_as_rare_as_told(name, noise, alarms):
    rng = random.Random(0)
    _, verdicts = fed(noise(rng, step) for step in range(STEPS))
    assert alarms[0] <= sum(not verdict.ok for verdict in verdicts) <= alarms[1], name


def test_a_spike_is_told_and_stays_out_of_the_window():
    rng = random.Random(1)
    losses = [rng.gauss(3, 0.05) for _ in range(40)]
    losses[30:33] = [6.0, 6.1, 6.2]
    detector, verdicts = fed(losses)
    assert [step for step, verdict in enumerate(verdicts) if not verdict.ok] == [30, 31, 32]
    assert [verdict.in_a_row for verdict in verdicts[29:34]] == [0, 1, 2, 3, 0]
    assert verdicts[30].kind == "spike" and max(detector.losses) < 4
    assert verdicts[30].reason.startswith("step 30: the loss 6 is above 3.") and "the median of the last 30" in (
        verdicts[30].reason
    )


def test_only_a_rise_is_a_spike_and_nearly_equal_losses_need_a_real_one():
    detector, _ = fed([3.0] * 20)
    assert detector.limit == pytest.approx(3 * 1.16)  # threshold x floor
    assert detector.update(20, 3.4).ok and detector.update(21, 0.1).ok and not detector.update(22, 3.6).ok


def test_the_grace_covers_a_rise_but_no_nan():
    detector, verdicts = fed([5.0, 50.0, 5.0, math.nan, math.inf, 5.0])
    assert [verdict.kind for verdict in verdicts] == ["ok", "ok", "ok", "nan", "nan", "ok"]
    assert verdicts[3].reason == "step 3: the loss is nan." and verdicts[4].in_a_row == 2
    assert detector.limit == math.inf
    assert detector.update(6, 5.0, math.inf).kind == "nan"


def test_a_gradient_norm_tells_what_a_loss_does_not():
    detector = SpikeDetector()
    assert all(detector.update(step, 3.0, 1.0).ok for step in range(10))
    assert detector.update(10, 3.0, 9.0).ok
    verdict = detector.update(11, 3.0, 10.5)
    assert verdict.kind == "spike" and "the gradient norm 10.5 is above 10" in verdict.reason
    assert 10.5 not in detector.norms and len(detector.losses) == 11


def test_it_goes_on_after_a_resume_as_if_nothing_had_happened():
    rng = random.Random(2)
    losses = [3 + laplace(rng, 0.3) for _ in range(400)]
    norms = [abs(laplace(rng, 1.0)) for _ in range(400)]
    one, other = SpikeDetector(), SpikeDetector()
    told = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        if step % 7 == 0:
            state = json.loads(json.dumps(other.state_dict()))
            other = SpikeDetector()
            other.load_state_dict(state)
        told.append(one.update(step, loss, norm))
        assert other.update(step, loss, norm) == told[-1]
    assert {verdict.kind for verdict in told} == {"ok", "spike"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (dict(window=3), "window=3: give at least 4 losses"),
        (dict(grace=33), "grace=33: give 1 to window=32 losses"),
        (dict(threshold=0.0), "threshold=0.0: give a number above 0"),
        (dict(floor=math.nan), "floor=nan: give a number above 0"),
        (dict(norm_factor=1.0), "norm_factor=1.0: give a number above 1"),
    ],
)
def test_wrong_settings(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        SpikeDetector(**wrong)
