"""Lab 2: its checks against the planted answers and against what PyTorch and bitsandbytes do."""

import functools
import warnings

import pytest
import torch
from planted import lab02 as planted
from planted.contract import Contract

from course_checks.lab02 import eight_bits, lab, nf4_reference


class TestChecks(Contract):
    lab, planted = lab, planted
    on_ranks = False

    def judged(self, name, answer):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning would stand in the learner's notebook
            return super().judged(name, answer)


def test_our_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs = functional.dequantize_4bit(packed, state)
    ours = nf4_reference.there_and_back(weight)
    assert torch.allclose(nf4_reference.NF4, state.code, atol=1e-6)
    assert (ours - theirs).abs().mean() < 0.05 * (theirs - weight).abs().mean()


def test_nf4_of_bitsandbytes_passes():
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantize(weight):
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        nested = state.state2
        return {"codes": packed, "absmax": state.absmax, "offset": state.offset, "scale": nested.absmax}

    def dequantize(stored, shape):
        code = functional.create_dynamic_map()
        scales = functional.dequantize_blockwise(stored["absmax"], absmax=stored["scale"], code=code, blocksize=256)
        absmax = scales + stored["offset"]
        state = functional.QuantState(absmax, torch.Size(shape), nf4_reference.NF4, 64, "nf4", torch.float32)
        return functional.dequantize_4bit(stored["codes"], state)

    verdict = lab.nf4(quantize, dequantize)
    assert verdict.status == "passed", verdict


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
    assert verdict.status == "passed", verdict


def test_checkpoint_of_pytorch_passes():
    from torch.utils.checkpoint import checkpoint

    verdict = lab.checkpointed(functools.partial(checkpoint, use_reentrant=False))
    assert verdict.status == "passed", verdict


def test_zero_grad_may_come_first():
    def step(model, optimizer, micro_batches):
        optimizer.zero_grad()
        return planted.right_step(model, optimizer, micro_batches)

    assert lab.accumulated_step(step).status == "passed"
