"""Fresh values for a run, other ones on every rank, that a failure can name by their seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from course_checks.harness.comparing import NotYet


def fresh_seed() -> int:
    """Another seed each time, whatever the learner's code has done to the global generators."""
    return random.SystemRandom().randrange(1, 1_000_000)


def fresh(shape: tuple[int, ...], seed: int, rank: int = 0, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Non-integers between 0.5 and 1.5 times a sign, of this seed and rank."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    signs = torch.randint(2, shape, generator=generator) * 2 - 1
    return (values * signs).to(dtype)


def learnable_tokens(rows: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Tokens (rows, length), each of which follows from the one before, so that there is something to learn."""
    first = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return torch.cat([(first * 3**n + (3**n - 1) // 2) % vocabulary for n in range(length)], 1)


@contextmanager
def named_seed(seed: int) -> Iterator[None]:
    """Let a NotYet inside the block say with which seed the values were made."""
    try:
        yield
    except NotYet as error:
        raise NotYet(f"{error} (values of seed {seed})") from error
