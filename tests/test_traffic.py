"""What a step sends: the papers' formulas, the bytes that real ranks counted, and the sentences for bad numbers."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.memory import Shape, shape_of
from course_lib.models import tiny_llama
from course_lib.parallel import traffic
from course_lib.training.data_parallel import ddp
from course_lib.training.pipeline import pipeline_parallel as pipeline
from course_lib.training.sequence.ring_attention import ring_attention
from course_lib.training.sharded import fsdp

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

LLAMA = shape_of("llama-3.1-8b")  # 32 layers, hidden 4096, 32 heads, 8 kv heads of 128
STATES = 2 * 8192 * 4096  # bytes of hidden states: bf16, one sequence of 8,192 tokens
SIZES = dict(micro_batch_size=1, seq_len=8192)
PARAMETERS = 803_968  # of the tiny Llama


def of_kind(messages, kind):
    return [(m.count, m.num_bytes, m.every) for m in messages if m.collective == kind]


def test_megatrons_formula():
    sent = traffic.tensor_parallel(LLAMA, tp=8, **SIZES)
    assert of_kind(sent, "all_reduce") == [(4 * 32 + 2, STATES, "micro_batch"), (3, 4 * 8192, "micro_batch")]
    assert {m.axis for m in sent} == {"tp"} and len(sent) == 2
    assert sent[0].total_bytes == 130 * STATES
    inside = traffic.tensor_parallel(LLAMA, tp=8, **SIZES, vocab_parallel=False)
    assert of_kind(inside, "all_reduce") == [(4 * 32, STATES, "micro_batch")] and len(inside) == 1
    assert traffic.tensor_parallel(LLAMA, tp=1, **SIZES) == []
    fp32 = traffic.tensor_parallel(LLAMA, tp=2, micro_batch_size=3, seq_len=10, element=4)
    assert [m.num_bytes for m in fp32] == [3 * 10 * 4096 * 4, 3 * 10 * 4]


def test_sequence_parallelism_sends_the_same_bytes_on_a_ring():
    plain, cut = (traffic.tensor_parallel(LLAMA, tp=8, **SIZES, sequence_parallel=sp) for sp in (False, True))
    assert of_kind(cut, "all_gather") == of_kind(cut, "reduce_scatter") == [(130, STATES, "micro_batch")]
    ring = {"all_reduce": 2 * 7 / 8, "all_gather": 7 / 8, "reduce_scatter": 7 / 8}
    a, b = (sum(ring[m.collective] * m.total_bytes for m in sent if m.every == "micro_batch") for sent in (plain, cut))
    assert a == b
    assert (1, 65 * 4096 * 4, "step") in of_kind(cut, "all_reduce")  # 65 norms


def test_grouped_kv_heads_are_copied_where_ranks_are_more():
    assert not [m for m in traffic.tensor_parallel(LLAMA, tp=8, **SIZES) if m.every == "step"]
    (copies,) = [m for m in traffic.tensor_parallel(LLAMA, tp=16, **SIZES) if m.every == "step"]
    assert copies[:3] == ("all_reduce", 2 * 32, 128 * 4096 * 4)


def test_the_vocabulary_is_padded_not_refused():
    gpt2 = shape_of("gpt2")
    assert gpt2.vocab % 4 and traffic.tensor_parallel(gpt2, tp=4, micro_batch_size=1, seq_len=64)


def test_pipeline():
    assert traffic.pipeline(LLAMA, pp=1, **SIZES) == []
    assert traffic.pipeline(LLAMA, pp=2, **SIZES) == [("send", 1, STATES, "pp", "micro_batch")]
    assert traffic.pipeline(LLAMA, pp=4, **SIZES) == [("send", 2, STATES, "pp", "micro_batch")]
    assert traffic.pipeline(LLAMA, pp=4, virtual_stages=4, **SIZES)[0].count == 8
    assert traffic.pipeline(LLAMA, pp=2, virtual_stages=4, **SIZES)[0].count == 7
    (cut,) = traffic.pipeline(LLAMA, pp=4, tp=8, cp=2, sequence_parallel=True, **SIZES)
    assert cut.num_bytes == STATES / 16
    assert traffic.pipeline(LLAMA, pp=4, tp=8, cp=2, **SIZES)[0].num_bytes == STATES / 2


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (2, 3), (3, 1), (4, 2), (5, 3)])
def test_the_busiest_rank_of_a_pipeline_by_counting_its_borders(pp, chunks):
    """Stage i lies on rank i mod pp; stage i sends forward unless it is the last, backward unless it is the first."""
    stages = range(pp * chunks)
    sends = Counter(i % pp for i in stages for border in (i + 1, i - 1) if border in stages)
    assert traffic.pipeline(LLAMA, pp=pp, virtual_stages=chunks, **SIZES)[0].count == max(sends.values())


def test_data_parallel_as_the_zero_paper_counts_it():
    """Section 7: stages 1 and 2 send what DDP sends, stage 3 half as much again, with gradients as long as weights."""
    ring = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    volume = {
        strategy: sum(
            ring[m.collective] * m.total_bytes
            for m in traffic.data_parallel(1e9, dp=64, strategy=strategy, element=2, grad_element=2)
        )
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    }
    assert volume == {"ddp": 4e9, "zero1": 4e9, "zero2": 4e9, "zero3": 6e9, "fsdp": 6e9}
    assert traffic.data_parallel(1e9, dp=1, strategy="zero3") == []
    gathers = [
        traffic.data_parallel(1, dp=2, strategy=s, activation_checkpointing=c)[0].count
        for s in ("zero3", "fsdp")
        for c in (0, 1)
    ]
    assert gathers == [2, 3, 2, 2]


def test_how_often_the_strategies_send():
    often = {
        strategy: [(m.collective, m.every) for m in traffic.data_parallel(1, dp=2, strategy=strategy)]
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    }
    assert often["ddp"] == [("all_reduce", "step")]
    assert often["zero1"] == [("reduce_scatter", "step"), ("all_gather", "step")]
    assert often["zero2"] == [("reduce_scatter", "micro_batch"), ("all_gather", "step")]
    assert often["zero3"] == often["fsdp"] == [("all_gather", "micro_batch"), ("reduce_scatter", "micro_batch")]


def test_context_parallel():
    assert traffic.context_parallel(LLAMA, cp=1, **SIZES) == []
    (ring,) = traffic.context_parallel(LLAMA, cp=4, **SIZES)
    assert ring == ("send", 10 * 32, 2 * 2048 * 8 * 128 * 2, "cp", "micro_batch")  # of 2,048 tokens, 8 of 32 heads
    assert traffic.context_parallel(LLAMA, cp=4, tp=8, **SIZES)[0].num_bytes == ring.num_bytes / 8
    assert traffic.context_parallel(LLAMA, cp=4, tp=16, **SIZES)[0].num_bytes == ring.num_bytes / 8  # one head at least


def programs():
    torch.set_num_threads(1)
    sizes = dict(steps=2, global_batch=4, seq_len=16)
    ddp.train(gradient_accumulation_steps=2, **sizes)  # it ends with a barrier of its own
    fsdp.train(gradient_accumulation_steps=2, sync_every_micro_batch=True, **sizes)
    dist.barrier()
    query, keys = torch.randn(1, 4, 8, 6, requires_grad=True), torch.randn(2, 1, 2, 8, 6, requires_grad=True)
    ring_attention(query, keys[0], keys[1]).sum().backward()
    dist.barrier()
    pipeline.train(implementation="hand", num_microbatches=4, **sizes)


@pytest.fixture(scope="module")
def stretches(private_tmp):
    """What rank 0 issued, by program."""
    log = [c for c in launch(programs, ranks=2, quiet=True, timeout=200).collectives if c.rank == 0]
    borders = [i for i, c in enumerate(log) if c.kind == "barrier"]
    ends = [*borders[:3], len(log)]
    return {
        name: log[a:b] for name, a, b in zip(("ddp", "fsdp", "ring", "pipeline"), [0, *borders[:3]], ends, strict=True)
    }


def test_a_real_ring_sends_these_bytes(stretches):
    shape = Shape(layers=1, hidden=24, heads=4, kv_heads=2, vocab=8)
    (told,) = traffic.context_parallel(shape, cp=2, micro_batch_size=1, seq_len=16, element=4)
    assert [c.bytes for c in stretches["ring"] if c.kind == "send"] == told.count * [told.num_bytes]


def test_a_real_pipeline_sends_these_bytes(stretches):
    shape = shape_of(tiny_llama(device="meta").config)
    (told,) = traffic.pipeline(shape, pp=2, micro_batch_size=1, seq_len=16, element=4)
    assert [c.bytes for c in stretches["pipeline"] if c.kind == "send"] == 2 * 4 * told.count * [told.num_bytes]


def test_real_data_parallel_ranks_send_these_bytes(stretches):
    for strategy in ("ddp", "fsdp"):
        stretch = stretches[strategy]
        reports = [i for i, c in enumerate(stretch) if (c.kind, c.bytes) == ("all_reduce", 4)]  # one ends each step
        counted = Counter()
        for c in stretch[reports[0] + 1 : reports[1]]:
            counted[c.kind] += c.bytes * (2 if c.kind == "all_gather" else 1)
        told = Counter()
        for m in traffic.data_parallel(PARAMETERS, dp=2, strategy=strategy, element=4):
            told[m.collective] += m.total_bytes * (2 if m.every == "micro_batch" else 1)
        if strategy == "fsdp":  # the root's parameters stay from the forward to the backward pass: gathered once
            told["all_gather"] -= 2 * 65_664 * 4
        assert counted.pop("broadcast", 0) < 1000  # DDP's: buffers, and the order of its buckets
        assert counted == told


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: traffic.tensor_parallel(LLAMA, tp=0, **SIZES), "tp=0: give a whole number"),
        (lambda: traffic.tensor_parallel(LLAMA, tp=2, micro_batch_size=1.5, seq_len=8), "micro_batch_size=1.5"),
        (lambda: traffic.tensor_parallel(LLAMA, tp=3, **SIZES), "32 attention heads do not divide over 3"),
        (
            lambda: traffic.tensor_parallel(LLAMA, tp=8, micro_batch_size=1, seq_len=9, sequence_parallel=True),
            "seq_len=9",
        ),
        (
            lambda: traffic.pipeline(LLAMA, pp=16, virtual_stages=4, **SIZES),
            "32 layers do not fill pp=16 x virtual_stages=4",
        ),
        (lambda: traffic.pipeline(LLAMA, pp=2, cp=3, **SIZES), "does not divide into 3 parts"),
        (lambda: traffic.context_parallel(LLAMA, cp=3, **SIZES), "does not divide over cp=3"),
        (lambda: traffic.data_parallel(1e9, dp=2, strategy="zero4"), "strategy='zero4' is no choice"),
        (lambda: traffic.data_parallel(0, dp=2), "num_parameters=0"),
    ],
)
def test_bad_numbers_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_nothing_here_needs_torch():
    code = "import sys, course_lib.parallel.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
