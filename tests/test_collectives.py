"""The hand-written all-reduces: their sums, and what each rank sends for them."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import by_hand
from course_lib.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")

# less than the ranks; divisible by each number of ranks; by none
TENSORS = [(3, torch.float64), (120, torch.bfloat16), (43, torch.float32)]


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -4 to 4, so that a sum over 8 ranks is exact in any order and in bfloat16 too."""
    return torch.randint(-4, 5, (1, numel), generator=torch.Generator().manual_seed(rank)).to(dtype)


def add_up(name: str) -> list[bool]:
    """Whether the sum of each tensor is right."""
    right = []
    for numel, dtype in TENSORS:
        tensor = numbers(dist.get_rank(), numel, dtype)
        getattr(by_hand, name)(tensor)
        right.append(torch.equal(tensor, sum(numbers(i, numel, dtype) for i in range(dist.get_world_size()))))
    return right


def messages_of(name: str, numel: int, n: int, rank: int) -> list[int]:
    """Elements of each message that rank `rank` of `n` sends, by what the algorithm's text says."""
    if name == "through_the_root":
        return [numel] * ((n - 1) if rank == 0 else 1)
    chunks = [numel // n + (i < numel % n) for i in range(n)]
    left_out = (rank, (rank + 1) % n)  # one in each half
    return [size for chunk in left_out for i, size in enumerate(chunks) if i != chunk and size]


@pytest.mark.parametrize("name", ["through_the_root", "ring"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_sum_is_right_and_each_rank_sends_what_the_text_says(name, n):
    run = launch(add_up, name, ranks=n, threads=1, quiet=True)
    for rank, right in enumerate(run.results):
        assert all(right), rank
        sent = sorted(c.bytes for c in run.collectives if c.rank == rank and c.kind == "send")
        messages = [dtype.itemsize * m for numel, dtype in TENSORS for m in messages_of(name, numel, n, rank)]
        assert sent == (sorted(messages) if n > 1 else []), rank
