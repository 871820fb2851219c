"""Causal attention over a sequence that is split over ranks, by hand: keys and values go round a ring.

A rank keeps the queries of its own tokens, meets every other rank's keys and values one after another, and folds each
meeting into its result by the log-sum-exp of the scores ("online softmax"). No rank ever has the keys of the whole
sequence. Ring Attention (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889); the backward formulas are FlashAttention's
(arXiv:2205.14135, algorithm 4).

A causal token looks back only, so with one run of the sequence a rank ("contiguous") the first rank has one meeting's
work and the last has all. "zigzag" cuts the sequence into twice as many runs as ranks, and gives rank r run r and run
2n-1-r, an early one and a late one: all ranks have the same work (Llama 3's way, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LAYOUTS = ("zigzag", "contiguous")


def runs(rank: int, ranks: int, seq_len: int, layout: str = "zigzag") -> list[range]:
    """The positions of the sequence that a rank holds, as runs of neighbours in rising order."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: choose one of {', '.join(LAYOUTS)}.")
    count = 2 * ranks if layout == "zigzag" else ranks
    if seq_len < 1 or seq_len % count:
        raise ValueError(
            f"seq_len={seq_len} does not divide into the {count} runs of {ranks} ranks ({layout}): give a multiple."
        )
    length = seq_len // count
    mine = (rank, count - 1 - rank) if layout == "zigzag" else (rank,)
    return [range(i * length, (i + 1) * length) for i in mine]


def positions(rank: int, ranks: int, seq_len: int, layout: str = "zigzag") -> torch.Tensor:
    """The same as int64 (seq_len / ranks,): what position ids and labels are picked by. Raises ValueError as `runs`."""
    return torch.tensor([p for run in runs(rank, ranks, seq_len, layout) for p in run])


def meetings(
    rank: int, source: int, ranks: int, seq_len: int, layout: str = "zigzag"
) -> list[tuple[slice, slice, bool]]:
    """What a rank computes when the keys of rank `source` are with it: (its queries, their keys, is it the diagonal).

    Pairs of runs of which the keys all lie in the future are left out; only on the diagonal is a mask needed.
    """
    mine, theirs = runs(rank, ranks, seq_len, layout), runs(source, ranks, seq_len, layout)
    length = len(mine[0])
    return [
        (slice(i * length, (i + 1) * length), slice(j * length, (j + 1) * length), query == key)
        for i, query in enumerate(mine)
        for j, key in enumerate(theirs)
        if key.start <= query.start
    ]


def scores_computed(rank: int, ranks: int, seq_len: int, layout: str = "zigzag") -> list[int]:
    """Query-key pairs that a rank computes at each of the ring's steps; half of a diagonal block is masked, and counted."""
    length = len(runs(rank, ranks, seq_len, layout)[0])
    return [
        length * length * len(meetings(rank, (rank - step) % ranks, ranks, seq_len, layout)) for step in range(ranks)
    ]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    layout: str = "zigzag",
) -> torch.Tensor:
    """Causal attention of this rank's tokens to the whole sequence, with a backward pass.

    Args:
        query: (batch, heads, tokens of this rank, width), of the positions that `positions` names.
        key, value: (batch, kv heads, tokens of this rank, width); kv heads divides heads, and only they travel.
        group: the ranks that share a sequence; None is all.
        scale: of the scores; None is 1 / sqrt(width).
        layout: "zigzag" or "contiguous", on every rank the same.

    Returns:
        (batch, heads, tokens of this rank, width).
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"{heads} heads are no multiple of {kv_heads} kv heads: each of these serves as many of those."
        )
    runs(0, dist.get_world_size(group), query.shape[2] * dist.get_world_size(group), layout)
    return _Ring.apply(query, key, value, group, query.shape[-1] ** -0.5 if scale is None else scale, layout)


class _Ring(torch.autograd.Function):
    """Shapes inside: queries (batch, kv heads, heads per kv head, tokens, width), keys (batch, kv heads, 1, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, query, key, value, group, scale, layout):
        ring = _Neighbours(group)
        q = query.unflatten(1, (key.shape[1], -1))
        kv = torch.stack([key, value]).unsqueeze(3)
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:-1], float("-inf"))
        for step in range(ring.size):
            coming = ring.start(kv) if step < ring.size - 1 else None  # travels while we compute
            source = (ring.rank - step) % ring.size
            for mine, theirs, diagonal in meetings(ring.rank, source, ring.size, q.shape[3] * ring.size, layout):
                scores = _scores(q[..., mine, :], kv[0][..., theirs, :], scale, diagonal)
                block_lse = scores.logsumexp(-1)
                block_out = (scores - block_lse[..., None]).exp() @ kv[1][..., theirs, :]
                both = torch.logaddexp(lse[..., mine], block_lse)  # as if both parts had been one softmax
                out[..., mine, :] *= (lse[..., mine] - both).exp()[..., None]
                out[..., mine, :] += block_out * (block_lse - both).exp()[..., None]
                lse[..., mine] = both
            kv = coming.wait() if coming else kv
        ctx.save_for_backward(query, key, value, out.flatten(1, 2), lse)
        ctx.ring, ctx.scale, ctx.layout = ring, scale, layout
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad):
        query, key, value, out, lse = ctx.saved_tensors
        ring, split = ctx.ring, (key.shape[1], -1)
        q, grad, out = (tensor.unflatten(1, split) for tensor in (query, grad, out))
        kv = torch.stack([key, value]).unsqueeze(3)
        along = (grad * out).sum(-1)  # what softmax's derivative takes off every score of a row
        grad_q = torch.zeros_like(q)
        here = torch.zeros_like(kv)
        for step in range(ring.size):
            coming = ring.start(kv) if step < ring.size - 1 else None
            # The gradients of the keys that are here now, as far as the ranks before this one could tell: they go
            # round behind the keys
            here = ring.start(here).wait() if step else here
            source = (ring.rank - step) % ring.size
            for mine, theirs, diagonal in meetings(ring.rank, source, ring.size, q.shape[3] * ring.size, ctx.layout):
                k, v = kv[0][..., theirs, :], kv[1][..., theirs, :]
                weights = (_scores(q[..., mine, :], k, ctx.scale, diagonal) - lse[..., mine][..., None]).exp()
                d_out = grad[..., mine, :]
                d_scores = weights * (d_out @ v.transpose(-1, -2) - along[..., mine][..., None]) * ctx.scale
                grad_q[..., mine, :] += d_scores @ k
                here[0][..., theirs, :] += (d_scores.transpose(-1, -2) @ q[..., mine, :]).sum(2, keepdim=True)
                here[1][..., theirs, :] += (weights.transpose(-1, -2) @ d_out).sum(2, keepdim=True)
            kv = coming.wait() if coming else kv
        if ring.size > 1:
            here = ring.start(here).wait()  # one more hop brings them home
        return grad_q.flatten(1, 2), here[0].squeeze(2), here[1].squeeze(2), None, None, None


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, diagonal: bool) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if diagonal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


class _Neighbours:
    """The rank after this one, to which it sends, and the one before, from which it receives."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.next, self.previous = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]

    def start(self, tensor: torch.Tensor) -> _Coming:
        """Begin to send a tensor on; `wait` of what comes back gives the one that arrives."""
        arriving = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        tensor = tensor.contiguous()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, self.next, self.group),
                dist.P2POp(dist.irecv, arriving, self.previous, self.group),
            ]
        )
        return _Coming(works, tensor, arriving)


class _Coming:
    def __init__(self, works: list[dist.Work], leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        self.works, self.leaving, self.arriving = works, leaving, arriving  # what leaves must live until it has left

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.arriving
