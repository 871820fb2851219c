"""What a machine's own memory must hold: the model while its processes load it, and all that is offloaded to it."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.memory.parameters import count, held
from course_lib.memory.quantized import adam8bit_bytes, nf4_bytes
from course_lib.memory.settings import Run, RunSettings
from course_lib.memory.shapes import Shape

CHECKPOINT = 2  # bytes a parameter of a checkpoint, in 16 bits


class Host(NamedTuple):
    """Bytes of one machine's memory; the processes themselves, some GiB each, and the data are not among them.

    Attributes:
        loading: while the processes read the checkpoint. training: what is offloaded, from then on.
    """

    loading: int
    training: int

    @property
    def peak(self) -> int:
        return max(self.loading, self.training)


def host_memory(shape: Shape, settings: RunSettings, per_node: int) -> Host:
    """Bytes on one machine with `per_node` of the GPUs.

    With loading="whole" `from_pretrained` reads the checkpoint in every process, 16 bits a parameter. Else one process of a
    machine does that for weights that are sharded (FSDP's cpu_ram_efficient_loading), and weights that are not, and NF4,
    go to the card one tensor at a time.
    Offloaded are, of each trained parameter, DeepSpeed's fp32 copy, gradient and two moments, or FSDP2's weight, gradient
    and moments as they are; with offload="all" the weights too; with offload_activations the inputs of all blocks; and the
    states of a paged optimizer.
    """
    run = settings.run
    gpus = settings.gpus
    here = min(per_node, gpus)
    one_by_one = run.method == "qlora" or "weights" not in run.shards
    readers = here if settings.loading != "sharded" else 0 if one_by_one else 1
    inputs = 0
    if run.offload_activations:  # each block's, of the stage that one GPU has
        tokens = settings.micro_batch_size * settings.seq_len // settings.context_parallel
        inputs = -(-shape.layers // settings.pipeline_parallel) * tokens * shape.hidden * run.stored
    if run.optimizer == "paged_adamw8bit":  # its states move here when the card is short
        trained = held(shape, 1, shape.layers, True, True, run.rank, 1, run.lora_targets)
        paged = sum(adam8bit_bytes(n) * number for n, number in (trained.all_base() if run.full else trained.factors))
        inputs += paged // gpus
    return Host(CHECKPOINT * shape.parameters * readers, offloaded_bytes(shape, run) * here // gpus + inputs * here)


def offloaded_bytes(shape: Shape, run: Run) -> int:
    """Bytes of one copy of the model and of what belongs to it on the host, all machines together."""
    if run.offload == "none":
        return 0
    h = held(shape, 1, shape.layers, True, True, run.rank, 1, run.lora_targets)
    trained = count(h.all_base()) if run.full else count(h.factors)
    # DeepSpeed: fp32 weight, gradient and two moments beside the 16-bit weight. FSDP2's weight is the master copy itself.
    states = (2 * run.state + run.gradient if run.strategy == "fsdp" else 16) * trained
    if run.offload == "optimizer":
        return states
    matrices = run.at_rest * count(h.matrices)
    if run.method == "qlora":
        matrices = sum(nf4_bytes(elements) * number for elements, number in h.matrices)
    rest = count(h.experts) + count(h.vectors) + count(h.outer)
    return states + matrices + run.at_rest * rest + (run.factors * trained if not run.full else 0)
