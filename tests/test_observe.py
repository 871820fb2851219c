"""What the observers report, against arithmetic, against PyTorch's own tracker, and against the system's counters."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.observe import WireMeter, observe, tensor_bytes

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


# ------------------------------------------------------------------------------------------------------- collectives
def every_kind() -> None:
    import torch.distributed._functional_collectives as functional

    rank, n = dist.get_rank(), dist.get_world_size()
    x, whole = torch.ones(6), torch.ones(6 * n)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.barrier()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x[:2], group=pair)
    functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather([torch.empty(6) for _ in range(n)], x)
    dist.reduce_scatter_tensor(x, whole)
    dist.reduce(x, 0)
    dist.gather(x, [torch.empty(6) for _ in range(n)] if rank == 0 else None)
    dist.scatter(x, [torch.empty(6) for _ in range(n)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    work = dist.all_reduce(x.double(), async_op=True)
    work.wait()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5))


def test_every_collective_is_seen_with_its_bytes():
    run = launch(every_kind, ranks=3)
    everybody = (0, 1, 2)
    for rank in everybody:
        seen = [(c.kind, c.bytes, c.group) for c in run.collectives if c.rank == rank]
        assert seen == [
            ("all_reduce", 24, everybody),
            ("broadcast", 24, everybody),
            ("barrier", 0, everybody),
            *([("send", 24, everybody)] if rank == 0 else [("recv", 24, everybody)] if rank == 1 else []),
            *([("all_reduce", 8, (0, 2))] if rank != 1 else []),
            ("all_reduce", 24, everybody),
            ("all_gather", 24, everybody),
            ("all_gather", 24, everybody),
            ("reduce_scatter", 72, everybody),
            ("reduce", 24, everybody),
            ("gather", 24, everybody),
            ("scatter", 72 if rank == 0 else 0, everybody),
            ("all_to_all", 72, everybody),
            ("all_reduce", 48, everybody),
            ("all_reduce", 20, everybody),
        ]
        own = [c for c in run.collectives if c.rank == rank]
        assert all(c.seconds > 0 for c in own if c.kind not in ("send", "recv"))
        assert all(a.start < b.start for a, b in zip(own, own[1:], strict=False))


def test_seconds_include_the_wait_for_a_late_rank():
    def late():
        dist.barrier()
        time.sleep(0.4 * dist.get_rank())
        dist.all_reduce(torch.ones(4))

    told = launch(late, ranks=2).collectives
    assert [c.seconds > 0.3 for c in told if c.kind == "all_reduce"] == [True, False]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_on_the_wire(ranks):
    """gloo's all_reduce of 4 MiB: the ring's 2(n-1)/n, and for its messages' headers at most 0.1 % more.

    A measurement that starts while a neighbour still sends the tail of the last all_reduce counts that too: up to 1 %
    was seen, so the median of three is compared.
    """

    def sends():
        value, told = torch.ones(2**20), []
        for _ in range(4):
            dist.all_reduce(value)
            dist.barrier()
            with WireMeter() as wire:
                dist.all_reduce(value)
            told.append(wire.bytes)
        return statistics.median(told[1:])

    run = launch(sends, ranks=ranks)
    formula = 2 * (ranks - 1) / ranks * 2**22
    assert all(formula <= sent <= 1.001 * formula for sent in run.results), [sent / formula for sent in run.results]
    assert all(7.9 < sent / formula < 8.1 for sent in run.wire_bytes)  # the whole function: eight of them
    assert {c.wire_bytes for c in run.collectives if c.kind == "all_reduce"} == {formula}


# ---------------------------------------------------------------------------------------- training: bytes and calls
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
        assert found["fsdp shard"] == weights // 2 and found["fsdp"] == other["fsdp"]
    assert run.memory[0].items() >= run.results[0]["fsdp"].items()  # the last measured step is the launch's own report

    for rank in (0, 1):
        own = [c for c in run.collectives if c.rank == rank]
        barrier = next(i for i, c in enumerate(own) if c.kind == "barrier")
        reduced = [c.bytes for c in own[:barrier] if c.kind == "all_reduce"]
        assert sum(reduced) == 2 * 4 * weights  # two DDP models, four steps
        sharded = Counter((c.kind, c.bytes) for c in own[barrier + 1 :] if c.kind != "broadcast")
        assert sharded == {("all_gather", weights // 2): 4, ("reduce_scatter", weights): 4}
        assert all(c.seconds > 0 for c in own)


def against_the_tracker(optimizer):
    """(what the probe says, what PyTorch's MemTracker says) of the same step of the same Llama."""
    from torch.distributed._tools.mem_tracker import MemTracker

    peaks = []
    for tracked in (False, True):
        model = tiny_llama()
        chosen = optimizer(model.parameters(), lr=1e-3)
        tokens = torch.zeros(4, 64, dtype=torch.long)

        def step(model=model, chosen=chosen, tokens=tokens):
            model(input_ids=tokens, labels=tokens).loss.backward()
            chosen.step()
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


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_llama_bytes_and_peak_against_pytorchs_tracker(optimizer):
    probe, tracker = launch(against_the_tracker, optimizer, ranks=1).results[0]
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
    assert kept[True] == 5 * row  # the four layers' inputs, and while one is computed again its result


# ------------------------------------------------------------------------------------------------- steps, and the cost
def test_step_times_and_tokens():
    seen = observe()
    for pause in (0.2, 0.05, 0.05, 0.05):
        with seen.step(tokens=100):
            time.sleep(pause)
    assert seen.num_steps == 4 and 0.05 <= seen.median_step < 0.08 and seen.memory == {}
    assert seen.tokens_per_second == pytest.approx(100 / seen.median_step)
    with pytest.raises(ValueError, match="measured_step=-1: give the index"):
        observe(measured_step=-1)


def cost_of_observing():
    """Seconds of a 30-step DDP run, observed and not, by turns."""
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.observe.collectives import Recorder

    tokens = torch.zeros(4, 64, dtype=torch.long)
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(6):
        observed = turn % 2 == 1
        recorder = Recorder().install() if observed else None
        model = DistributedDataParallel(tiny_llama())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        began = time.perf_counter()
        seen = observe(model, optimizer) if observed else None
        for _ in range(30):
            if seen is not None:
                with seen.step(tokens=256):
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        took[observed].append(time.perf_counter() - began)
        if recorder is not None:
            assert len(recorder.collect()) > 30 and "peak" in seen.memory
            recorder.remove()
    return took
