"""Do all ranks mean the same call? Asked before the first byte of payload, so that bad input is told and does not hang.

Each rank fills a header of 14 + 2n int64: the call, the dtype, the root, the shape, and for each rank how many elements
it hands to it and expects from it. The headers go round by dissemination (Bruck's all-gather): in step k = 1, 2, 4, … a
rank passes all it has so far, k headers, to the rank k before it. After ceil(log2 n) messages and n-1 headers of bytes a
rank everybody has all of them, and everybody finds, and says, the same.

It costs latency only, on 4 ranks 2 steps beside the ring's 6: about a third more for a small tensor, lost in the noise for
one of 64 MiB (``benchmarks/collectives.py`` measures both). ``check=False``, on all ranks alike, leaves it out. (To
remember what was agreed before would not do: the rank that differs is the one that must not skip it.) What a rank can
see alone, a tensor that is not contiguous or a root outside the group, it says alone and at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from course_lib.collectives.by_hand.peers import Peers

_CALL, _DTYPE, _ROOT, _SHAPE, _FIXED = slice(0, 4), slice(4, 6), 6, slice(7, 14), 14
_NOTHING = -1  # no root, no shape, no business with that rank


def same_everywhere(peers: Peers, call: str, tensor: torch.Tensor, root: int | None = None, *, check: bool) -> None:
    """Every rank comes with a contiguous tensor of the same shape and dtype, and the same root (a global rank).

    Raises:
        ValueError: they do not; one sentence that names the ranks, on every rank of the group.
    """
    _usable(call, [tensor])
    if check:
        counts = [tensor.numel()] * peers.size
        _compare(peers, call, _gathered(peers, call, tensor, root, tensor.shape, counts, counts))


def pieces_fit(
    peers: Peers,
    call: str,
    gives: list[torch.Tensor | None],
    takes: list[torch.Tensor | None],
    root: int | None = None,
    *,
    check: bool,
) -> None:
    """What a rank hands to another is as many elements as that one expects, for each pair; one dtype for all.

    Args:
        gives: by member, what this rank hands to it; ``None``: no business with it.
        takes: by member, where that which it hands to this rank goes.

    Raises:
        ValueError: they do not fit; one sentence that names the ranks, on every rank of the group.
    """
    pieces = [p for p in (*gives, *takes) if p is not None]
    _usable(call, pieces)
    if check:
        counts = ([_NOTHING if p is None else p.numel() for p in row] for row in (gives, takes))
        _compare(peers, call, _gathered(peers, call, pieces[0], root, None, *counts))


def one_a_rank(peers: Peers, call: str, pieces: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """The list itself, when it holds one tensor for each rank of the group.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(pieces, (list, tuple)) or len(pieces) != peers.size:
        found = f"a list of {len(pieces)}" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
        raise ValueError(f"{call}: got {found} where a list of {peers.size} tensors, one a rank, is needed.")
    return list(pieces)


def _usable(call: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{call}: got a {type(tensor).__name__} where a tensor is needed.")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{call}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
                "pass tensor.contiguous(), and copy the result back where you need it."
            )
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{call}: one call, one dtype, not {tensors[0].dtype} and {tensor.dtype}.")


def _gathered(
    peers: Peers, call: str, sample: torch.Tensor, root: int | None, shape: Iterable[int] | None, *counts: list[int]
) -> torch.Tensor:
    """The headers of all members, int64 [n, 14 + 2n]."""
    sizes = [_NOTHING] if shape is None else [len(list(shape)), *shape]
    fixed = [
        *_as_integers(call, 4), *_as_integers(str(sample.dtype).removeprefix("torch."), 2),
        _NOTHING if root is None else root, *(sizes + [0] * 7)[:7],
    ]  # fmt: skip
    table = torch.empty(peers.size, len(fixed) + 2 * peers.size, dtype=torch.int64)
    table[0] = torch.tensor([*fixed, *counts[0], *counts[1]])
    table = table.to(sample.device)
    have = 1
    while have < peers.size:  # row i: the header of the member i after this one
        batch = min(have, peers.size - have)
        to, source = (peers.rank - have) % peers.size, (peers.rank + have) % peers.size
        peers.exchange(table[:batch], to, table[have : have + batch], source, header=True)
        have += batch
    return table.roll(peers.rank, dims=0).cpu()


def _compare(peers: Peers, call: str, headers: torch.Tensor) -> None:
    n = peers.size
    gives, takes = headers[:, _FIXED : _FIXED + n], headers[:, _FIXED + n :].T
    if torch.equal(headers[:, :_FIXED], headers[:1, :_FIXED].expand(n, _FIXED)) and torch.equal(gives, takes):
        return
    for part, what in ((_CALL, "call"), (_ROOT, "root"), (_DTYPE, "dtype"), (_SHAPE, "shape")):
        said = defaultdict(list)
        for rank, header in zip(peers.ranks, headers, strict=True):
            said[_in_words(header[part], what)].append(str(rank))
        if len(said) > 1:
            who = "; ".join(f"{words} on {', '.join(ranks)}" for words, ranks in said.items())
            raise ValueError(f"{call}: the ranks differ in their {what} ({who}): give the same {what} on every rank.")
    giver, taker = (gives != takes).nonzero()[0].tolist()
    raise ValueError(
        f"{call}: rank {peers.ranks[giver]} hands rank {peers.ranks[taker]} {max(int(gives[giver, taker]), 0)} elements, "
        f"and that one expects {max(int(takes[giver, taker]), 0)}: make the pieces of both ranks the same size."
    )


def _as_integers(text: str, words: int) -> list[int]:
    padded = text.encode().ljust(8 * words)[: 8 * words]
    return [int.from_bytes(padded[8 * i : 8 * i + 8], "little") for i in range(words)]


def _in_words(part: torch.Tensor, what: str) -> str:
    numbers = part.reshape(-1).tolist()
    if what in ("call", "dtype"):
        return b"".join(number.to_bytes(8, "little") for number in numbers).decode().strip()
    return str(numbers[0] if what == "root" else tuple(numbers[1 : 1 + numbers[0]]))
