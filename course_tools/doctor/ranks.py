"""Two real ranks and one all-reduce between them, over what this machine would use."""

from __future__ import annotations

from course_tools.doctor.asking import Answer, ask
from course_tools.doctor.findings import OK, PROBLEM, Finding

ALL_REDUCE = """
import json
from course_lib.launch import launch
def add():
    import torch, torch.distributed as dist
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    x = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(x)
    return x[0].item(), dist.get_backend()
run = launch(add, ranks=2, quiet=True, timeout=35)
print(json.dumps({"sums": [r[0] for r in run.results], "backend": run.results[0][1]}))
"""


def all_reduce() -> Finding:
    """Launch two ranks and add."""
    return judged(ask(ALL_REDUCE, seconds=40.0))


def judged(answer: Answer) -> Finding:
    """`answer` to ALL_REDUCE."""
    mend = (
        "A firewall or a security program may keep processes of this machine from talking over the loopback interface; in a "
        "container, allow it."
    )
    if answer.failed:
        return answer.finding("two ranks", "No lesson from 3 on runs.", mend)
    if answer.told["sums"] != [3.0, 3.0]:
        return Finding(
            PROBLEM, "two ranks", f"1 + 2 gave {answer.told['sums']}", "No lesson from 3 on can be trusted.", mend
        )
    return Finding(OK, "two ranks", f"an all-reduce over {answer.told['backend']} adds up")
