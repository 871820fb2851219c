"""DeepSpeed on the ranks that are there, and proof that it shards.

On CPU ranks DeepSpeed's own shared-memory all-reduce stays off: compiling it takes a minute, and whatever counts
collectives would not see its traffic.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist

from course_lib.launch import rank_device, warm_on_cpu

# What a rank imports before its first step with DeepSpeed. Of its optimizers Muon has itself compiled while it is
# imported, which brings torch's compiler along: three quarters of the time.
SLOW = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")


def warm_deepspeed() -> None:
    """Start the server that ranks are forked from, with DeepSpeed imported where that is safe: 2.5 s of CPU less per rank."""
    warm_on_cpu(*SLOW)


def prepare_deepspeed() -> None:
    """Call on every rank before ``deepspeed.initialize``: it joins the process group that is up, and compiles nothing."""
    # DeepSpeed calls collectives by names that newer PyTorch renames, which warns at every call of every rank
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    on_cpu = rank_device().type == "cpu"
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # else it asks for GPUs of every make, and takes the first that imports
    import deepspeed

    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if "nccl" in dist.get_backend() else "gloo")


def assert_sharded(engine: Any) -> int:
    """Raise RuntimeError unless DeepSpeed's engine shards, and this rank's optimizer steps only its share.

    That takes stage 1, 2 or 3, and two ranks: a launcher may have started one that believes it is alone.

    Returns:
        Elements that this rank's optimizer steps, padding included.
    """
    name = type(engine).__name__
    if name != "DeepSpeedEngine":
        raise RuntimeError(f"expected a DeepSpeedEngine, found {name}: every rank holds everything.")
    if not engine.zero_optimization_stage():
        raise RuntimeError("expected ZeRO stage 1, 2 or 3, found stage 0: every rank holds everything.")
    if (ranks := dist.get_world_size()) < 2:
        raise RuntimeError("expected several ranks, found one: it holds everything.")
    outer = engine.optimizer
    if hasattr(outer, "fp16_partitioned_groups_flat_numel"):  # stage 3 hands them to Adam one group at a time
        local = sum(outer.fp16_partitioned_groups_flat_numel)
    else:
        groups = getattr(outer, "optimizer", outer).param_groups
        local = sum(p.numel() for group in groups for p in group["params"])
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    if local > whole // ranks + ranks * (2 + len(trained)):  # padding adds a few elements per weight at most
        raise RuntimeError(
            f"this rank's optimizer steps {local:,} of {whole:,} elements, more than one of {ranks} shares."
        )
    return local
