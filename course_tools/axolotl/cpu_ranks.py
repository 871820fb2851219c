"""A plugin with which Axolotl trains on CPU ranks as it does on GPUs. With CUDA it does nothing.

In a YAML: ``plugins: [course_tools.axolotl.cpu_ranks.CPURanks]``. Axolotl imports its plugins before anything looks for
devices, so the patches below are applied on import.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from axolotl.integrations.base import BasePlugin
from axolotl.utils import environment
from axolotl.utils.dict import DictDefault

from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes

# Set by Axolotl from the YAML. Accelerate obeys them on accelerators only, and on CPU ranks falls back to plain DDP
# without a word.
SHARDING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG")


def _backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
    """gloo; and the ranks count as accelerators where the YAML asks for what only accelerators are given."""
    shards = any(os.environ.get(name) == "true" for name in SHARDING)
    return "gloo", DistributedType.MULTI_GPU if shards else DistributedType.MULTI_CPU


def let_cpu_ranks_train() -> None:
    """Make this process's Accelerate and DeepSpeed work on CPU ranks. Does nothing with CUDA or on a second call."""
    if torch.cuda.is_available() or PartialState._prepare_backend is _backend:
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # else a rank's device would be cuda:LOCAL_RANK
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Axolotl asks whether two GPUs reach each other, and catches only the error that a CPU build of PyTorch raises. A
    # CUDA build without a GPU raises another one. True is what Axolotl assumes on a CPU build.
    environment.check_cuda_p2p_support = lambda: True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import deepspeed

        # Else DeepSpeed spends a minute compiling a shared-memory all-reduce, and our count of collectives misses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState._prepare_backend = _backend
    meshes = ParallelismConfig.build_device_mesh
    ParallelismConfig.build_device_mesh = lambda config, device_type: meshes(config, "cpu")


let_cpu_ranks_train()


class CPURanks(BasePlugin):
    """Keeps Axolotl from putting rank n's model on GPU n where there is no GPU."""

    def load_datasets(self, cfg: DictDefault, preprocess: bool = False) -> None:
        """Return None, so that Axolotl loads the data itself. This is its first call after it has read the YAML."""
        if not torch.cuda.is_available():
            cfg.device_map = {"": "cpu"}
            if cfg.load_in_4bit:
                prepare_bitsandbytes()
