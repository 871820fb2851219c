"""FSDP2 with Hugging Face Accelerate's plugin.

The loop is that of ``course_lib.training.accelerate_ddp``; only the Accelerator's plugin differs."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader

from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
from course_lib.observe import observe
from course_lib.on_cpu.accelerate import let_cpu_ranks_shard
from course_lib.training.command_line import run
from course_lib.training.finetune.building import build_optimizer
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.sharded.fsdp_sharding import proof
from course_lib.validation import pick

PRECISIONS = {"fp32": "no", "bf16-mixed": "bf16"}  # ours -> Accelerate's mixed_precision

# The same as a file for `accelerate launch --config_file`; JSON is YAML. num_processes is the number of ranks.
CONFIGURATION = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}


def train(
    *,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    reshard_after_forward: bool = True,
    offload: bool = False,
    hidden: int = 128,
    layers: int = 4,
    expect_ranks: int = 0,
) -> Outcome:
    """Train the tiny Llama with Accelerate's FSDP2 plugin.

    Started by ``launch(accelerate_fsdp.train, ...)``, by torchrun, or by ``accelerate launch --config_file`` with
    ``CONFIGURATION`` in a file: then the launcher's settings count, and precision, reshard_after_forward and offload here do not.

    Args:
        steps, global_batch, seq_len, lr, gradient_accumulation_steps: as in ``course_lib.training.accelerate_ddp``.
        max_grad_norm: greatest norm of the whole model's gradients; 0 does not clip.
        precision: "fp32" or "bf16-mixed"; Accelerate's also sums the gradients in bf16.
        reshard_after_forward: after the forward pass; Accelerate's plugin takes no number.
        offload: shards, gradients and moments on the host.
        hidden, layers: of the model.
        expect_ranks: refuse to train on another number of ranks; 0 takes any from 2 on.

    Raises:
        ValueError: no steps, an unknown precision, or the batch does not divide into ranks times micro-batches.
        RuntimeError: one process, or a model that is not sharded, came instead.
    """
    pick("precision", precision, PRECISIONS)
    accelerator = make_accelerator(
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        offload=offload,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    world_size = accelerator.num_processes
    if world_size != expect_ranks if expect_ranks else world_size < 2:
        raise RuntimeError(
            f"asked for FSDP2 on {expect_ranks or 'several'} ranks and Accelerate gave {world_size}. Launch with "
            "`torchrun --nproc_per_node N` or `accelerate launch --multi_gpu --num_processes N`, also without GPUs."
        )
    micro_batch = micro_batch_size(
        steps=steps,
        global_batch=global_batch,
        ranks=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    model = tiny_llama(hidden=hidden, layers=layers)
    optimizer = build_optimizer(model.parameters(), "adamw", lr)
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len)
    loader = DataLoader(rows, batch_size=micro_batch, shuffle=False)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader
    )  # shards, and gives the optimizer the shards
    sharded = proof(model, world_size, optimizer)
    observation = observe(model, optimizer.optimizer)
    losses, norms, total = [], [], torch.zeros((), device=accelerator.device)
    batches = iter(loader)
    for _ in range(steps):
        with observation.step(tokens=micro_batch * gradient_accumulation_steps * seq_len):
            for _ in range(gradient_accumulation_steps):
                batch = next(batches)
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    if max_grad_norm and accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)))
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.detach() / gradient_accumulation_steps
        losses.append(accelerator.reduce(total, "mean").item())
        total = torch.zeros_like(total)
    return outcome(
        observation,
        losses,
        type(model).__name__,
        **sharded,
        gradient_norms=norms,
        distributed_type=str(accelerator.distributed_type),
        device=str(accelerator.device),
    )


def make_accelerator(
    *, precision: str, reshard_after_forward: bool, offload: bool, gradient_accumulation_steps: int
) -> Accelerator:
    """An Accelerator that shards: as the launcher's configuration says, else as the arguments do."""
    let_cpu_ranks_shard()
    configured = "FSDP_VERSION" in os.environ  # set by the launcher; ACCELERATE_USE_FSDP also by an earlier Accelerator
    plugin = (
        None
        if configured
        else FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=reshard_after_forward,
            cpu_offload=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else None,
            cpu_ram_efficient_loading=False,  # every rank builds the same model here
        )
    )
    mixed = {} if configured else {"mixed_precision": PRECISIONS[precision]}
    return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=gradient_accumulation_steps, **mixed)


if __name__ == "__main__":
    run(train, own_group=False)
