"""The spans of one traced step, and the overlap that is read off them."""

from __future__ import annotations

import pickle
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.observe import Span, overlap_seconds, trace_step

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def traced_ddp():
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=4)
    llama = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    model = DistributedDataParallel(llama, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(4, 128, dtype=torch.long)

    def step():
        with torch.profiler.record_function("my label"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dist.barrier()
    before = time.time()
    spans = trace_step(step)
    return before, spans, time.time()


def test_a_ddp_step():
    run = launch(traced_ddp, ranks=2)
    for before, spans, after in run.results:
        assert len(pickle.dumps(spans)) < 1_000_000
        assert all(before <= s.start <= s.end <= after for s in spans)  # seconds since the epoch
        assert [s.start for s in spans] == sorted(s.start for s in spans)
        by_kind = {kind: [s for s in spans if s.kind == kind] for kind in ("forward", "backward", "optimizer")}
        collectives = [s for s in spans if s.kind == "collective"]
        reduces = [s for s in collectives if s.name == "gloo:all_reduce"]
        assert len(reduces) >= 3  # 3.7 MB of gradients in buckets of 1 MiB
        assert [s.name for s in by_kind["optimizer"]] == ["Optimizer.step#AdamW.step"]
        assert "my label" in {s.name for s in spans if s.kind == "other"}
        main = by_kind["optimizer"][0].thread
        assert {s.thread for kind in by_kind.values() for s in kind} == {main}
        assert main not in {s.thread for s in collectives}
        first, last = by_kind["backward"][0].start, by_kind["backward"][-1].end
        assert by_kind["forward"][0].start < first < reduces[0].start
        assert max(s.end for s in by_kind["forward"]) <= first
        assert max(s.start for s in reduces) < by_kind["optimizer"][0].start
        own = [s for s in spans if s.kind in by_kind]
        assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False)), "one thread does one thing at a time"
        # the first bucket travels while the layers below it compute
        assert 0 < overlap_seconds(spans) <= min(sum(s.seconds for s in reduces), last - first)
    (from_0, _, to_0), (from_1, _, to_1) = run.results
    assert max(from_0, from_1) < min(to_0, to_1), "both ranks on one clock"


def test_overlap_by_hand():
    def span(kind, start, end, thread):
        return Span(kind, kind, start, end, thread)

    backward = [span("backward", 0.0, 4.0, 1), span("backward", 5.0, 8.0, 1)]
    assert overlap_seconds(backward) == 0
    assert overlap_seconds([*backward, span("collective", 1.0, 3.0, 1)]) == 0  # on the same thread: one after the other
    assert overlap_seconds([*backward, span("collective", 3.0, 6.0, 2)]) == pytest.approx(2.0)
    both = [span("collective", 3.0, 6.0, 2), span("collective", 3.5, 9.0, 3)]
    assert overlap_seconds([*backward, *both]) == pytest.approx(0.5 + 0.5 + 3.0)  # time, not time times collectives
    assert overlap_seconds([*both, span("forward", 0.0, 9.0, 1)]) == 0
    on_gpu = [span("collective", 10.0, 12.0, -8), span("backward", 11.0, 13.0, -8)]
    # where a GPU works only its streams count
    assert overlap_seconds([*backward, *both, *on_gpu]) == 0
    assert overlap_seconds([*on_gpu, span("backward", 11.5, 13.0, -9)]) == pytest.approx(0.5)


def test_without_ddp_and_without_labels():
    layer = torch.nn.Linear(256, 256)
    spans = trace_step(lambda: layer(torch.ones(512, 256)).sum().backward())
    kinds = [s.kind for s in spans]
    assert "forward" in kinds and "backward" in kinds and kinds.index("forward") < kinds.index("backward")
    assert overlap_seconds(spans) == 0
