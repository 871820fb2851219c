"""Run PyTorch on one CPU thread within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread; the previous number of threads comes back at the end.

    For figures that are the same on every machine: some kernels take scratch memory for each thread, and a sum over
    40,000 numbers already rounds differently with two (measured: ``Tensor.sum``). And for small tensors on a busy
    machine, where threads that wait for each other are a hundred times slower than one.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
