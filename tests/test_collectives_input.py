"""What the hand-written collectives say to bad input: one sentence on every rank, before anything hangs."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def complaints() -> dict[str, str | None]:
    """By mistake, the sentence that this rank was told."""
    from course_lib.collectives.by_hand import naive, recursive_doubling, ring, tree

    rank, n = dist.get_rank(), dist.get_world_size()
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    own = odd if rank % 2 else even
    t = torch.ones
    mistakes = {
        "other's group": lambda: ring.all_reduce(t(4), group=odd) if rank == 0 else None,
        "shape": lambda: ring.all_reduce(t(4 + (rank == 1))),
        "shape, same size": lambda: naive.all_reduce(t(2, 3) if rank else t(3, 2)),
        "dtype": lambda: recursive_doubling.all_reduce(t(4, dtype=torch.float64 if rank == 3 else torch.float32)),
        "roots differ": lambda: tree.broadcast(t(4), root=int(rank == 2)),
        "root outside": lambda: naive.reduce(t(4), root=n),
        "root outside the subgroup": lambda: tree.reduce(t(4), root=1 - rank % 2, group=own),
        "root of the library's kind": lambda: tree.broadcast(t(4), root=own_root(own), group=own),
        "calls differ": lambda: ring.all_reduce(t(4)) if rank else tree.all_reduce(t(4)),
        "not contiguous": lambda: ring.all_reduce(t(4, 4).t()[:, :2]),
        "no tensor": lambda: naive.all_reduce(1.0),
        "short list": lambda: ring.all_gather([t(2)] * (n - 1), t(2)),
        "no list": lambda: naive.scatter(t(2)) if rank == 0 else None,
        "two dtypes": lambda: ring.all_gather([t(2)] * n, t(2).long()),
        "all_gather sizes": lambda: ring.all_gather([t(2)] * n, t(2 + (rank == 1))),
        "reduce_scatter sizes": lambda: ring.reduce_scatter(t(2), [t(3 if i == rank == 2 else 2) for i in range(n)]),
        "scatter sizes": lambda: naive.scatter(t(1), [t(1 + i // 3) for i in range(n)] if rank == 0 else None),
        "gather sizes": lambda: naive.gather(t(3), [t(2)] * n if rank == 0 else None),
    }
    told: dict[str, str | None] = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            told[name] = None
        except ValueError as error:
            told[name] = str(error)
    ring.all_reduce(last := t(5))  # nothing of a refused call is left in the connections
    assert last.tolist() == [n] * 5
    weight = torch.nn.Parameter(t(3))
    ring.all_reduce(weight)
    assert weight.tolist() == [n] * 3 and weight.requires_grad
    return told


def own_root(group: Any) -> int:
    return dist.get_process_group_ranks(group)[1]


SENTENCES = {
    "other's group": "rank 0 is not in the group that it was given: call a group's collectives only on the ranks that",
    "shape": "ring.all_reduce: the ranks differ in their shape ((4,) on 0, 2, 3; (5,) on 1): give the same shape on every",
    "shape, same size": "differ in their shape ((3, 2) on 0; (2, 3) on 1, 2, 3)",
    "dtype": "recursive_doubling.all_reduce: the ranks differ in their dtype (torch.float32 on 0, 1, 2; torch.float64 on 3)",
    "roots differ": "tree.broadcast: the ranks differ in their root (0 on 0, 1, 3; 1 on 2)",
    "root outside": "root=4 is not in the group of ranks [0, 1, 2, 3]: name one of these, by its global rank",
    "calls differ": "the ranks differ in their call (tree.all_reduce on 0; ring.all_reduce on 1, 2, 3)",
    "not contiguous": "ring.all_reduce: a tensor of shape (4, 2) and strides (1, 4) is not contiguous: pass tensor.contig",
    "no tensor": "naive.all_reduce: got a float where a tensor is needed",
    "short list": "ring.all_gather: got a list of 3 where a list of 4 tensors, one per rank, is needed",
    "two dtypes": "one call, one dtype, not torch.int64 and torch.float32",
    "all_gather sizes": "ring.all_gather: rank 1 gives rank 0 3 elements, which expects 2: make the pieces of both",
    "reduce_scatter sizes": "ring.reduce_scatter: rank 2 gives rank 2 3 elements, which expects 2",
    "scatter sizes": "naive.scatter: rank 0 gives rank 3 2 elements, which expects 1",
    "gather sizes": "naive.gather: rank 0 gives rank 0 3 elements, which expects 2",
}


def test_bad_input_is_told_on_every_rank_in_one_sentence_before_it_hangs():
    run = launch(complaints, ranks=4, threads=1, timeout=20, quiet=True)
    assert "naive.scatter: got NoneType" in run.results[0]["no list"]
    for rank, told in enumerate(run.results):
        foreign = f"root={1 - rank % 2} is not in the group of ranks {[rank % 2, rank % 2 + 2]}: name one of these"
        assert foreign in told["root outside the subgroup"]
        assert told["root of the library's kind"] is None
        for name, sentence in SENTENCES.items():
            if name != "other's group" or rank == 0:
                assert sentence in told[name], (name, rank, told[name])
                assert told[name].endswith(".") and told[name].count("\n") == 0


def unchecked() -> None:
    from course_lib.collectives.by_hand import ring

    ring.all_reduce(torch.ones(12), check=False)


def test_the_comparison_can_be_left_out():
    run = launch(unchecked, ranks=4, threads=1, quiet=True)
    assert {c.kind for c in run.collectives} == {"send", "recv"}
