"""ZeRO with DeepSpeed: every rank keeps a share of what each rank of DistributedDataParallel keeps whole.

Stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 also weights (Rajbhandari et al. 2020, "ZeRO",
arXiv:1910.02054).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.observe.holdings import ZeroProbe
from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed
from course_lib.training.command_line import run
from course_lib.training.outcome import Outcome, outcome


def train(config: str | dict[str, Any], *, steps: int = 20, seq_len: int = 128, lr: float = 1e-3) -> Outcome:
    """Train the tiny Llama under DeepSpeed; the default process group must be up.

    Args:
        config: DeepSpeed's configuration, or the path of its JSON file: batch sizes, precision, ZeRO's stage, offload.
        steps: optimizer steps.
        seq_len: tokens per sequence.
        lr: AdamW's learning rate.

    Raises:
        RuntimeError: nothing is sharded: one rank, or stage 0.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    prepare_deepspeed()  # on CPU ranks: it uses gloo, and compiles nothing
    import deepspeed  # here: a notebook's own process needs none of it

    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    local_elements = assert_sharded(engine)  # raises where nothing is
    global_batch, micro_batches = engine.train_batch_size(), engine.gradient_accumulation_steps()
    observation, losses = observe(probe=ZeroProbe(engine)), []
    for step in range(steps):
        share = sample_batch(step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size)
        share = share.to(engine.device)
        with observation.step(tokens=share.numel()):
            total = torch.zeros((), device=engine.device)
            for micro_batch in share.chunk(micro_batches):
                loss = engine(input_ids=micro_batch, labels=micro_batch).loss
                engine.backward(loss)  # divides by the number of micro-batches, and reduces the gradients
                engine.step()  # does nothing before the last micro-batch; then steps, and clears the gradients
                total += loss.detach() / micro_batches
        dist.all_reduce(total)  # only to report the loss of the whole batch
        losses.append(total.item() / world_size)
    on_host = observation.probe.on_host()
    return outcome(observation, losses, type(engine).__name__, local_elements=local_elements, on_host=on_host)


if __name__ == "__main__":
    # the deepspeed launcher adds --local_rank to the words of every process
    run(train, [word for word in sys.argv[1:] if not word.startswith("--local_rank")])
