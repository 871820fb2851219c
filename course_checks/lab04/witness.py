"""Run a script and write down what its training does: `python -m course_checks.lab04.witness script.py …`, also by torchrun.

WITNESS is the folder for one file per rank, a line per optimizer step and one at the end; rank 1 dies at step DIES_AT.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course_lib.observe.collectives import Recorder

FEATURES = 12  # of the script's first layer


def main() -> None:
    rank, dies_at = int(os.environ.get("RANK", 0)), int(os.environ.get("DIES_AT", 0))
    file = open(f"{os.environ['WITNESS']}/rank{rank}.jsonl", "w")
    recorder, steps, since = Recorder().install(), 0, 0
    seen: dict[str, Any] = {"ddp": False, "rows": [], "at_once": 0, "tested": 0}

    def forward(module: nn.Module, args: Any) -> None:
        seen["ddp"] |= isinstance(module, DistributedDataParallel)
        if isinstance(module, nn.Linear) and module.in_features == FEATURES:
            numbers = [round(x, 5) for x in args[0][:, 0].tolist()]
            seen["rows" if torch.is_grad_enabled() else "tested"] += (
                numbers if torch.is_grad_enabled() else len(numbers)
            )
            seen["at_once"] = max(seen["at_once"], len(numbers))

    def write() -> None:
        nonlocal since
        sent = sum(c.bytes for c in recorder.log[since:] if c.kind != "barrier")
        since = len(recorder.log)
        file.write(json.dumps(seen | {"sent": sent}) + "\n")
        file.flush()
        seen.update(rows=[], at_once=0)

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        gradient = torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]).double()
        direction = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0)).double()
        seen.update(
            lr=optimizer.param_groups[0]["lr"], norm=gradient.norm().item(), along=(gradient @ direction).item()
        )
        write()
        if rank == 1 and steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(step)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    write()


if __name__ == "__main__":
    main()
