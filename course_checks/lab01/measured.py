"""The peak of a real step, for the exercise that is held against one."""

from __future__ import annotations

import functools

import torch

from course_lib.launch.threads import one_thread
from course_lib.models import tiny_llama
from course_lib.observe import MemoryProbe

Widths = tuple[int, int, int, int]  # hidden, heads, kv_heads, intermediate


def model_of(layers: int, widths: Widths, vocab: int, length: int, device: str = "cpu") -> torch.nn.Module:
    """A Llama with an output layer of its own."""
    hidden, heads, kv_heads, intermediate = widths
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "intermediate": intermediate}
    return tiny_llama(layers=layers, vocab=vocab, max_length=length, device=device, **sizes)


@functools.cache
def step_peak(
    layers: int, widths: Widths, vocab: int, rows: int, length: int, moments: int = 2, micro_batches: int = 1
) -> int:
    """Bytes at the peak of the second step in fp32, micro-batches of rows x length tokens.

    moments: the optimizer's numbers for each weight: 1 SGD with momentum, 2 AdamW, 3 AdamW with amsgrad; all fused.
    """
    model = model_of(layers, widths, vocab, length)
    if moments == 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, amsgrad=moments == 3)
    ids = torch.zeros(rows, length, dtype=torch.long)

    def step() -> None:
        for _ in range(micro_batches):
            model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    probe = MemoryProbe(model, optimizer)
    with one_thread():
        step()
        with probe.measure():
            step()
    return probe.bytes["peak"]
