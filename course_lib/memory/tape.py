"""A tape of operations: what a piece of a network keeps for its backward pass, and how high memory climbs in it.

A *size* is a linear form such as ``{"Nh": 4}``: four bytes for each of the (tokens x hidden) elements; `estimate` puts
numbers in at the end. So a tape is worked out once for a kind of model, and costs nothing for each further length, batch
or width.

The rules are those of PyTorch's eager autograd: an output lives until its last use, what an operation saves lives until
its backward has run, a gradient lives until it has been used, and where two gradients of one tensor meet, both exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Size = dict[str, float]


def plus(*sizes: Size) -> Size:
    """The sum of sizes."""
    total: Size = {}
    for size in sizes:
        for symbol, bytes_each in size.items():
            total[symbol] = total.get(symbol, 0) + bytes_each
    return total


def times(size: Size, factor: float) -> Size:
    return {symbol: bytes_each * factor for symbol, bytes_each in size.items()}


@dataclass(eq=False)
class Tensor:
    """One storage of the forward pass.

    `wants_grad`: backward computes a gradient for it, of the size `gradient` (the tensor's own, unless it is given).
    """

    name: str
    size: Size
    wants_grad: bool = True
    gradient: Size | None = None

    @property
    def grad_size(self) -> Size:
        return self.size if self.gradient is None else self.gradient


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        inputs, out: tensors read and made. An `out` that is None makes nothing (a view).
        saved: what autograd keeps until the operation's backward has run.
        weight_grad: gradient of its weight, which stays until the optimizer's step.
        temporary, backward_temporary: memory that lives during the operation only.
        kept: selective checkpointing keeps its output (matrix products and attention).
        passes_through: backward hands its gradient on without making a new tensor (additions, views).
        holds: tensors that a name of the Python code still holds here, though nothing reads them any more.
    """

    name: str
    inputs: list[Tensor]
    out: Tensor
    saved: list[Tensor] = field(default_factory=list)
    weight_grad: Size = field(default_factory=dict)
    temporary: Size = field(default_factory=dict)
    backward_temporary: Size = field(default_factory=dict)
    kept: bool = False
    passes_through: bool = False
    holds: list[Tensor] = field(default_factory=list)


class Moment(NamedTuple):
    """Sizes in sight at one operation: saved for backward, gradients of weights, and what only passes through."""

    saved: Size
    weight_grads: Size
    passing: Size

    @property
    def total(self) -> Size:
        return plus(*self)


class Tape:
    """Records operations in the order of the forward pass.

    >>> tape, x = Tape(), Tensor("x", {"Nh": 4})
    >>> y = tape.op("silu", [x], {"Nh": 4}, saved=[x])
    >>> tape.saved()
    {'Nh': 4}
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def op(self, name: str, inputs: list[Tensor], size: Size, *, saves_out: bool = False, **options) -> Tensor:
        """Append an operation and return its output; `saves_out`: the output itself is saved (softmax, rsqrt)."""
        out = Tensor(name, size, any(t.wants_grad for t in inputs) or bool(options.get("weight_grad")))
        op = Op(name, inputs, out, **options)
        if saves_out:
            op.saved = [*op.saved, out]
        self.ops.append(op)
        return out

    def saved(self) -> Size:
        """Bytes kept from forward to backward, each storage once."""
        return plus(*(tensor.size for tensor in self._saved_tensors()))

    def kept(self, what: str) -> Size:
        """Bytes that selective checkpointing keeps beside the input; `what` as of `selective_keeps`.

        Half of the products are those of torchtitan: attention's output and every second of the others.
        """
        if what == "all_but_scores":
            scores = {tensor for tensor in self._saved_tensors() if "NS" in tensor.size}
            return plus(*(tensor.size for tensor in self._saved_tensors() if tensor not in scores))
        kept = [op for op in self.ops if op.kept]
        if what == "half_of_products":
            products = [op for op in kept if op.name != "attention"]
            kept = [op for op in kept if op.name == "attention"] + products[::2]
        return plus(*(op.out.size for op in kept))

    def weight_grads(self) -> Size:
        return plus(*(op.weight_grad for op in self.ops))

    def _saved_tensors(self) -> dict[Tensor, int]:
        users: dict[Tensor, int] = {}
        for op in self.ops:
            for tensor in self._saves(op):
                users[tensor] = users.get(tensor, 0) + 1
        return users

    @staticmethod
    def _saves(op: Op) -> set[Tensor]:
        """Nothing where no gradient will come by."""
        return set(op.saved) if op.out.wants_grad else set()

    def forward_moments(self, given: Tensor, *, keep: bool = True) -> list[Moment]:
        """What is in sight after each operation, the input `given` counted, what lies outside the tape not.

        `keep` False: nothing is saved for backward (the first pass of a checkpointed block).
        """
        last_use = {tensor: i for i, op in enumerate(self.ops) for tensor in (*op.inputs, *op.holds)}
        saved = self._saved_tensors() if keep else {}
        alive = {given}
        moments = []
        for i, op in enumerate(self.ops):
            alive.add(op.out)
            there, passing = (plus(*(t.size for t in alive if (t in saved) is kept)) for kept in (True, False))
            moments.append(Moment(there, {}, plus(passing, op.temporary)))
            alive = {t for t in alive if last_use.get(t, len(self.ops)) > i or t in saved}
        return moments

    def backward_moments(self, *, accumulate: bool = False) -> list[Moment]:
        """What is in sight during the backward pass: what is still saved, weights' gradients, gradients in flight.

        `accumulate`: a gradient is there already from an earlier micro-batch (not counted here): the new one is added to
        it and gone.
        """
        users = self._saved_tensors()
        alive = {tensor: tensor.size for tensor in users}
        weight_grads: Size = {}
        grads: dict[Tensor, Size] = {self.ops[-1].out: self.ops[-1].out.grad_size}
        moments = []
        for op in reversed(self.ops):
            grad_out = grads.get(op.out, {})
            wanted = [tensor for tensor in dict.fromkeys(op.inputs) if tensor.wants_grad]
            # an addition hands the very gradient on that it got, unless the other input has another dtype
            made = {t: {} if op.passes_through and t.size == op.out.size else t.grad_size for t in wanted}
            there = plus(weight_grads, op.weight_grad)
            passing = plus(*grads.values(), *made.values(), op.backward_temporary)
            moments.append(Moment(plus(*alive.values()), there, passing))
            if not accumulate:
                weight_grads = there
            grads.pop(op.out, None)
            for tensor, size in made.items():
                if not size:
                    size, grad_out = grad_out, {}  # the first one now stands for the storage
                grads[tensor] = tensor.grad_size if grads.get(tensor) else size
            for tensor in self._saves(op):
                users[tensor] -= 1
                if not users[tensor]:
                    del alive[tensor]
        return moments


def highest(moments: list[Moment]) -> list[Moment]:
    """The moments that can be the largest for some widths: those that no other one reaches in every symbol."""
    best: list[Moment] = []
    for moment in moments:
        if not any(_reaches(other.total, moment.total) for other in best):
            best = [other for other in best if not _reaches(moment.total, other.total)] + [moment]
    return best


def _reaches(one: Size, other: Size) -> bool:
    return all(one.get(symbol, 0) >= bytes_each for symbol, bytes_each in other.items())
