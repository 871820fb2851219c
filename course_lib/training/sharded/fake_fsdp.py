"""Count the bytes of one rank in an FSDP2 step on any number of ranks, on a laptop: nothing is allocated and nothing is sent.

The model is sharded by the same `shard` as in `course_lib.training.sharded.fsdp` and runs forward, backward and the
optimizer's step. Only its tensors have no memory (`course_lib.observe.fake`), and its process group answers every collective
at once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from course_lib.memory import Shape
from course_lib.memory.allocator import Event
from course_lib.observe.fake import LiveStorages, fake_tensors
from course_lib.observe.memory import optimizer_tensors, tensor_bytes
from course_lib.training.finetune.activation_checkpointing import set_checkpointing
from course_lib.training.finetune.building import add_adapters, build_optimizer, dtypes, trainable
from course_lib.training.finetune.fake_step import llama
from course_lib.training.sharded.fsdp_sharding import blocks, make_mesh, mixed_precision, shard

MOMENTS = ("first block's forward", "rest of the forward pass", "backward pass", "optimizer step")


@dataclass(frozen=True)
class FakeRank:
    """Bytes on rank 0 in the steady state of a run, the batch's own left out.

    Attributes:
        parameters, gradients, optimizer: at rest; the model's buffers are with the parameters.
        moments: the most during each part of a step (`MOMENTS`). With 3 blocks or more each of them grows by the same
            with every further block, the part that is the peak may change.
        by_operation: what was there at the peak, by the operation that made it; "gathered" are parameters put together.
    """

    parameters: int
    gradients: int
    optimizer: int
    moments: dict[str, int]
    by_operation: dict[str, int]

    @property
    def peak(self) -> int:
        """Of the whole step."""
        return max(self.moments.values())

    @property
    def resident(self) -> int:
        """What stays between steps."""
        return self.parameters + self.optimizer


class ShardedStorages(LiveStorages):
    """`LiveStorages` for sharded models, on real and on fake tensors.

    FSDP2 gives a gathered unit back by resizing its storages to nothing, which is no operation and which its parent does
    not see; and a DTensor counts with its local shard. What a backend copies inside a collective is no tensor, and is not
    counted: gloo's reduce_scatter makes a copy of its input, NCCL's does not. Nor is what only waits for Python's garbage
    collector: it is called before a new peak is believed.

    Attributes:
        curve: (nanoseconds since `begin`, bytes now) after each change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[tuple[int, int]] = [(0, 0)]
        self._zero = 0
        self._called_now: dict[int, int] = {}  # a storage's first name in the log -> that of its present size

    def reset(self) -> None:
        gc.collect()
        super().reset()

    def __enter__(self) -> ShardedStorages:
        gc.collect()
        gc.freeze()  # what is there now is not looked through again, so that collecting takes no time
        self.begin()
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            if storage in self._known:
                self._resized(self._known[storage], size)
            return done

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def begin(self) -> None:
        """Let the curve begin here, with all that is held."""
        self._zero = time.time_ns()
        self.curve = [(0, self.now)]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        gc.unfreeze()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: its operations on local tensors come here again
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, tensor: torch.Tensor, maker: str) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._make_room(storage.nbytes())
            super()._note(tensor, maker)
            self._tell()

    def _bury(self, name: int) -> None:
        super()._bury(self._called_now.pop(name, name))
        self._tell()

    def _resized(self, name: int, size: int) -> None:
        super()._bury(self._called_now.pop(name, name))
        self._make_room(size)
        self._born_again(name, size)
        self._tell()

    def _make_room(self, size: int) -> None:
        if self.now + size > self.highest:
            gc.collect()

    def _born_again(self, first: int, size: int) -> None:
        name = len(self.born)
        self.born[name] = "gathered"
        self._called_now[first] = name
        self._alive[name] = size
        self.log.append(Event(True, name, size))
        self.now += size
        if self.now > self.highest:
            self.highest, self._events_at_highest = self.now, len(self.log)

    def _tell(self) -> None:
        if self.curve[-1][1] != self.now:
            self.curve.append((time.time_ns() - self._zero, self.now))


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Within it this process is rank 0 of `ranks`, whose collectives return at once and move nothing.

    Raises:
        ValueError: fewer than 1 rank.
        RuntimeError: a real process group is up.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: give a whole number of at least 1.")
    if dist.is_initialized():
        raise RuntimeError("A process group is up already: count on fake ranks outside of launch().")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_fsdp(
    shape: Shape,
    *,
    ranks: int,
    method: str = "full",
    precision: str = "bf16-mixed",
    activation_checkpointing: str = "none",
    reshard_after_forward: bool | int = True,
    mesh: str = "",
    wrap: str = "block",
    ends: bool = False,
    micro_batch_size: int = 1,
    seq_len: int = 2048,
    lora_rank: int = 16,
) -> FakeRank:
    """Count one step of the Llama of these widths on rank 0 of `ranks`, each with its own micro-batch.

    Args:
        shape: for instance `PRESETS["llama-3.1-70b"]`; `dataclasses.replace(shape, layers=4)` is quicker, and every
            further block adds the same.
        method: "full" or "lora". precision, reshard_after_forward, wrap: as in `course_lib.training.sharded.fsdp_sharding.shard`.
        mesh: "" or "copies x shards", as "4x8".
        ends: make units of the embedding and of the output layer, too, so that they are gathered one at a time.
        micro_batch_size: sequences. seq_len: tokens a sequence.

    Raises:
        ValueError: a choice that does not exist or does not fit the ranks; "qlora", whose kernels know no fake tensors.
        RuntimeError: a real process group is up.
    """
    if method == "qlora":
        raise ValueError("method='qlora': bitsandbytes' kernels need real tensors; take estimate(method='qlora').")
    with fake_ranks(ranks):
        ranks_of = make_mesh(mesh, "cpu")
        kinds = dtypes(method, precision)
        with torch.device("meta"):  # not as fake tensors: PEFT moves its layers about, and those do not move
            model = llama(shape, dtype=kinds.weights)
            if method == "lora":
                model = add_adapters(model, lora_rank, 2 * lora_rank, kinds.trained, seed=0)
        set_checkpointing(model.train(), activation_checkpointing)
        with fake_tensors():
            _become_fake(model)
            if ends:
                for end in (model.get_input_embeddings(), model.get_output_embeddings()):
                    fully_shard(end, mesh=ranks_of, mp_policy=mixed_precision(precision))
            shard(model, mesh=ranks_of, reshard_after_forward=reshard_after_forward, precision=precision, wrap=wrap)
            optimizer = build_optimizer(trainable(model), "adamw", 1e-4)
            batch = torch.zeros(micro_batch_size, seq_len, dtype=torch.long)

            return count_step(model, optimizer, batch)


def _become_fake(model: torch.nn.Module) -> None:
    """Tensors on "meta" as tensors on the CPU, of whatever kind the context makes; what is tied stays tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        made[id(tensor)] = torch.nn.Parameter(made[id(tensor)], requires_grad=tensor.requires_grad)
                if tensor is not None:
                    tensors[name] = made[id(tensor)]


def count_step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> FakeRank:
    """The second of two steps of a sharded model, on real or on fake tensors; the first one makes Adam's states."""

    def forward() -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    forward().backward()
    update()
    first_block = blocks(model)[0]
    with ShardedStorages() as live:
        live.hold([*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer), batch])
        moments: dict[str, int] = {}
        at_peak: dict[str, int] = {}

        def note(moment: str) -> None:
            nonlocal at_peak
            moments[moment] = live.highest - batch.nbytes
            if moments[moment] == max(moments.values()):
                at_peak = live.by_operation()
            live.reset()

        hook = first_block.register_forward_hook(lambda *_: note(MOMENTS[0]))
        loss = forward()
        hook.remove()  # a checkpointed block runs once more in the backward pass
        note(MOMENTS[1])
        loss.backward()
        note(MOMENTS[2])
        gradients = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
        update()
        moments[MOMENTS[3]] = live.highest - batch.nbytes
        return FakeRank(
            parameters=tensor_bytes([*model.parameters(), *model.buffers()]),
            gradients=gradients,
            optimizer=tensor_bytes(optimizer_tensors(optimizer)),
            moments=moments,
            by_operation=at_peak,
        )
