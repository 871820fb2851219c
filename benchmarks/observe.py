"""What observing costs: a run of 30 DDP steps of a tiny Llama with all that `launch` and `observe` record, against none of it.

python benchmarks/observe.py
"""

from __future__ import annotations

import statistics
import time

RANKS, STEPS = 2, 30


def steps_by_turns() -> dict[str, list[tuple[float, float]]]:
    """(processor seconds, seconds) a DDP step of a tiny Llama: plain, observed, and with its memory measured.

    Observed: all that a launch always records, and ``seen.step``. Plain: neither. By turns, so that whatever else the
    machine does meanwhile meets both.
    """
    import gc

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.models import tiny_llama
    from course_lib.observe import observe
    from course_lib.observe.recorder import Recorder

    recorder = next(o for o in gc.get_objects() if isinstance(o, Recorder))  # the launch's own
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


def main() -> None:
    from course_lib.launch import launch

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
