"""The estimate against tensors that are there: resident bytes to the byte, the peak within 5 %.

Bytes at rest (weights with NF4's constants, gradients, optimizer state) and what autograd keeps are counted storage by
storage and must be equal. The peak has 5 %: the allocator's events see every temporary, of which the estimate counts
those that are as large as an activation. benchmarks/memory.py has all combinations.
"""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.gpu import models
from course_lib.memory import estimate, shape_of
from course_lib.models import load, tiny_llama
from course_lib.observe import observe, tensor_bytes
from course_lib.observe.memory import memory_over_time, record_allocations
from course_lib.training import methods

PEAK = 0.05

pytestmark = pytest.mark.usefixtures("one_thread")


def muon(model):
    """Muon for the blocks' matrices, and after it AdamW for the rest, with its states beside Muon's."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if ".layers." in name and p.ndim == 2]
    rest = [p for name, p in trained if ".layers." not in name or p.ndim != 2]
    pair = torch.optim.Muon(matrices, lr=1e-4)
    if rest:
        adamw = torch.optim.AdamW(rest, lr=1e-4, fused=True)
        adamw.state = pair.state
        pair.register_step_post_hook(lambda *_: adamw.step())
    return pair


def measure(name, batch, seq_len, micro_batches, *, method, precision, optimizer, activation_checkpointing, attention):
    """Two steps of a real model, the second one measured; (the model without its wrapper, bytes by category)."""
    settings = {
        "method": method,
        "precision": precision,
        "activation_checkpointing": activation_checkpointing,
        "attention": attention,
    }
    base = (
        tiny_llama(layers=2, vocab=8192, tie_embeddings=True) if name == "tied" else load(name, dtype=torch.float32)[0]
    )
    model = methods.prepare(base, **settings)
    stepper = muon(model) if optimizer == "muon" else models.build_optimizer(model, optimizer)
    seen = observe(model, stepper)
    ids = torch.randint(0, 200, (batch, seq_len), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with seen.step():
            for _ in range(micro_batches):
                with methods.autocast(precision, "cpu"):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            stepper.step()
            model.zero_grad()
    bytes_of = dict(seen.memory)
    constants = tensor_bytes(methods.quantization_constants(model))  # neither parameters nor buffers
    bytes_of["parameters"] += constants
    bytes_of["peak"] += constants
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base, bytes_of


CASES = [  # model, sequences, tokens, micro-batches; method, precision, checkpointing, optimizer, attention
    ("tiny", 2, 48, 1, "full", "fp32", "none", "adamw", "flash"),
    ("tiny", 2, 48, 1, "full", "bf16-mixed", "selective", "adamw", "flash"),
    ("tiny", 2, 48, 1, "full", "bf16", "full", "adamw", "flash"),
    ("tiny", 2, 48, 1, "lora", "fp32", "full", "adamw", "flash"),
    ("tiny", 2, 48, 1, "lora", "bf16-mixed", "none", "adamw", "flash"),
    ("tiny", 2, 48, 1, "lora", "bf16", "selective", "adamw", "flash"),
    ("tiny", 2, 48, 1, "qlora", "fp32", "selective", "adamw", "flash"),
    ("tiny", 2, 48, 1, "qlora", "bf16-mixed", "full", "adamw", "flash"),
    ("tiny", 2, 48, 1, "qlora", "bf16", "none", "adamw", "flash"),
    ("tiny", 2, 48, 1, "full", "fp32", "full", "adamw8bit", "flash"),
    ("tiny", 2, 48, 1, "lora", "bf16-mixed", "full", "paged_adamw8bit", "flash"),
    ("tiny", 2, 48, 1, "full", "bf16-mixed", "none", "sgd", "flash"),
    ("tiny", 1, 16, 1, "full", "bf16", "none", "muon", "flash"),  # the optimizer's step is the peak
    ("tiny", 2, 48, 1, "lora", "bf16-mixed", "none", "muon", "flash"),
    ("tiny", 4, 128, 1, "full", "fp32", "none", "sgd", "eager"),  # the scores written out
    ("tiny", 4, 128, 1, "full", "bf16-mixed", "full", "sgd", "eager"),
    ("tiny", 2, 48, 3, "full", "fp32", "none", "adamw", "flash"),
    ("tiny", 2, 48, 3, "lora", "bf16-mixed", "none", "adamw", "flash"),
    ("tied", 1, 16, 1, "full", "fp32", "none", "sgd", "flash"),  # where two gradients meet
    ("tied", 1, 16, 2, "full", "bf16-mixed", "none", "sgd", "flash"),
    ("tied", 4, 48, 1, "full", "fp32", "none", "sgd", "flash"),  # the loss is the peak
    ("tied", 1, 16, 2, "qlora", "fp32", "full", "adamw8bit", "flash"),
    ("smollm2", 1, 64, 1, "full", "fp32", "none", "adamw", "flash"),
]


@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_a_real_step_needs_what_was_estimated(case) -> None:
    name, batch, seq_len, micro_batches, method, precision, checkpointing, optimizer, attention = case
    settings = {
        "method": method,
        "precision": precision,
        "activation_checkpointing": checkpointing,
        "optimizer": optimizer,
        "attention": attention,
    }
    model, seen = measure(name, batch, seq_len, micro_batches, **settings)
    sizes = {"micro_batch_size": batch, "seq_len": seq_len, "num_microbatches": micro_batches}
    need = estimate(shape_of(model), device="cpu", **sizes, **settings)
    assert need.weights == seen["parameters"]
    assert need.gradients == seen["gradients"]
    assert need.optimizer == seen["optimizer_state"]
    if checkpointing != "selective":  # what it keeps is not among autograd's saved tensors
        assert need.kept == seen["activations"]
    assert need.peak == pytest.approx(seen["peak"], rel=PEAK), need.phases
    del model
    gc.collect()


@pytest.mark.parametrize(("method", "precision"), [("full", "fp32"), ("full", "bf16"), ("lora", "bf16")])
def test_muon_s_step_alone_needs_what_was_estimated(method, precision) -> None:
    model = methods.prepare(tiny_llama(), method=method, precision=precision)
    for parameter in methods.trainable(model):
        parameter.grad = torch.ones_like(parameter)
    stepper = muon(model)
    stepper.step()
    seen = max(now for _, now in memory_over_time(record_allocations(stepper.step)))
    need = estimate("tiny", method=method, precision=precision, optimizer="muon", device="cpu")
    temporary = need.phases["optimizer step"] - need.weights - need.gradients - need.optimizer
    assert temporary <= seen <= temporary + 8192  # the CPU's product of a transposed matrix takes a buffer


def test_a_wrong_term_would_be_seen() -> None:
    """The tolerance is narrower than the smallest mistake worth finding: one activation of a block forgotten."""
    shape = shape_of("tiny")
    need = estimate(shape, precision="fp32", micro_batch_size=4, seq_len=128)
    one_of_the_mlp = 4 * 4 * 128 * shape.intermediate * shape.layers
    assert one_of_the_mlp > PEAK * need.peak
