"""Data parallelism with Lightning, which starts its own ranks: ``ddp`` runs this program again for each rank,
``ddp_spawn`` starts new interpreters and must pickle what they need."""

from __future__ import annotations

import json
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
from course_lib.observe import Outcome
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size


class TinyLlama(lightning.LightningModule):
    """The tiny Llama with its loss and optimizer, as Lightning wants them."""

    def __init__(self, rows: GlobalBatches, micro_batch: int, lr: float, seed: int, strategy: str, report: str) -> None:
        super().__init__()
        self.report = report  # a file: ddp_spawn trains copies of this module, whose attributes do not come back
        self.rows, self.micro_batch, self.lr, self.strategy = rows, micro_batch, lr, strategy
        self.model = tiny_llama(seed=seed)
        self.losses: list[float] = []
        self.wrapper = ""

    def train_dataloader(self) -> DataLoader:
        # Left alone, Lightning puts a *shuffling* sampler before a training loader, also before one with shuffle=False
        place = dict(num_replicas=self.trainer.world_size, rank=self.trainer.global_rank)
        sampler = DistributedSampler(self.rows, shuffle=False, **place)
        return DataLoader(self.rows, batch_size=self.micro_batch, sampler=sampler)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        if batch_idx == 0:
            self.wrapper = type(self.trainer.strategy.model).__name__
            print(f"rank {self.global_rank} of {self.trainer.world_size}: {self.wrapper}", flush=True)
        return loss

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            print(f"{self.strategy} losses: {[round(x, 6) for x in self.losses]}", flush=True)
            with open(self.report, "w") as file:
                json.dump([self.losses, self.wrapper, self.trainer.world_size], file)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(
    *,
    strategy: str = "ddp",
    ranks: int = 2,
    steps: int = 5,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    seed: int = 0,
) -> Outcome:
    """Train the tiny Llama with Lightning's Trainer.

    Args:
        strategy: ``"ddp"`` or ``"ddp_spawn"``.
        ranks: processes that the Trainer starts on this machine.
        steps, global_batch, seq_len, lr, seed: as in ``course_lib.training.data_parallel.ddp``.

    Raises:
        ValueError: an unknown strategy, no steps, or a batch that does not divide into the ranks.
    """
    if strategy not in ("ddp", "ddp_spawn"):
        raise ValueError(f"strategy={strategy!r} is not one of 'ddp', 'ddp_spawn'.")
    micro_batch = micro_batch_size(steps=steps, global_batch=global_batch, ranks=ranks)
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len, seed=seed)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        module = TinyLlama(rows, micro_batch, lr, seed, strategy, report=f"{folder}/report.json")
        trainer.fit(module)
        losses, wrapper, world_size = module.losses, module.wrapper, trainer.world_size
        if trainer.global_rank == 0:
            with open(module.report) as file:
                losses, wrapper, world_size = json.load(file)
    return Outcome(losses, wrapper, trainer.global_rank, world_size, median_step=0.0, tokens_per_second=0.0, memory={})


if __name__ == "__main__":
    run(train, own_group=False)
