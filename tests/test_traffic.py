"""What a step sends, by the papers' formulas and as real ranks counted it; when."""

from __future__ import annotations

import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from refusals import assert_refused
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from course_lib.collectives.links import Link
from course_lib.launch import launch
from course_lib.memory import Shape, shape_of
from course_lib.parallel import traffic
from course_lib.parallel.buckets import bucketed_step
from course_lib.parallel.grid import Grid
from course_lib.training import ddp, fsdp

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

LLAMA = shape_of("llama-3.1-8b")  # 32 layers, hidden 4096, 32 heads, 8 kv heads of 128
STATES = 2 * 8192 * 4096  # bytes of hidden states: bf16, one sequence of 8,192 tokens
SIZES = dict(micro_batch_size=1, seq_len=8192)
PARAMETERS = 803_968  # of the tiny Llama


# ----------------------------------------------------------------------------------------- papers' formulas
def of_kind(messages, kind):
    return [(m.count, m.num_bytes, m.every) for m in messages if m.collective == kind]


def test_tensor_and_sequence_parallelism_send_megatrons_formula():
    sent = traffic.tensor_parallel(LLAMA, tp=8, **SIZES)
    assert of_kind(sent, "all_reduce") == [(4 * 32 + 2, STATES, "micro_batch"), (3, 4 * 8192, "micro_batch")]
    assert {m.axis for m in sent} == {"tp"} and len(sent) == 2
    assert traffic.tensor_parallel(LLAMA, tp=1, **SIZES) == []
    cut = traffic.tensor_parallel(LLAMA, tp=8, **SIZES, sequence_parallel=True)  # the same bytes on a ring
    assert of_kind(cut, "all_gather") == of_kind(cut, "reduce_scatter") == [(130, STATES, "micro_batch")]
    assert (1, 65 * 4096 * 4, "step") in of_kind(cut, "all_reduce")  # 65 norms


def test_a_pipelines_busiest_rank_sends_as_often_as_it_has_borders():
    """Stage i lies on rank i mod pp; stage i sends forward unless it is the last, backward unless it is the first."""
    for pp, chunks in ((2, 1), (2, 3), (3, 1), (4, 2), (5, 3)):
        stages = range(pp * chunks)
        sends = Counter(i % pp for i in stages for border in (i + 1, i - 1) if border in stages)
        (sent,) = traffic.pipeline(LLAMA, pp=pp, virtual_stages=chunks, **SIZES)
        assert sent == ("send", max(sends.values()), STATES, "pp", "micro_batch"), (pp, chunks)
    assert traffic.pipeline(LLAMA, pp=1, **SIZES) == []
    for sequence_parallel, share in ((True, 16), (False, 2)):
        (cut,) = traffic.pipeline(LLAMA, pp=4, tp=8, cp=2, sequence_parallel=sequence_parallel, **SIZES)
        assert cut.num_bytes == STATES / share


def test_data_parallelism_sends_what_the_zero_paper_counts():
    """Section 7: stages 1 and 2 send what DDP sends, stage 3 half as much again, with gradients as long as weights."""
    ring = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    gather, scatter = ("all_gather", "micro_batch"), ("reduce_scatter", "micro_batch")
    for strategy, volume, often in [
        ("ddp", 4e9, [("all_reduce", "step")]),
        ("zero1", 4e9, [("reduce_scatter", "step"), ("all_gather", "step")]),
        ("zero2", 4e9, [scatter, ("all_gather", "step")]),
        ("zero3", 6e9, [gather, scatter]),
        ("fsdp", 6e9, [gather, scatter]),
    ]:
        sent = traffic.data_parallel(1e9, dp=64, strategy=strategy, element=2, grad_element=2)
        assert sum(ring[m.collective] * m.total_bytes for m in sent) == volume, strategy
        assert [(m.collective, m.every) for m in sent] == often, strategy
    assert traffic.data_parallel(1e9, dp=1, strategy="zero3") == []
    checkpointed = (
        traffic.data_parallel(1, dp=2, strategy=s, activation_checkpointing=True) for s in ("zero3", "fsdp")
    )
    assert [sent[0].count for sent in checkpointed] == [3, 2]


def test_context_parallelism_sends_keys_and_values_around():
    assert traffic.context_parallel(LLAMA, cp=1, **SIZES) == []
    (ring,) = traffic.context_parallel(LLAMA, cp=4, **SIZES)
    assert ring == ("send", 10 * 32, 2 * 2048 * 8 * 128 * 2, "cp", "micro_batch")  # of 2,048 tokens, 8 of 32 heads
    assert traffic.context_parallel(LLAMA, cp=4, tp=8, **SIZES)[0].num_bytes == ring.num_bytes / 8


# --------------------------------------------------------------------------------------- bytes of real ranks
def programs():
    torch.set_num_threads(1)
    sizes = dict(steps=2, global_batch=4, seq_len=16)
    ddp.train(**sizes)
    dist.barrier()
    fsdp.train(**sizes)
    dist.barrier()
    rank = dist.get_rank()
    stages = [PipelineStage(torch.nn.Linear(24, 24), i, 4, torch.device("cpu")) for i in (rank, rank + 2)]
    batch = torch.randn(4, 16, 24)
    inputs, target = ([batch], None) if rank == 0 else ([], batch)
    ScheduleInterleaved1F1B(stages, 4, loss_fn=torch.nn.functional.mse_loss).step(*inputs, target=target)


@pytest.fixture(scope="module")
def stretches(private_tmp):
    """What rank 0 issued, by program."""
    log = [c for c in launch(programs, ranks=2, quiet=True, timeout=200).collectives if c.rank == 0]
    borders = [i for i, c in enumerate(log) if c.kind == "barrier"][:2]
    names = ("ddp", "fsdp", "pipeline")
    return {name: log[a:b] for name, a, b in zip(names, [0, *borders], [*borders, len(log)], strict=True)}


def test_a_real_pipeline_sends_these_bytes(stretches):
    shape = Shape(layers=4, hidden=24, heads=4, kv_heads=2, vocab=8)
    (stage,) = traffic.pipeline(shape, pp=2, virtual_stages=2, micro_batch_size=1, seq_len=16, element=4)
    sent = Counter(c.bytes for c in stretches["pipeline"] if c.kind == "send")  # others tell the next stage its shapes
    assert sent[stage.num_bytes] == 4 * stage.count


def test_real_data_parallel_ranks_send_these_bytes(stretches):
    for strategy in ("ddp", "fsdp"):
        stretch = stretches[strategy]
        reports = [i for i, c in enumerate(stretch) if (c.kind, c.bytes) == ("all_reduce", 4)]  # one ends each step
        counted = Counter()
        for c in stretch[reports[0] + 1 : reports[1]]:
            counted[c.kind] += c.bytes * (2 if c.kind == "all_gather" else 1)
        expected = Counter()
        for m in traffic.data_parallel(PARAMETERS, dp=2, strategy=strategy, element=4):
            expected[m.collective] += m.total_bytes
        if strategy == "fsdp":  # the root's parameters stay from the forward to the backward pass: gathered once
            expected["all_gather"] -= 65_664 * 4
            expected["all_reduce"] = 39 * 4  # a norm for each of its parameters
        assert counted.pop("broadcast", 0) < 1000  # DDP's: buffers, and the order of its buckets
        assert counted == expected, strategy


def buckets(bucket_bytes: float, link: Link | str, ranks: int = 2) -> tuple[float, list[tuple[float, float]]]:
    """Seconds of a step of 1 s forward, 2 s backward and 4 MB of gradients, and when its messages travel."""
    seconds, spans = bucketed_step(bucket_bytes, gradient_bytes=4e6, compute=3.0, link=link, ranks=ranks)
    assert [(span.kind, span.start, span.end) for span in spans[:2]] == [("forward", 0, 1), ("backward", 1, 3)]
    assert {span.kind for span in spans[2:]} <= {"collective"}
    return seconds, [(span.start, span.end) for span in spans[2:]]


def test_buckets_leave_when_they_are_full_and_the_link_is_free():
    slow, fast = Link("slow", 0, 1e6), Link("fast", 0, 4e6)  # among two ranks, 4 s and 1 s for all gradients
    assert buckets(1e6, slow, ranks=1) == (3, [])
    for bucket in (4e6, 4e9):  # one bucket: nothing travels before backward ends
        assert buckets(bucket, slow) == (3 + 4, [(3, 7)])
        seconds, [message] = buckets(bucket, Link("late", 0.1, 1e6), ranks=4)
        assert seconds == message[1] == pytest.approx(3 + 6 * (0.1 + 4 / 4))
    assert buckets(2e6, slow) == (6, [(2, 4), (4, 6)])  # the second one is full at 3, and waits for the link
    assert buckets(2e6, fast) == (3.5, [(2, 2.5), (3, 3.5)])  # the link waits for the second one
    assert buckets(3e6, slow) == (6.5, [(2.5, 5.5), (5.5, 6.5)])  # the last one is smaller
    assert len(buckets(1e6, "nvlink4")[1]) == 4 and len(buckets(4e6 / 7, "nvlink4")[1]) == 7
    for bucket in (1e6, 4e6):
        assert buckets(bucket, Link("free", 0, 1e30))[0] == pytest.approx(3)


def test_misfits_are_refused():
    step = dict(gradient_bytes=4e6, compute=3.0, link="nvlink4", ranks=2)
    nine = dict(micro_batch_size=1, seq_len=9, sequence_parallel=True)
    assert_refused(
        [
            (lambda: Grid(tp=0), ValueError, "tp=0"),
            (lambda: traffic.tensor_parallel(LLAMA, tp=3, **SIZES), ValueError, "32 attention heads"),
            (lambda: traffic.tensor_parallel(LLAMA, tp=16, **SIZES), ValueError, "8 kv heads"),
            (lambda: traffic.context_parallel(LLAMA, cp=4, tp=16, **SIZES), ValueError, "8 kv heads"),
            (lambda: traffic.tensor_parallel(LLAMA, tp=8, **nine), ValueError, "seq_len=9"),
            (lambda: traffic.pipeline(LLAMA, pp=16, virtual_stages=4, **SIZES), ValueError, "32 layers"),
            (lambda: traffic.pipeline(LLAMA, pp=2, cp=3, **SIZES), ValueError, "3 parts"),
            (lambda: traffic.context_parallel(LLAMA, cp=3, **SIZES), ValueError, "3 parts"),
            (lambda: traffic.data_parallel(1e9, dp=2, strategy="zero4"), ValueError, "strategy='zero4'"),
            (lambda: bucketed_step(0, **step), ValueError, "bucket_bytes=0"),
            (lambda: bucketed_step(1, **step | {"ranks": 0}), ValueError, "ranks=0"),
            (lambda: bucketed_step(1e6, **step | {"compute": -1}), ValueError, "compute=-1"),
            (lambda: bucketed_step(1e6, **step | {"link": "nvlink"}), ValueError, "'nvlink"),
        ]
    )
