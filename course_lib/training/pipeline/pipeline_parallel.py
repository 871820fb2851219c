"""Pipeline parallelism: each rank holds some layers of the tiny Llama, and micro-batches travel from rank to rank.

The loop is that of `course_lib.training.single`. Its forward and backward passes are run by a schedule of
``torch.distributed.pipelining``, or by `course_lib.training.pipeline.by_hand`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from course_lib.choices import check_schedule
from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.pipeline.by_hand import one_f_one_b
from course_lib.training.pipeline.record import RecordedStage, Recorder
from course_lib.training.pipeline.stage import LlamaStage, split_layers, token_loss
from course_lib.validation import pick

StepFunction = Callable[[torch.Tensor], list[torch.Tensor]]  # one step's batch -> losses on the last rank, else nothing
VOCAB = 256  # of the tiny model
CLASSES = {
    "naive": ScheduleGPipe,  # called with one micro-batch at a time
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,  # with one stage a rank it is ZB-H1
}


def train(
    *,
    schedule: str = "1f1b",
    implementation: str = "torch",
    steps: int = 3,
    global_batch: int = 8,
    seq_len: int = 128,
    num_microbatches: int = 4,
    virtual_stages: int = 1,
    layers: int = 4,
    hidden: int = 128,
    lr: float = 1e-3,
    pace: float = 0.0,
) -> Outcome:
    """Train the tiny Llama in a pipeline over all ranks; the default process group must be up.

    Args:
        schedule: as in `course_lib.parallel.schedules.orders`.
        implementation: "torch", or "hand" for the 1F1B over send and receive.
        steps, global_batch, seq_len, lr: as in `course_lib.training.single`; every rank draws the whole batch, of
            which the first stage reads the tokens and the last the labels.
        num_microbatches: in one optimizer step.
        virtual_stages: parts of the model on each rank, for "interleaved".
        layers, hidden: of the tiny model.
        pace: seconds that each forward of a stage takes at least, and half of what each backward does (of a split one each
            part as long as a forward). Far above the computing, it lets a schedule show on a busy machine too.

    Returns:
        In ``extra`` events (`course_lib.parallel.simulate.Event`, seconds) of all ranks in the fastest step, those up to the
        one whose memory is measured left out; bubble, of these. And of this rank in_flight (the most micro-batches whose
        activations it held; what one of v virtual stages holds counts 1/v), activation_bytes (the most that autograd kept; 0 of a
        single step), stage_layers, local_elements (of its parameters).
    """
    rank, stages = dist.get_rank(), dist.get_world_size()
    check(schedule, implementation, stages, num_microbatches, virtual_stages, layers, pace)
    size = micro_batch_size(steps=steps, global_batch=global_batch, gradient_accumulation_steps=num_microbatches)
    device = rank_device()
    model, pieces = tiny_llama(layers=layers, hidden=hidden), split_layers(layers, stages * virtual_stages)
    mine = range(rank, stages * virtual_stages, stages)  # chunk c of rank r is stage c * stages + r
    parts = torch.nn.ModuleList(LlamaStage(model, pieces[i]).to(device) for i in mine)
    del model  # each rank built it whole, so that the seed gives the same weights, and keeps its part
    optimizer = torch.optim.AdamW(parts.parameters(), lr=lr, fused=True)
    record = Recorder(rank, pace=pace)
    if implementation == "hand":
        step_fn, wrapper = _by_hand(parts[0], num_microbatches, hidden, record), one_f_one_b.__name__
    else:
        step_fn, wrapper = _by_torch(
            schedule, list(parts), list(mine), num_microbatches, (size, seq_len, hidden), stages, device, record
        )
    measured = 0 if steps == 2 else 1  # the memory probe slows this step down; a single step it leaves alone
    observation = observe(parts, optimizer, measured_step=measured)
    losses, ran = [], []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len).to(device)
        dist.barrier()  # so that a rank that was late with its optimizer does not show as a bubble
        with observation.step(tokens=batch.numel()):
            parted = step_fn(batch)
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.stack(parted).mean().to(device) if parted else torch.zeros((), device=device)
        dist.broadcast(loss, src=stages - 1)  # for the report only: the last stage alone knows the loss
        losses.append(loss.item())
        if step > measured or steps == 1:
            ran.append(record.together())
        record.clear()
    best = min(ran, key=lambda one: one.seconds)
    return outcome(
        observation,
        losses,
        wrapper,
        events=best.events,
        bubble=best.bubble,
        in_flight=best.in_flight[rank],
        activation_bytes=observation.memory.get("activations", 0),
        stage_layers=[i for n in mine for i in pieces[n]],
        local_elements=sum(p.numel() for p in parts.parameters()),
    )


def _by_hand(part: LlamaStage, num_microbatches: int, hidden: int, record: Recorder) -> StepFunction:
    def step(batch: torch.Tensor) -> list[torch.Tensor]:
        return one_f_one_b(part, batch.chunk(num_microbatches), token_loss, hidden=hidden, record=record)

    return step


def _by_torch(
    schedule: str,
    parts: list[LlamaStage],
    mine: list[int],
    num_microbatches: int,
    sizes: tuple[int, int, int],
    stages: int,
    device: torch.device,
    record: Recorder,
) -> tuple[StepFunction, str]:
    """(what runs one step's forwards and backwards, the class that does it)."""
    every = stages * len(mine)
    between = torch.empty(sizes, device="meta", requires_grad=True)  # told beforehand, the stages need no trial run
    ends = (torch.empty(sizes[:2], device="meta", dtype=torch.long), between.new_empty((*sizes[:2], VOCAB)))
    made = [
        RecordedStage(
            part,
            i,
            every,
            device,
            record=record,
            input_args=between if i else ends[0],
            output_args=between if i < every - 1 else ends[1],
        )
        for part, i in zip(parts, mine, strict=True)
    ]
    naive = schedule == "naive"
    plan = CLASSES[schedule](
        made if schedule in ("interleaved", "zero_bubble") else made[0],
        n_microbatches=1 if naive else num_microbatches,
        loss_fn=(lambda logits, tokens: token_loss(logits, tokens) / num_microbatches) if naive else token_loss,
    )
    first, last = mine[0] == 0, mine[-1] == every - 1

    def step(batch: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        told = {"target": batch, "losses": losses} if last else {}
        plan.step(
            *([batch] if first else []), return_outputs=False, **told
        )  # it cuts the batch, and averages gradients
        return [loss.detach() for loss in losses]

    def one_at_a_time(batch: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for record.offset, micro_batch in enumerate(batch.chunk(num_microbatches)):
            losses += [loss * num_microbatches for loss in step(micro_batch)]
        return losses

    return one_at_a_time if naive else step, type(plan).__name__


def check(
    schedule: str,
    implementation: str,
    stages: int,
    num_microbatches: int,
    virtual_stages: int,
    layers: int,
    pace: float,
) -> None:
    """Raise ValueError, one sentence, for choices that do not exist or do not fit each other."""
    pick("implementation", implementation, ("torch", "hand"))
    check_schedule(schedule, stages, num_microbatches, virtual_stages)
    if implementation == "hand" and schedule != "1f1b":
        raise ValueError(f"implementation='hand' runs '1f1b' alone: take implementation='torch' for {schedule!r}.")
    if layers >= stages and layers % (stages * virtual_stages) and virtual_stages > 1:
        raise ValueError(
            f"layers={layers} do not divide into {stages} ranks x {virtual_stages} virtual stages: take a multiple of {stages * virtual_stages}."
        )
    split_layers(layers, stages * virtual_stages)
    rounds = max(1, num_microbatches // stages)
    if schedule == "zero_bubble" and num_microbatches % rounds:
        raise ValueError(
            f"num_microbatches={num_microbatches}: PyTorch's zero-bubble schedule sends them in {rounds} equal rounds; take "
            f"{-(-num_microbatches // rounds) * rounds}."
        )
    if schedule == "1f1b" and implementation == "torch" and num_microbatches < stages:
        raise ValueError(
            f"num_microbatches={num_microbatches} are fewer than the {stages} stages, and PyTorch's 1F1B wants one for each: take "
            f"at least {stages}, or implementation='hand'."
        )
    if pace < 0:
        raise ValueError(f"pace={pace}: give seconds, 0 for the stages' own speed.")


if __name__ == "__main__":
    run(train)
