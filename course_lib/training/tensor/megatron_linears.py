"""Megatron-core's own parallel layers beside the course's, on the same weights: outputs, gradients, collectives.

Megatron-core (NVIDIA, https://github.com/NVIDIA/Megatron-LM, 0.19.2 tried) is written for GPUs; its linear layers, its
embedding and its loss run on CPU ranks over gloo as they are. Sequence parallelism does not: its buffers want CUDA.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.observe import record_collectives
from course_lib.training.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from course_lib.training.tensor.loss import vocab_parallel_cross_entropy

INSTALL = "pip install --no-deps --ignore-requires-python megatron-core==0.19.2"
NAMES = ("the embedding", "the columns", "the rows", "the output layer")
NEEDS_TRITON = "megatron.core.transformer.moe.ops.paged_stash"


@dataclass
class Comparison:
    """What `compare` found on one rank.

    Attributes:
        version: of Megatron-core.
        differences: largest absolute difference between Megatron's and the course's, by what was compared; "whole: …"
            between the course's and the same layers uncut.
        ours, theirs: collectives of the forward and backward pass in order: (kind, bytes this rank put in).
    """

    version: str
    differences: dict[str, float]
    ours: list[tuple[str, int]]
    theirs: list[tuple[str, int]]


def megatron_core() -> ModuleType:
    """Import megatron.core, on a machine without triton too. Import it in ranks: it changes how torch loads storages.

    On the way to the linear layers Megatron imports everything, and one file of it imports triton (1 GB, of use on GPUs
    only) with no way around: the kernels that page a mixture of experts' activations out. Without triton an empty module
    stands in for that one file; triton itself stays missing, so that everything else takes its own way without it.

    Raises:
        ImportError: Megatron-core is not installed; the message has the line that installs it.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ImportError(f"Megatron-core is not installed: type `{INSTALL}`.")
    if importlib.util.find_spec("triton") is None and NEEDS_TRITON not in sys.modules:
        kernels = ModuleType(NEEDS_TRITON, "Empty: these kernels need triton.")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules[NEEDS_TRITON] = kernels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are missing: true, and nothing to act on
        import megatron.core
    return megatron.core


def compare(
    *, hidden: int = 128, intermediate: int = 352, vocab: int = 256, batch: int = 4, seq_len: int = 32, seed: int = 0
) -> Comparison:
    """Embedding, two linear layers with SiLU between, output layer and loss: Megatron's, the course's, and uncut.

    The default process group must be up; its ranks are the tensor-parallel ones. Fp32, no biases.

    Raises:
        ImportError: as `megatron_core`.
        ValueError: intermediate or vocab that do not divide over the ranks.
    """
    core = megatron_core()
    from megatron.core import parallel_state, tensor_parallel

    # advice for overlap on GPUs, given on a CPU as well
    warnings.filterwarnings("ignore", "When using async grad allreduce", UserWarning)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = [
            nn.Embedding(vocab, hidden),
            nn.Linear(hidden, intermediate, bias=False),
            nn.Linear(intermediate, hidden, bias=False),
            nn.Linear(hidden, vocab, bias=False),
        ]
        ids, labels = torch.randint(vocab, (2, batch, seq_len))

    ours = [
        VocabParallelEmbedding(whole[0], group),
        ColumnParallelLinear(whole[1], group),
        RowParallelLinear(whole[2], group),
        ColumnParallelLinear(whole[3], group),
    ]
    config = core.ModelParallelConfig(
        tensor_model_parallel_size=group.size(), use_cpu_initialization=True, params_dtype=torch.float32
    )
    options: dict[str, Any] = dict(config=config, init_method=lambda weight: weight, tp_group=group)
    linear: dict[str, Any] = dict(options, bias=False, skip_bias_add=False)
    theirs = [
        tensor_parallel.VocabParallelEmbedding(vocab, hidden, **options),
        tensor_parallel.ColumnParallelLinear(hidden, intermediate, gather_output=False, **linear),
        tensor_parallel.RowParallelLinear(intermediate, hidden, input_is_parallel=True, **linear),
        tensor_parallel.ColumnParallelLinear(hidden, vocab, gather_output=False, **linear),
    ]
    with torch.no_grad():
        for mine, megatrons in zip(ours, theirs, strict=True):
            megatrons.weight.copy_(mine.weight)

    def their_loss(logits: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.vocab_parallel_cross_entropy(logits, labels).mean()

    found, sent = {}, {}
    for name, layers, loss in (
        ("ours", ours, lambda logits: vocab_parallel_cross_entropy(logits, labels, group)),
        ("theirs", theirs, their_loss),
        ("whole", whole, lambda logits: F.cross_entropy(logits.flatten(0, 1), labels.flatten())),
    ):
        with record_collectives() as issued:
            found[name] = _one_pass(layers, loss, ids)
        sent[name] = [(c.kind, c.bytes) for c in issued]
    differences = {key: _apart(found["theirs"][key], ours_) for key, ours_ in found["ours"].items()}
    for key, uncut in found["whole"].items():
        differences[f"whole: {key}"] = _apart(_own(uncut, found["ours"][key], group), found["ours"][key])
    parallel_state.destroy_model_parallel()
    version = core.__version__.partition("+")[0]  # it adds the revision of whatever git repository this runs in
    return Comparison(version, differences, sent["ours"], sent["theirs"])


def _one_pass(
    layers: list[nn.Module], loss_of: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Forward and backward; everything that is worth comparing."""
    embedding, up, down, head = layers
    x = embedding(ids)
    y = _first(down(F.silu(_first(up(x)))))
    loss = loss_of(_first(head(y)))
    x.retain_grad()
    loss.backward()
    gradients = {f"gradient of {name}": layer.weight.grad for name, layer in zip(NAMES, layers, strict=True)}
    return {"embedding": x.detach(), "output": y.detach(), "loss": loss.detach(), "gradient of x": x.grad, **gradients}


def _first(output: Any) -> torch.Tensor:
    """Megatron's linear layers return (output, bias)."""
    return output[0] if isinstance(output, tuple) else output


def _own(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The share of a whole weight's gradient that lies where `part` does."""
    for dim, (size, mine) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if size != mine:
            return whole.chunk(group.size(), dim)[group.rank()]
    return whole


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


if __name__ == "__main__":
    from course_lib.launch import process_group

    with process_group():
        result = compare()
        if dist.get_rank() == 0:
            print(json.dumps(asdict(result)))
