"""ZeRO with Hugging Face Accelerate's DeepSpeed plugin: the loop of `accelerate_ddp`, sharded by configuration."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader

from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
from course_lib.observe import observe
from course_lib.observe.holdings import ZeroProbe
from course_lib.on_cpu.accelerate import let_cpu_ranks_shard
from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome


def train(*, stage: int = 2, steps: int = 20, global_batch: int = 8, seq_len: int = 128) -> Outcome:
    """Train the tiny Llama with Accelerate's DeepSpeed plugin; ``stage`` is ZeRO's, 1 to 3, the rest as in `accelerate_ddp`.

    Raises:
        RuntimeError: nothing is sharded: one rank, or a model that DeepSpeed has not wrapped.
    """
    let_cpu_ranks_shard()
    config = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": "auto",  # Accelerate asks the loader
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 200_000,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    prepare_deepspeed()
    micro_batch = micro_batch_size(steps, global_batch, accelerator.num_processes)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len)
    loader = DataLoader(rows, batch_size=micro_batch)  # per rank
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    local_elements = assert_sharded(model)  # raises where nothing is
    observation, losses = observe(probe=ZeroProbe(model)), []
    for batch in loader:
        with observation.step(tokens=batch.numel()):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)  # the engine's backward pass, and its step
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    kind = str(accelerator.distributed_type)
    return outcome(observation, losses, type(model).__name__, local_elements=local_elements, distributed_type=kind)
