"""ZeRO with DeepSpeed: every rank keeps a share of what each rank of DistributedDataParallel keeps whole.

Stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 also weights (Rajbhandari et al. 2020, "ZeRO",
arXiv:1910.02054); stage 0 is data parallelism. `course_lib.observe.holdings` shows what a rank holds beyond its
share."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.observe.holdings import ZeroProbe
from course_lib.training.command_line import run
from course_lib.training.finetune.activation_checkpointing import set_checkpointing
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.resume import check_saving, load_newest
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
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    offload: str = "none",
    nvme_path: str = "",
    activation_checkpointing: str = "none",
    hidden: int = 128,
    layers: int = 4,
    bucket_elements: int = BUCKET_ELEMENTS,
    prefetch_elements: int = 0,
    config_file: str = "",
    checkpoint_dir: str = "",
    save_every: int = 0,
    resume: bool = False,
    expect_ranks: int = 0,
    seed: int = 0,
) -> Outcome:
    """Train the tiny Llama under DeepSpeed's ZeRO; the default process group must be up.

    Args:
        steps: optimizer steps; with `resume`, those of the whole training.
        seq_len: tokens a sequence.
        stage, global_batch, lr, gradient_accumulation_steps, max_grad_norm, precision, offload, nvme_path, bucket_elements, prefetch_elements:
            as in `zero_config`, which writes DeepSpeed's configuration from them.
        config_file: a DeepSpeed configuration to train by instead: then of these only `lr` counts, where it names no
            optimizer.
        activation_checkpointing: "none", "selective" or "full": which activations are computed twice instead of kept.
        hidden, layers: of the model.
        checkpoint_dir: a folder to save in, every `save_every` steps, and to `resume` from.
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
    check_saving(checkpoint_dir, save_every, resume)
    if config_file:
        config = read_config(config_file)
        check_config(config, ranks=world_size)
        config.setdefault("optimizer", adamw(lr))
        config = config if torch.cuda.is_available() else without_compiling(config)
    else:
        config = zero_config(
            stage,
            ranks=world_size,
            global_batch=global_batch,
            gradient_accumulation_steps=gradient_accumulation_steps,
            lr=lr,
            max_grad_norm=max_grad_norm,
            precision=precision,
            offload=offload,
            nvme_path=nvme_path,
            bucket_elements=bucket_elements,
            prefetch_elements=prefetch_elements,
            compiled=torch.cuda.is_available(),
        )
    global_batch, _, gradient_accumulation_steps = batch_sizes(config, ranks=world_size)
    micro_batch_size(
        steps=steps,
        global_batch=global_batch,
        ranks=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    model = tiny_llama(hidden=hidden, layers=layers, seed=seed)
    set_checkpointing(model, activation_checkpointing)
    engine = initialize(model, config)
    data = {"global_batch": global_batch, "seq_len": seq_len, "seed": seed}
    first = load_newest(checkpoint_dir, data, engine=engine) if resume else 0
    if first >= steps:
        raise ValueError(f"steps={steps}: the newest checkpoint has taken {first} already, so give more.")

    observation = observe(probe=ZeroProbe(engine))
    losses, norms = [], []
    for step in range(first, steps):
        batch = sample_batch(
            step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size, seed=seed
        ).to(engine.device)
        with observation.step(tokens=batch.numel()):
            total = torch.zeros((), device=engine.device)
            for micro_batch in batch.chunk(gradient_accumulation_steps):
                loss = engine(input_ids=micro_batch, labels=micro_batch).loss
                engine.backward(loss)  # divides by the micro-batches, and reduces gradients as the stage asks
                engine.step()  # does nothing before the last micro-batch
                total += loss.detach() / gradient_accumulation_steps
        dist.all_reduce(total, op=dist.ReduceOp.SUM)  # for the report only
        losses.append(total.item() / world_size)
        if engine.gradient_clipping():
            norms.append(float(engine.get_global_grad_norm()))  # before clipping, of the whole model
        if save_every and (step + 1) % save_every == 0:
            from course_lib.checkpoints import save  # few runs need it

            save(checkpoint_dir, step + 1, kind="zero", engine=engine, extra=data)
    return outcome(
        observation,
        losses,
        type(engine).__name__,
        stage=engine.zero_optimization_stage(),
        zero_optimizer=type(engine.optimizer).__name__,
        config=config,
        on_host=observation.probe.on_host(),
        sent=sum(observation.sent) or None,
        local_elements=local_elements(engine),
        first_step=first,
        gradient_norms=norms,
    )


if __name__ == "__main__":
    # the deepspeed launcher adds --local_rank=0 to the words of every process
    run(train, [word for word in sys.argv[1:] if not word.startswith("--local_rank")])
