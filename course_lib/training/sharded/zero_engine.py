"""A DeepSpeed engine around a model, with proof that it does what its configuration says.

On CPU ranks DeepSpeed's own shared-memory all-reduce stays off: compiling it takes a minute, and its traffic would be
invisible to everything that counts collectives."""

from __future__ import annotations

import copy
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from course_lib.launch import warm_on_cpu
from course_lib.training.sharded.zero_config import Config, check_config, without_compiling

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


# What a rank imports before its first step with DeepSpeed. Of its optimizers Muon has itself compiled while it is
# imported, which brings torch's compiler along: three quarters of the time.
SLOW = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "course_lib.training.sharded.zero_probe")


def warm_deepspeed() -> None:
    """Start the server that ranks are forked from, with DeepSpeed imported where that is safe: 2.5 s of CPU less a rank."""
    warm_on_cpu(*SLOW)


def initialize(model: torch.nn.Module, config: Config) -> DeepSpeedEngine:
    """DeepSpeed's engine around `model`, sharded as `config` says; the default process group must be up.

    Raises:
        ValueError: the configuration is wrong (see `check_config`), or asks for what this machine has not.
        RuntimeError: DeepSpeed came up with something else than what was asked for.
    """
    ranks, stage = dist.get_world_size(), (config.get("zero_optimization") or {}).get("stage", 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = copy.deepcopy(config) if torch.cuda.is_available() else without_compiling(config)
    check_config(config, ranks=ranks, parameters=sum(p.numel() for p in trained))
    deepspeed = prepared_deepspeed()
    check_machine(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    assert_sharded(engine, stage=stage, ranks=ranks)
    return engine


def prepared_deepspeed() -> Any:
    """The package, set up for this machine: its process group is the one that is up, and on CPUs nothing is compiled.

    Raises:
        ModuleNotFoundError: it is not installed.
        RuntimeError: no process group is up.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group is up: run this inside `launch(...)`, or in `with process_group():`.")
    # DeepSpeed calls collectives by names that newer PyTorch renames, which warns at every call of every rank
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # else it asks for GPUs of every make, and takes the first that imports
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if "nccl" in dist.get_backend() else "gloo")
    return deepspeed


def check_machine(config: Config) -> None:
    """Raises ValueError for what the configuration asks of this machine in vain: fp16 arithmetic, a disk to swap to."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if (config.get("fp16") or {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise ValueError(
            'This machine does not compute in fp16, and DeepSpeed does not pretend to: take "bf16" or "fp32".'
        )
    zero = config.get("zero_optimization") or {}
    if any((zero.get(name) or {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param")):
        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise ValueError(
                'Offloading to "nvme" needs libaio, which is not here: install it (libaio-dev on Debian and Ubuntu), or '
                'offload to "cpu".'
            )


def local_elements(engine: Any) -> int:
    """Elements that this rank's optimizer steps, padding included."""
    outer = engine.optimizer
    if hasattr(outer, "fp16_partitioned_groups_flat_numel"):  # stage 3 hands them to Adam one group at a time
        return sum(outer.fp16_partitioned_groups_flat_numel)
    return sum(p.numel() for group in getattr(outer, "optimizer", outer).param_groups for p in group["params"])


def assert_sharded(engine: Any, *, stage: int, ranks: int) -> None:
    """Raises RuntimeError where a wrapper is not DeepSpeed's, has another stage or too few ranks, or shards nothing."""
    name = type(engine).__name__
    if name != "DeepSpeedEngine":
        raise RuntimeError(
            f"asked for ZeRO stage {stage} and got {name}, where every rank holds everything: nothing would be sharded, "
            "and nothing would say so."
        )
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != ranks:
        raise RuntimeError(f"asked for {ranks} ranks and got {world_size}.")
    if engine.zero_optimization_stage() != stage:
        raise RuntimeError(f"asked for ZeRO stage {stage} and DeepSpeed runs stage {engine.zero_optimization_stage()}.")
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if p.requires_grad)
    # alignment and padding add a few elements a weight at most
    most = whole // ranks + ranks * (2 + sum(1 for _ in engine.module.parameters())) if stage else whole
    if (mine := local_elements(engine)) > most:
        raise RuntimeError(
            f"ZeRO stage {stage} over {ranks} ranks, and this rank's optimizer steps {mine:,} of {whole:,} weights: "
            "that is more than its share."
        )
