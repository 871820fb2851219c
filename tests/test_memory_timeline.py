"""A step's timeline and its snapshot: the highest point is the estimate's, and a real step holds the same bytes."""

from __future__ import annotations

import pickle
from itertools import product
from pathlib import Path

import pytest
import torch
from refusals import assert_refused

from course_lib.memory import estimate
from course_lib.memory.breakdown import CATEGORIES
from course_lib.memory.timeline import step_timeline
from course_lib.models import tiny_llama
from course_lib.observe import MemoryProbe, tensor_bytes
from course_lib.observe.memory import SavedForBackward, training_tensors
from course_lib.observe.snapshots import OLDER, emulate_snapshot, read_snapshot

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, TOKENS = 2, 96
TORCH = Path(torch.__file__).parent


def test_the_highest_point_is_the_estimates_peak_and_is_made_of_the_same_parts() -> None:
    models, sizes = ("smollm2-135m", "llama-3.1-8b", "qwen3-0.6b", "gpt2"), ((1, 64), (2, 256), (8, 1024))
    for model, (batch, length), *choices in product(models, sizes, ("none", "full"), ("eager", "fused"), (1, 3)):
        settings = dict(zip(("activation_checkpointing", "loss", "num_microbatches"), choices, strict=True))
        settings |= {"micro_batch_size": batch, "seq_len": length}
        timeline, need = step_timeline(model, **settings), estimate(model, precision="fp32", **settings)
        assert timeline.peak == pytest.approx(need.peak, rel=1e-4), (model, settings)
        for name, size in timeline.at_peak.items():
            assert size == pytest.approx(need.at_peak[name], abs=1e-4 * need.peak), (name, model, settings)


def test_the_parts_of_every_peak_add_up_and_none_is_negative() -> None:
    strategies = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
    for method, strategy, checkpointing, micro_batches, bucket in product(
        ("full", "lora", "qlora"), strategies, ("none", "selective", "full"), (1, 4), (5 * 10**7, 5 * 10**8)
    ):
        settings = {"method": method, "strategy": strategy, "activation_checkpointing": checkpointing}
        settings |= {"ranks": 1 if strategy == "single" else 4, "num_microbatches": micro_batches}
        need = estimate("llama-3.2-1b", bucket_elements=bucket, seq_len=512, **settings)
        assert tuple(need.at_peak) == CATEGORIES and min(need.at_peak.values()) >= 0, settings
        assert sum(need.at_peak.values()) == need.peak, settings
        if strategy in ("single", "ddp") and need.peak_phase in ("backward of the loss", "gradient of the embedding"):
            whole = micro_batches > 1 or need.peak_phase != "backward of the loss"
            assert (need.at_peak["gradients"] >= need.gradients) == whole, settings


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def training(request):
    model = tiny_llama(layers=4, vocab=4096, tie_embeddings=request.param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def test_blocks_keep_and_give_what_hooks_see(training) -> None:
    """Autograd's hooks and the gradients themselves are the second instrument."""
    model, _, step = training
    kept, gradients = [], []
    saved = SavedForBackward(model)
    hooks = [layer.register_forward_hook(lambda *_: kept.append(saved.now)) for layer in model.model.layers]
    hooks += [
        layer.register_full_backward_hook(
            lambda *_: gradients.append(tensor_bytes(p.grad for p in model.parameters() if p.grad is not None))
        )
        for layer in model.model.layers
    ]
    with saved:
        step()
    for hook in hooks:
        hook.remove()
    timeline = step_timeline(model, micro_batch_size=BATCH, seq_len=TOKENS)
    at_block = [i for i, name in enumerate(timeline.at_work) if name == "block"]
    middle = timeline.phases[0][2]
    for places, part, seen in (
        ([i for i in at_block if i < middle], "activations", kept),
        ([i for i in at_block if i >= middle], "gradients", gradients),
    ):
        first_of_each = places[:: len(places) // 4]
        told = timeline.parts[part][first_of_each]
        assert list(told[2:] - told[1:-1]) == [b - a for a, b in zip(seen[:-2], seen[1:-1], strict=True)], part
    peak = timeline.worst
    assert timeline.at_work[peak] == "loss" and timeline.parts["gradients"][peak] < timeline.parts["gradients"].max()


class FusedLoss(torch.autograd.Function):
    """Output layer and cross-entropy as Liger computes them: a chunk of tokens at a time, gradients in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        into_hidden, into_weight, loss = torch.empty_like(hidden), torch.zeros_like(weight), 0.0
        chunks = zip(*(tensor.split(len(hidden) * hidden.shape[1] // len(weight)) for tensor in (hidden, into_hidden, targets)), strict=True)  # fmt: skip
        for part, gradient, labels in chunks:
            shares = (part @ weight.t()).softmax(-1)
            right = torch.arange(len(part))
            loss -= shares[right, labels].log().sum() / len(hidden)
            shares[right, labels] -= 1
            shares /= len(hidden)
            torch.mm(shares, weight, out=gradient)
            into_weight.addmm_(shares.t(), part)
        ctx.save_for_backward(into_hidden, into_weight)
        return loss

    @staticmethod
    def backward(ctx, _):
        return *ctx.saved_tensors, None


def test_a_fused_loss_holds_what_the_estimate_says() -> None:
    model = tiny_llama(layers=2, vocab=8192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.arange(8 * 256).view(8, 256)
    probe, peaks = MemoryProbe(model, optimizer), {}

    def eager() -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    def fused() -> torch.Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        return FusedLoss.apply(hidden, model.lm_head.weight, ids[:, 1:].flatten())

    gradients = {}
    for loss in (eager, fused):
        loss().backward()
        gradients[loss] = model.lm_head.weight.grad
        optimizer.zero_grad()
    torch.testing.assert_close(gradients.pop(eager), gradients.pop(fused), rtol=1e-3, atol=1e-6)
    for loss in (eager, eager, fused):  # the first one makes Adam's state
        with probe.measure():
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks[loss.__name__] = probe.bytes["peak"]
    sizes = {"precision": "fp32", "micro_batch_size": 8, "seq_len": 256}
    assert peaks["eager"] > 2 * peaks["fused"]
    for name, peak in peaks.items():
        assert estimate(model, loss=name, **sizes).peak == pytest.approx(peak, rel=0.05), name


def test_the_emulated_snapshot_has_the_counted_peak_and_knows_who_holds_it(training, tmp_path) -> None:
    from torch.cuda import _memory_viz

    model, optimizer, step = training
    probe, file = MemoryProbe(model, optimizer), tmp_path / "step.pickle"
    with probe.measure():
        step()
    emulate_snapshot(file, step, training_tensors(model, optimizer))
    snapshot = read_snapshot(file)
    assert snapshot.peak == probe.bytes["peak"]
    assert sum(row["bytes"] for row in snapshot.holders) == snapshot.peak
    assert (snapshot.reserved >= snapshot.allocated).all()
    held = {row["asked for by"]: row["bytes"] for row in snapshot.holders}
    assert held[OLDER] == tensor_bytes(training_tensors(model, optimizer))
    assert any("loss.backward()" in line for line in held) and any("cross_entropy(" in line for line in held)
    assert not any("snapshots.py" in line for line in held)
    loaded = pickle.loads(file.read_bytes())
    assert "MemoryViz.js" in _memory_viz.trace_plot(loaded) and "free completed" in _memory_viz.trace(loaded)


def test_on_a_full_card_the_snapshot_ends_with_the_request_that_failed(tmp_path) -> None:
    held, file = [torch.empty(2**20)], tmp_path / "full.pickle"  # 4 MiB, in a segment of 20

    def step() -> None:
        first = torch.empty(3 * 2**20)
        second = torch.empty(5 * 2**20)
        del first, second

    emulate_snapshot(file, step, held, limit=32 * 2**20)
    trace = pickle.loads(file.read_bytes())["device_traces"][0]
    failed = trace[-1]
    assert (failed["action"], failed["size"], failed["device_free"]) == ("oom", 20 * 2**20, 12 * 2**20)
    assert [f["line"] for f in failed["frames"] if f["name"] == "step"] == [step.__code__.co_firstlineno + 2]
    assert read_snapshot(file).peak == 16 * 2**20
    assert_refused([(lambda: emulate_snapshot(file, step, held, limit=2**20), ValueError, "limit=1,048,576")])


def test_a_gpus_snapshot_starts_with_what_was_there_and_counts_what_was_asked_for(tmp_path) -> None:
    frames = [{"filename": f"{TORCH}/nn/a.py", "line": 1, "name": "f"}, {"filename": __file__, "line": 1, "name": "g"}]  # fmt: skip
    trace = [
        {"action": "segment_alloc", "addr": 100, "size": 20, "frames": []},
        {"action": "alloc", "addr": 100, "size": 7, "frames": frames},
        {"action": "free_requested", "addr": 5, "size": 3, "frames": []},  # older than the recording
        {"action": "free_completed", "addr": 5, "size": 3, "frames": []},
        {"action": "alloc", "addr": 110, "size": 1, "frames": []},
    ]
    segments = [
        {"device": 1, "total_size": 30, "allocated_size": 24, "requested_size": 10},
        {"device": 0, "total_size": 99, "allocated_size": 99, "requested_size": 99},
    ]
    file = tmp_path / "gpu.pickle"
    file.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[], trace]}))
    snapshot = read_snapshot(file)
    assert snapshot.allocated.tolist() == [5, 12, 12, 9, 10] and snapshot.reserved.tolist() == [30] * 5
    assert [(row["tensors"], row["bytes"]) for row in snapshot.holders] == [(1, 7), (0, 5)]
    assert "test_memory_timeline.py:1" in snapshot.holders[0]["asked for by"]


def test_each_allocation_is_traced_to_its_own_line(tmp_path) -> None:
    def step() -> None:
        for _ in range(300):
            first = torch.empty(1000)
            del first
            second = torch.empty(1000)  # at the first one's address
            del second

    emulate_snapshot(tmp_path / "lines.pickle", step)
    trace = pickle.loads((tmp_path / "lines.pickle").read_bytes())["device_traces"][0]
    frames = [event["frames"] for event in trace if event["action"] == "alloc"]
    start = step.__code__.co_firstlineno
    lines = [frame["line"] - start for stack in frames for frame in stack if frame["name"] == "step"]
    assert lines == 300 * [2, 4]


def test_what_cannot_be_drawn_or_read_is_refused(tmp_path) -> None:
    (tmp_path / "empty.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    assert_refused(
        [
            (lambda: step_timeline("tiny", activation_checkpointing="selective"), ValueError, "'selective'"),
            (lambda: read_snapshot(tmp_path / "empty.pickle"), ValueError, "no allocation"),
        ]
    )
