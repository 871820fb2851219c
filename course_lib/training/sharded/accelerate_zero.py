"""ZeRO with Hugging Face Accelerate's DeepSpeed plugin: the loop of `accelerate_ddp`, sharded by configuration.

Started by `launch(accelerate_zero.train, ...)`, by torchrun, or with the launcher's own settings by
`accelerate launch --use_deepspeed --num_processes 2 --zero_stage 2 -m course_lib.training.sharded.accelerate_zero` and by
`accelerate launch --config_file zero.yaml ...`.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader

from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
from course_lib.observe import observe
from course_lib.observe.holdings import ZeroProbe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.sharded.accelerate_on_cpu import let_cpu_ranks_shard
from course_lib.training.sharded.zero_config import BUCKET_ELEMENTS, check_config, without_compiling, zero_config
from course_lib.training.sharded.zero_engine import assert_sharded, check_machine, local_elements, prepared_deepspeed


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
    hidden: int = 128,
    layers: int = 4,
    bucket_elements: int = BUCKET_ELEMENTS,
    expect_ranks: int = 0,
) -> Outcome:
    """Train the tiny Llama with Accelerate's DeepSpeed plugin.

    Under `accelerate launch` with DeepSpeed the launcher's settings count, and the first four here do not.

    Args:
        stage, precision, offload, bucket_elements: as in `course_lib.training.sharded.zero_config`.
        steps, global_batch, seq_len, lr, gradient_accumulation_steps: as in `course_lib.training.accelerate_ddp`.
        max_grad_norm: longest gradient; 0 clips nothing. The launcher's --gradient_clipping wins.
        hidden, layers: of the model.
        expect_ranks: refuse to train on another number of ranks; 0 takes any from 2 on.

    Raises:
        ValueError: a choice that cannot be, or a batch that does not divide into ranks times micro-batches.
        RuntimeError: one process, or a model that is not sharded, came instead.
    """
    let_cpu_ranks_shard()
    plugin = DeepSpeedPlugin(hf_ds_config=None if _configured() else {"zero_optimization": {"stage": stage}})
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=gradient_accumulation_steps)
    world_size = accelerator.num_processes
    if world_size != expect_ranks if expect_ranks else world_size < 2:
        raise RuntimeError(
            f"asked for ZeRO on {expect_ranks or 'several'} ranks and Accelerate gave {world_size}. Launch with "
            "`torchrun --nproc_per_node N` or `accelerate launch --use_deepspeed --num_processes N`, also without GPUs."
        )
    gradient_accumulation_steps = accelerator.gradient_accumulation_steps
    micro_batch = micro_batch_size(
        steps=steps,
        global_batch=global_batch,
        ranks=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    if not _configured():
        chosen = zero_config(
            stage,
            ranks=world_size,
            global_batch=global_batch,
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_grad_norm=max_grad_norm,
            precision=precision,
            offload=offload,
            bucket_elements=bucket_elements,
        )
        del chosen["optimizer"]  # Accelerate brings the one below
        plugin.deepspeed_config.update(chosen)
    config = plugin.deepspeed_config
    config.update(
        train_batch_size=global_batch,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    config["steps_per_print"] = None  # Accelerate's infinity is no JSON
    if config.get("gradient_clipping", "auto") == "auto":  # DeepSpeed's own choice would be 1.0
        config["gradient_clipping"] = max_grad_norm
    if not torch.cuda.is_available():
        config.update(without_compiling(config))
    model = tiny_llama(hidden=hidden, layers=layers)
    check_config(config, ranks=world_size, parameters=sum(p.numel() for p in model.parameters()))
    prepared_deepspeed()
    check_machine(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len)
    loader = DataLoader(rows, batch_size=micro_batch, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert_sharded(model, stage=config["zero_optimization"]["stage"], ranks=world_size)
    observation = observe(probe=ZeroProbe(model))
    losses, total = [], torch.zeros((), device=accelerator.device)
    batches = iter(loader)
    for _ in range(steps):
        with observation.step(tokens=micro_batch * gradient_accumulation_steps * seq_len):
            for _ in range(gradient_accumulation_steps):
                batch = next(batches)
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)  # the engine's backward, and its step after the last micro-batch
                    optimizer.step()  # nothing: the engine has stepped
                    optimizer.zero_grad()
                total += loss.detach() / gradient_accumulation_steps
        losses.append(accelerator.reduce(total, "mean").item())
        total = torch.zeros_like(total)
    return outcome(
        observation,
        losses,
        type(model).__name__,
        stage=model.zero_optimization_stage(),
        zero_optimizer=type(model.optimizer).__name__,
        config=config,
        on_host=observation.probe.on_host(),
        local_elements=local_elements(model),
        distributed_type=str(accelerator.distributed_type),
        device=str(accelerator.device),
    )


def _configured() -> bool:
    """True where `accelerate launch` has brought a DeepSpeed configuration; an Accelerator sets other variables itself."""
    return "ACCELERATE_CONFIG_DS_FIELDS" in os.environ


if __name__ == "__main__":
    run(train, own_group=False)
