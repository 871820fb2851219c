"""Lab 2's checks: planted wrong answers get their words, right answers written another way pass, a stub is no try."""

import functools
import warnings

import pytest
import torch
from planted import lab02 as planted
from planted.contract import Contract

from course_checks.lab02 import eight_bits, lab, nf4_reference


@pytest.fixture(scope="module", autouse=True)
def warm_optimizer():
    """The first optimizer of a session imports much of PyTorch; a check's time is taken warm."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


class TestChecks(Contract):
    lab, planted = lab, planted

    def judged(self, name, answer):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning would stand in the learner's notebook
            return super().judged(name, answer)


def test_a_check_gives_the_threads_back():
    before = torch.get_num_threads()
    lab.merge(planted.right_merge)
    assert torch.get_num_threads() == before


def test_a_partial_is_as_good_as_a_function():
    assert lab.choose_checkpointing(functools.partial(planted.right_choice)).status == "passed"


def test_our_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs = functional.dequantize_4bit(packed, state)
    ours = nf4_reference.there_and_back(weight)
    assert torch.allclose(nf4_reference.NF4, state.code, atol=1e-6)
    errors = [(back - weight).abs().mean().item() for back in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=2e-3)
    assert (ours - theirs).abs().mean() < 0.05 * errors[1]


def test_nf4_of_bitsandbytes_passes():
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantize(weight):
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        nested = state.state2
        return {"codes": packed, "absmax": state.absmax, "offset": state.offset, "scale": nested.absmax}

    def dequantize(stored, shape):
        code = functional.create_dynamic_map()
        absmax = (
            functional.dequantize_blockwise(stored["absmax"], absmax=stored["scale"], code=code, blocksize=256)
            + stored["offset"]
        )
        return functional.dequantize_4bit(
            stored["codes"],
            functional.QuantState(absmax, torch.Size(shape), nf4_reference.NF4, 64, "nf4", torch.float32),
        )

    verdict = lab.nf4(quantize, dequantize)
    assert verdict.status == "passed", verdict.message


def test_the_8_bit_states_of_bitsandbytes_pass():
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantize(state, signed):
        code = functional.create_dynamic_map(signed=signed)
        codes, kept = functional.quantize_blockwise(state, code=code, blocksize=eight_bits.BLOCK)
        return {"codes": codes, "absmax": kept.absmax, "signed": signed}

    def dequantize(stored):
        code = functional.create_dynamic_map(signed=stored["signed"])
        return functional.dequantize_blockwise(stored["codes"], absmax=stored["absmax"], code=code, blocksize=256)

    verdict = lab.eight_bit_state(quantize, dequantize)
    assert verdict.status == "passed", verdict.message


def test_checkpoint_of_pytorch_passes():
    from torch.utils.checkpoint import checkpoint

    verdict = lab.checkpointed(functools.partial(checkpoint, use_reentrant=False))
    assert verdict.status == "passed", verdict.message
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        reentrant = lab.checkpointed(functools.partial(checkpoint, use_reentrant=True))
    assert "x needs no gradient here" in reentrant.message


def test_zero_grad_may_come_first():
    def step(model, optimizer, micro_batches):
        optimizer.zero_grad()
        return planted.right_step(model, optimizer, micro_batches)

    assert lab.accumulated_step(step).status == "passed"
