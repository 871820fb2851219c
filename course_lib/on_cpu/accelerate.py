"""Let Accelerate shard on CPU ranks. With CUDA nothing here does anything."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def let_cpu_ranks_shard() -> None:
    """Call before ``Accelerator(fsdp_plugin=...)`` or ``Accelerator(deepspeed_plugin=...)``; do not pass ``cpu=True``.

    Accelerate looks at a sharding plugin only where its ranks sit on accelerators. With ``cpu=True`` it drops the plugin
    without a word and wraps in plain DDP, without it every rank believes that it is alone. Here the ranks join as CPU
    ranks, over gloo and with the CPU as their device, and are then told to count as accelerators.
    """
    if torch.cuda.is_available():
        return
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier Accelerator of this process has left its kind
    if PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
