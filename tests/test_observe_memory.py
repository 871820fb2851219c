"""Bytes by category and the peak of a step, to the byte: against arithmetic and against PyTorch's own tracker."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.observe import observe, tensor_bytes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")
WEIGHTS = [64 * 128, 128, 128 * 32, 32]  # of mlp(), in numbers


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))


def tiny_llama(tied: bool = False) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False, tie_word_embeddings=tied))


def train(model, *, optimizer=torch.optim.AdamW, measured_step=2):
    chosen = optimizer(model.parameters(), lr=1e-3)
    seen = observe(model, chosen, measured_step=measured_step)
    for _ in range(4):
        with seen.step(tokens=16):
            model(torch.ones(16, 64)).sum().backward()
            chosen.step()
            chosen.zero_grad()
    return seen.memory


def every_wrapper():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = {"plain": train(mlp()), "sgd": train(mlp(), optimizer=torch.optim.SGD)}
    found["ddp"] = train(DistributedDataParallel(mlp()))
    found["view"] = train(DistributedDataParallel(mlp(), gradient_as_bucket_view=True))
    dist.barrier()
    model = fully_shard(mlp())
    found["fsdp"] = train(model)
    found["fsdp shard"] = tensor_bytes(model.parameters())
    return found


def test_ddp_and_fsdp_collectives_and_bytes_by_category():
    run = launch(every_wrapper, ranks=2)
    weights, states = 4 * sum(WEIGHTS), 4 * len(WEIGHTS)  # bytes; AdamW's step counters are four bytes each
    # autograd keeps the first layer's input, and one tensor as the ReLU's result and the second layer's input
    kept = 16 * 64 * 4 + 16 * 128 * 4
    for found, other in zip(run.results, reversed(run.results), strict=True):
        common = {"parameters": weights, "gradients": weights, "ddp_buckets": 0, "activations": kept}
        expected = {
            "plain": common | {"optimizer_state": 2 * weights + states},
            "sgd": common | {"optimizer_state": 0},
            "ddp": common | {"optimizer_state": 2 * weights + states, "ddp_buckets": weights},
            "view": common | {"optimizer_state": 2 * weights + states},
        }
        for name, categories in expected.items():
            peak = found[name].pop("peak")
            assert found[name] == categories, name
            assert peak > sum(categories.values()) - kept, name
        shard = {"parameters": weights // 2, "gradients": weights // 2, "optimizer_state": weights + states}
        assert found["fsdp"].items() >= (shard | {"activations": kept}).items()
        # the peak of a rank that runs ahead may hold a gathered weight longer
        equal = {name: size for name, size in found["fsdp"].items() if name != "peak"}
        assert found["fsdp shard"] == weights // 2 and other["fsdp"].items() >= equal.items()
    assert run.memory[0].items() >= run.results[0]["fsdp"].items()  # the last measured step is the launch's own report

    for rank in (0, 1):
        own = [c for c in run.collectives if c.rank == rank]
        barrier = next(i for i, c in enumerate(own) if c.kind == "barrier")
        reduced = [c.bytes for c in own[:barrier] if c.kind == "all_reduce"]
        assert sum(reduced) == 2 * 4 * weights  # two DDP models, four steps
        sharded = Counter((c.kind, c.bytes) for c in own[barrier + 1 :] if c.kind != "broadcast")
        assert sharded == {("all_gather", weights // 2): 4, ("reduce_scatter", weights): 4}
        assert all(c.seconds > 0 for c in own)


def peaks_of_ddp():
    """Peaks by what wraps the model, whether gradients are cleared first, how, and which step is measured."""
    from torch.nn.parallel import DistributedDataParallel

    peaks = {}
    for kind in ("plain", "ddp", "view"):
        for first, to_none, measured in itertools.product((False, True), (False, True), range(4)):
            model = mlp()
            if kind != "plain":
                model = DistributedDataParallel(model, gradient_as_bucket_view=kind == "view")
            optimizer = torch.optim.AdamW(model.parameters())
            seen = observe(model, optimizer, measured_step=measured)
            for _ in range(4):
                with seen.step():
                    if first:
                        optimizer.zero_grad(set_to_none=to_none)
                    model(torch.ones(16, 64)).sum().backward()
                    optimizer.step()
                    if not first:
                        optimizer.zero_grad(set_to_none=to_none)
            peaks.setdefault(kind, []).append(seen.memory["peak"])
    return peaks


def test_the_peak_is_that_of_any_step():
    """Also where DDP rebuilds its buckets in the measured step, and where the last step's gradients end in it."""
    weights = 4 * sum(WEIGHTS)
    peaks = launch(peaks_of_ddp, ranks=2).results[0]
    (plain,) = set(peaks["plain"])
    # weights, gradients, two moments, and AdamW's temporaries, which are two more where it works on all at once
    assert 4 * weights < plain < 6 * weights
    # while DDP rebuilds its buckets it sends their order around, some bytes that may live a little longer
    assert all(plain + weights <= peak < plain + weights + 100 for peak in peaks["ddp"]), peaks
    assert all(plain <= peak < plain + 100 for peak in peaks["view"]), peaks


def against_the_tracker(optimizer, clear_first):
    """(what the probe says, what PyTorch's MemTracker says) of the same step of the same Llama."""
    from torch.distributed._tools.mem_tracker import MemTracker

    peaks = []
    for tracked in (False, True):
        model = tiny_llama()
        chosen = optimizer(model.parameters(), lr=1e-3)
        tokens = torch.zeros(4, 64, dtype=torch.long)

        def step(model=model, chosen=chosen, tokens=tokens):
            loss = model(input_ids=tokens, labels=tokens).loss
            if clear_first:  # after the forward pass: the last step's gradients lie beside its activations
                chosen.zero_grad()
            loss.backward()
            chosen.step()
            if not clear_first:
                chosen.zero_grad()

        if tracked:
            tracker = MemTracker()
            tracker.track_external(model, chosen)
            with tracker:
                step()
                tracker.reset_mod_stats()
                step()
            told = next(iter(tracker.get_tracker_snapshot("peak").values()))
            peaks.append({str(getattr(kind, "value", kind)): value for kind, value in told.items()})
        else:
            seen = observe(model, chosen, measured_step=1)
            for _ in range(2):
                with seen.step():
                    step()
            peaks.append(seen.memory | {"numbers": sum(p.numel() for p in model.parameters())})
    return peaks


@pytest.mark.parametrize(("optimizer", "clear_first"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_llama_bytes_and_peak_against_pytorchs_tracker(optimizer, clear_first):
    probe, tracker = launch(against_the_tracker, optimizer, clear_first, ranks=1).results[0]
    weights = 4 * probe["numbers"]
    buffers = probe["parameters"] - weights
    assert 0 < buffers <= 128  # the rotary frequencies
    assert probe["gradients"] == weights
    layers = 2 * 9 + 3  # parameters, and so AdamW's step counters
    assert probe["optimizer_state"] == (2 * weights + 4 * layers if optimizer is torch.optim.AdamW else 0)
    assert probe["peak"] == tracker["Total"]


def test_tied_weights_are_counted_once():
    tied, untied = tiny_llama(tied=True), tiny_llama()
    table = 512 * 128 * 4
    assert tensor_bytes(untied.parameters()) - tensor_bytes(tied.parameters()) == table
    seen = observe(tied, torch.optim.SGD(tied.parameters()), measured_step=0)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with seen.step():
        tied(input_ids=tokens, labels=tokens).loss.backward()
    assert seen.memory["gradients"] == 4 * sum(p.numel() for p in tied.parameters())
    assert tensor_bytes([tied.lm_head.weight, tied.lm_head.weight.T[0]]) == table  # a view too


def test_checkpointing_keeps_less():
    from torch.utils.checkpoint import checkpoint

    kept = {}
    for on in (False, True):
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        seen = observe(model, measured_step=0)
        with seen.step():
            x = torch.ones(8, 32)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if on else layer(x)
            x.sum().backward()
        kept[on] = seen.memory["activations"]
    row = 8 * 32 * 4
    assert kept[False] == 5 * row  # the input and four results
    assert kept[True] == 4 * row  # the four layers' inputs
