"""What one GPU needs for a step, taken apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CATEGORIES = (
    "weights", "optimizer state", "gradients", "activations", "logits and loss", "autocast's copies", "temporaries"
)  # fmt: skip
SEGMENT = 2 * 2**20  # the caching allocator asks the driver for multiples of 2 MiB

# Share of the peak that the caching allocator reserves beyond it. On a card with room: the median of published runs, those of
# tests/published/memory_peaks.json that are not held out. On the smallest card that sees a step through, where cached segments
# go back to the driver when memory is short: the median of three steps replayed through the allocator's rules
# (`course_lib.memory.allocator`). benchmarks/memory.py prints both, and how wide they scatter.
EXPECTED_WASTE = 0.2
LEAST_WASTE = 0.05
# How sure an estimate is: of the published peaks that nothing was fitted to, how many there are, within what share of the
# measured peak half of the predictions lie, and nine of ten. benchmarks/memory.py prints them one by one. At the first look half
# were within 7 %; then torch's loss_parallel, read in its code, was counted as it is.
HELD_OUT, HALF_WITHIN, NINE_OF_TEN_WITHIN = 30, 0.05, 0.17
# No paper says and no run of ours does: Hugging Face's documentation measured 1,343 MiB on a V100 (torch 1.10, all
# kernels loaded at once). Newer CUDA loads kernels lazily and needs less. `nvidia-smi` less `reserved` is yours.
CUDA_CONTEXT = 1343 * 2**20


def _segments(size: float) -> int:
    """Bytes rounded up to whole segments."""
    return -(-int(size) // SEGMENT) * SEGMENT


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the caching allocator holds at the peak, bytes: no waste, the expected on a card with room, nothing reused."""

    low: int
    expected: int
    high: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes on the fullest GPU of a run.

    Attributes:
        weights: parameters at rest, quantized or sharded as they are, and the model's buffers.
        gradients: at rest after backward.
        optimizer: states, and fp32 master weights where the method has them.
        activations: what autograd keeps for backward, logits left out; with autocast its 2-byte copies of the weights
            are under `buffers`.
        logits: the most that logits, their fp32 copy and their gradients take at one time.
        buffers: DDP's and ZeRO's buckets, gathered FSDP units and their unsharded gradients, autocast's weight copies.
        kept: all that autograd keeps at the moment of the loss (activations, log-probabilities, weight copies).
        peak: of the worst phase of the step; `peak_phase` names it. Not the sum of the above: they are not all there at one time.
        phases: bytes at each phase of a step that can be the worst.
        at_peak: what the peak is made of, by CATEGORIES. Autocast's copies are those of the weights in 16 bits. Under a
            strategy that shards, gradients, buckets and gathered weights are all among the temporaries.
        num_parameters, num_trainable: of the whole model, adapters included.
        cuda_context: bytes that CUDA itself takes, which PyTorch does not count.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    kept: int
    peak: int
    peak_phase: str
    phases: dict[str, int]
    at_peak: dict[str, int]
    num_parameters: int
    num_trainable: int
    cuda_context: int = CUDA_CONTEXT

    @property
    def resident(self) -> int:
        """Bytes that stay between steps: weights, optimizer's state."""
        return self.weights + self.optimizer

    @property
    def allocated(self) -> int:
        """torch.cuda.max_memory_allocated(): the peak."""
        return self.peak

    @property
    def reserved(self) -> Reserved:
        """torch.cuda.max_memory_reserved(), a range: it depends on the order of sizes, which no formula knows."""
        parts = self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers
        low = _segments(self.peak)
        expected = _segments(self.peak * (1 + EXPECTED_WASTE))
        return Reserved(low, expected, max(expected, _segments(parts)))

    def reserved_on(self, memory: int) -> int:
        """What a card of `memory` bytes is expected to have reserved: the more room there is, the more is kept."""
        return max(self.reserved.low, min(self.reserved.expected, memory - self.cuda_context))

    @property
    def device(self) -> int:
        """The smallest card that sees the step through: what is reserved when memory is short, and CUDA's context.

        On a larger card nvidia-smi shows more, up to ``reserved.expected`` or ``reserved.high`` and the context: the
        allocator keeps what it has room to keep.
        """
        return _segments(self.peak * (1 + LEAST_WASTE)) + self.cuda_context

    def fits(self, memory: int) -> bool:
        """Whether a card of `memory` bytes sees it through."""
        return self.device <= memory

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field in bytes, `reserved` as low, expected and high."""
        return asdict(self) | {"resident": self.resident, "device": self.device, "reserved": asdict(self.reserved)}
