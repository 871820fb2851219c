"""ZeRO with DeepSpeed: every rank keeps a share of what DistributedDataParallel's ranks keep whole.

Stage 1 shards the optimizer's state, stage 2 gradients too, stage 3 weights too (Rajbhandari et al. 2020, "ZeRO",
arXiv:1910.02054); stage 0 is data parallelism. What one rank holds beyond its share is told by
`course_lib.observe.deepspeed_memory`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe, sent_bytes
from course_lib.observe.deepspeed_memory import ZeroProbe
from course_lib.training.command_line import run
from course_lib.training.finetune.activation_checkpointing import set_checkpointing
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome
from course_lib.training.sharded.zero_config import (
    BUCKET_ELEMENTS,
    adamw,
    batch_sizes,
    check_config,
    read_config,
    without_compiling,
    zero_config,
)
from course_lib.training.sharded.zero_engine import initialize, local_elements


def train(
    *,
    stage: int = 2,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    accumulate: int = 1,
    clip: float = 0.0,
    precision: str = "fp32",
    offload: str = "none",
    nvme_path: str = "",
    checkpointing: str = "none",
    hidden: int = 128,
    layers: int = 4,
    bucket_elements: int = BUCKET_ELEMENTS,
    prefetch_elements: int = 0,
    config_file: str = "",
    checkpoints: str = "",
    save_every: int = 0,
    resume: bool = False,
    expect_ranks: int = 0,
    seed: int = 0,
) -> Outcome:
    """Train the tiny Llama under DeepSpeed's ZeRO; the default process group must be up.

    Args:
        steps: optimizer steps; with `resume`, those of the whole training.
        seq_len: tokens a sequence.
        stage, global_batch, lr, accumulate, clip, precision, offload, nvme_path, bucket_elements, prefetch_elements:
            as in `zero_config`, which writes DeepSpeed's configuration from them.
        config_file: a DeepSpeed configuration to train by instead: then of these only `lr` counts, where it names no
            optimizer.
        checkpointing: "none", "selective" or "full": which activations are computed twice instead of kept.
        hidden, layers: of the model.
        checkpoints: a folder to save in, every `save_every` steps, and to `resume` from.
        expect_ranks: refuse to train on another number of ranks; 0 takes what comes. Plain `deepspeed script.py` starts
            one process where it finds no GPU.
        seed: of the weights and of the order of the data.

    Raises:
        ValueError: a choice or a configuration that cannot be.
        RuntimeError: another number of ranks than expected, or a wrapper that shards nothing.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if expect_ranks and world_size != expect_ranks:
        raise RuntimeError(
            f"asked for {expect_ranks} ranks and got {world_size}. Launch with `torchrun --nproc_per_node N` or "
            "`deepspeed --num_gpus N`, also without GPUs."
        )
    if save_every < 0:
        raise ValueError(f"save_every={save_every}: give a number of steps, 0 not to save.")
    if not checkpoints and (save_every or resume):
        raise ValueError("save_every and resume need a folder: give it as checkpoints.")
    if config_file:
        config = read_config(config_file)
        check_config(config, ranks=world_size)
        config.setdefault("optimizer", adamw(lr))
        config = config if torch.cuda.is_available() else without_compiling(config)
    else:
        config = zero_config(
            stage, ranks=world_size, global_batch=global_batch, accumulate=accumulate, lr=lr, clip=clip,
            precision=precision, offload=offload, nvme_path=nvme_path, bucket_elements=bucket_elements,
            prefetch_elements=prefetch_elements, compiled=torch.cuda.is_available(),
        )  # fmt: skip
    global_batch, _, accumulate = batch_sizes(config, ranks=world_size)
    micro_batch_size(steps=steps, global_batch=global_batch, ranks=world_size, accumulate=accumulate)
    model = tiny_llama(hidden=hidden, layers=layers, seed=seed)
    set_checkpointing(model, checkpointing)
    engine = initialize(model, config)
    data = {"global_batch": global_batch, "seq_len": seq_len, "seed": seed}
    first = _resumed(checkpoints, engine, data) if resume else 0
    if first >= steps:
        raise ValueError(f"steps={steps}: the newest checkpoint has taken {first} already, so give more.")

    seen = observe(probe=ZeroProbe(engine))
    losses, norms, sent = [], [], []
    for step in range(first, steps):
        batch = sample_batch(
            step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size, seed=seed
        ).to(engine.device)
        sent.append(sent_bytes())
        with seen.step(tokens=batch.numel()):
            total = torch.zeros((), device=engine.device)
            for micro_batch in batch.chunk(accumulate):
                loss = engine(input_ids=micro_batch, labels=micro_batch).loss
                engine.backward(loss)  # divides by the micro-batches, and reduces gradients as the stage asks
                engine.step()  # does nothing before the last micro-batch
                total += loss.detach() / accumulate
        sent.append(sent_bytes())
        dist.all_reduce(total, op=dist.ReduceOp.SUM)  # for the report only
        losses.append(total.item() / world_size)
        if engine.gradient_clipping():
            norms.append(float(engine.get_global_grad_norm()))  # before clipping, of the whole model
        if save_every and (step + 1) % save_every == 0:
            from course_lib.checkpoints import save  # few runs need it

            save(checkpoints, step + 1, kind="zero", engine=engine, extra=data)
    steps_sent = [b - a for a, b in zip(sent[::2], sent[1::2], strict=True) if a is not None and b is not None]
    late = steps_sent[len(steps_sent) // 2 :]
    return Outcome(
        losses, type(engine).__name__, rank, world_size, seen.median_step, seen.tokens_per_second, seen.memory,
        wire_bytes=sum(late) / len(late) if late else None,
        extra={
            "stage": engine.zero_optimization_stage(),
            "zero_optimizer": type(engine.optimizer).__name__,
            "config": config,
            "on_host": seen.probe.on_host(),
            "sent": sum(steps_sent) if steps_sent else None,
            "local_elements": local_elements(engine),
            "first_step": first,
            "gradient_norms": norms,
        },
    )  # fmt: skip


def _resumed(folder: str, engine: Any, data: dict[str, int]) -> int:
    """Steps done already: the newest whole checkpoint of `folder` is loaded, or nothing where there is none."""
    from course_lib.checkpoints import latest, load

    newest = latest(folder)
    if newest is None:
        return 0
    told = load(newest, engine=engine)
    for name, value in data.items():
        if told[name] != value:
            raise ValueError(f"{name}={value}: {newest} was trained with {told[name]}, another order of the data.")
    return told["step"]


if __name__ == "__main__":
    # the deepspeed launcher adds --local_rank=0 to the words of every process
    run(train, [word for word in sys.argv[1:] if not word.startswith("--local_rank")])
