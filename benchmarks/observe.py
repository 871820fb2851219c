"""Each instrument beside a second one, and what observing costs.

1. The same step as two instruments see it that know nothing of each other.
2. A run of 30 DDP steps of a tiny Llama with all that `launch` and `observe` record, against none of it.

    python benchmarks/observe.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

RANKS, STEPS = 2, 30


def steps_by_turns() -> dict[str, list[tuple[float, float]]]:
    """(processor seconds, seconds) a DDP step of a tiny Llama: plain, observed, and with its memory measured.

    Observed: all that a launch always records, and ``seen.step``. Plain: neither. By turns, so that whatever else the
    machine does meanwhile meets both.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.models import tiny_llama
    from course_lib.observe import collectives, observe

    recorder = collectives._installed  # the launch's own
    recorder.remove()
    tokens = torch.zeros(4, 128, dtype=torch.long)
    model = DistributedDataParallel(tiny_llama(), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    took: dict[str, list[tuple[float, float]]] = {}
    for turn in range(32):
        for name in ("plain", "observed", "measured") if turn % 5 == 4 else ("plain", "observed"):
            seen = observe(model, optimizer, measured_step=0 if name == "measured" else 1)
            if name != "plain":
                recorder.install()
            busy, began = time.process_time(), time.perf_counter()
            if name == "plain":
                step()
            else:
                with seen.step(tokens=512):
                    step()
            took.setdefault(name, []).append((time.process_time() - busy, time.perf_counter() - began))
            if name != "plain":
                recorder.remove()
    return {name: pairs[2:] if name != "measured" else pairs for name, pairs in took.items()}


def memory_seen(model: Any, optimizer: Any, batch: Any, step: Callable[[], None]) -> dict[str, int]:
    """Bytes of one step as every instrument of memory sees it, the batch's own left out; `step` leaves no gradients."""
    import torch
    from torch.backends import mkldnn

    from course_lib.observe import MemoryProbe, tensor_bytes
    from course_lib.observe.fake import LiveStorages
    from course_lib.observe.memory import training_tensors

    step()  # the optimizer's states and FSDP2's buffers are there after it
    at_rest = training_tensors(model, optimizer)
    probe = MemoryProbe(model, optimizer)
    with probe.measure():
        step()
    with LiveStorages() as live:
        live.hold([*at_rest, batch])
        step()
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with mkldnn.flags(enabled=False), torch.profiler.profile(profile_memory=True, activities=only_cpu) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    totals = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda event: event.start_ns()))
    return {
        "counted": live.highest - batch.nbytes,
        "gloo, counted": live.gloo_copies,
        "probe": probe.bytes["peak"],
        "gloo, probe": probe.bytes["gloo_copies"],
        "profiler": tensor_bytes(at_rest) + max(totals),
    }


def sharded_step() -> dict[str, Any]:
    """A step of FSDP2 on a tiny Llama, on the ranks that are there, as every instrument sees it."""
    import torch

    from course_lib.models import tiny_llama
    from course_lib.observe import WireMeter, record_collectives, trace_step
    from course_lib.training.fsdp import shard

    model, ids = shard(tiny_llama()), torch.zeros(2, 64, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    memory = memory_seen(model, optimizer, ids, step)
    with record_collectives() as issued, WireMeter() as wire:
        step()
    spans = trace_step(step)
    model(input_ids=ids, labels=ids).loss.backward()
    return memory | {
        "collectives": len(issued),
        "spans of collectives": sum(span.kind == "collective" for span in spans),
        "wire": wire.bytes,
        # gloo runs a reduce-scatter as an all-reduce
        "ring": sum(c.wire_bytes * (2 if c.kind == "reduce_scatter" else 1) for c in issued),
    }


def compare() -> None:
    """Print a table: an instrument, what it saw, a second one, what that saw."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from course_lib.launch import launch
    from course_lib.memory import PRESETS, estimate
    from course_lib.models import llama
    from course_lib.observe import MemoryProbe
    from course_lib.observe.fake import count_step, fake_ranks, fake_tensors

    real = launch(sharded_step, ranks=RANKS, timeout=300, quiet=True).results
    with fake_ranks(RANKS):
        fake = sharded_step()
    first = real[0]

    def prepared() -> tuple[Any, ...]:
        model = llama(PRESETS["tiny"])
        return model, torch.optim.AdamW(model.parameters(), fused=True), torch.zeros(4, 128, dtype=torch.long)

    def step(model: Any, optimizer: Any, ids: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    training = prepared()
    step(*training)
    probe = MemoryProbe(*training[:2])
    with probe.measure():
        step(*training)
    tracker = MemTracker()
    tracker.track_external(*training)
    with tracker:
        training[0](input_ids=training[2], labels=training[2]).loss.backward()
    tracked = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"] - training[2].nbytes
    with fake_tensors():
        counted = count_step(*(fakes := prepared()), fakes[0].model.layers[0])
    need = estimate("tiny", precision="fp32", micro_batch_size=4, seq_len=128, device="cpu")
    rows = [
        ("one rank: MemoryProbe's peak", probe.bytes["peak"], "PyTorch's MemTracker", tracked),
        ("one rank: LiveStorages on fake tensors", counted.peak, "MemoryProbe on real ones", probe.bytes["peak"]),
        ("one rank: the estimate's peak", need.peak, "MemoryProbe", probe.bytes["peak"]),
        ("FSDP2: MemoryProbe's peak on gloo", first["probe"], "on the fake backend", fake["probe"]),
        ("FSDP2: LiveStorages on gloo", first["counted"], "on the fake backend", fake["counted"]),
        ("FSDP2: LiveStorages on gloo", first["counted"], "MemoryProbe", first["probe"]),
        ("FSDP2 on the fake backend: MemoryProbe", fake["probe"], "the profiler", fake["profiler"]),
        ("FSDP2 on gloo: peak + gloo's copies", first["probe"] + first["gloo, probe"], "the profiler, missing frees", first["profiler"]),
        ("FSDP2: gloo's copies on the fake backend", fake["gloo, probe"], "none", 0),
        ("FSDP2: collectives recorded", first["collectives"], "the profiler's spans", first["spans of collectives"]),
        ("FSDP2: bytes on the wire, TCP's counters", first["wire"], "the ring's formula", round(first["ring"])),
    ]  # fmt: skip
    for name, value, second, other in rows:
        print(f"  {name:44}{value:>12,}   {second:28}{other:>12,}{value / other - 1 if other else 0:+9.2%}")


def main() -> None:
    from course_lib.launch import launch

    compare()
    took = launch(steps_by_turns, ranks=RANKS, timeout=300, quiet=True).results[0]
    median = {name: [statistics.median(clock) for clock in zip(*pairs, strict=True)] for name, pairs in took.items()}
    for clock, unit in enumerate(("processor time", "time")):
        plain, observed, measured = (median[name][clock] for name in ("plain", "observed", "measured"))
        cost = ((STEPS - 1) * observed + measured) / (STEPS * plain) - 1
        print(
            f"observing costs {cost:.1%} of {unit} (a plain step: {1e3 * plain:.1f} ms; goal: under 10 % of processor time)"
        )


if __name__ == "__main__":
    main()
