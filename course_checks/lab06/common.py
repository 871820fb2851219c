"""What the checks of lab 6 share: the lab itself, and FSDP2's rule for rows."""

from __future__ import annotations

from course_checks.harness import Lab

lab = Lab("06_fsdp", title="FSDP")


def chunk_rows(rows: int, ranks: int, rank: int) -> range:
    """Rows of dimension 0 that `rank` keeps, by the rule of torch.chunk, which fully_shard follows."""
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))
