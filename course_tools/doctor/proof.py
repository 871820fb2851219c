"""The ten-second proof that the main job works on this machine: a real DDP training, held against one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from course_tools.command_line import ArgumentParser, reports_errors

PARITY = 1e-5  # relative; fp32 gradients summed in another order differ by about 1e-7 after a few steps
WIRE = 0.02  # relative; gloo adds a few hundred bytes of headers to each message


def prove(steps: int = 6) -> bool:
    """Train on one rank and on two, print losses, parity and bytes on the wire. True when everything agrees."""
    from course_lib.launch import launch
    from course_lib.training import ddp, single

    began = time.perf_counter()
    print("Beyond One GPU: the same training on one rank and on two", flush=True)
    two = launch(ddp.train, ranks=2, steps=steps)
    one = launch(single.train, ranks=1, steps=steps, quiet=True)
    alone, outcome = one.results[0], two.results[0]
    print("  one rank ", "  ".join(f"{loss:.5f}" for loss in alone.losses))
    print("  two ranks", "  ".join(f"{loss:.5f}" for loss in outcome.losses))
    worst = max(abs(a / b - 1) for a, b in zip(outcome.losses, alone.losses, strict=True))
    findings = [
        (worst < PARITY, f"losses agree within {worst:.0e} (limit {PARITY:.0e})"),
        (
            (outcome.wrapper, outcome.world_size) == ("DistributedDataParallel", 2),
            f"{outcome.world_size} ranks, model wrapped in {outcome.wrapper}",
        ),
    ]
    predicted = outcome.memory["gradients"]  # 2(n-1)/n times the gradients, and n is 2
    if outcome.wire_bytes is not None:
        off = outcome.wire_bytes / predicted - 1
        says = f"each rank sent {outcome.wire_bytes:,.0f} bytes a step, predicted {predicted:,} ({off:+.2%})"
        findings.append((abs(off) < WIRE, says))
    for good, says in findings:
        print("  ok  " if good else "  NOT ", says)
    print(f"  {time.perf_counter() - began:.1f} s")
    return all(good for good, _ in findings)


@reports_errors
def main(argv: Sequence[str]) -> int:
    """``beyond proof``: exit code 0 when everything agrees, 1 otherwise."""
    ArgumentParser(prog="beyond proof", description=__doc__).parse_args(argv)
    return 0 if prove() else 1
