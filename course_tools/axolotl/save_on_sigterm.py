"""A plugin that saves a checkpoint and ends the training when SIGTERM asks for it, on all ranks after the same step.

In a YAML: ``plugins: [course_tools.axolotl.save_on_sigterm.SaveOnSigterm]``. Transformers' own `enable_jit_checkpoint` has
each rank act by its own clock, 3 seconds after its own signal: two ranks may save at different steps, and then wait for
each other in different collectives. It may also save between a step's backward pass and its update; dropout has drawn
its random numbers then, and the resumed run, which repeats the step, draws others.

Axolotl also writes a model to `output_dir`, as after any training: it is as unfinished as the checkpoint.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault
from transformers import Trainer, TrainerCallback


def _ignore_sigterm(then: Callable[[int], None] | None, worker: int) -> None:
    """Let a data loader's worker leave only when its rank does; `then` is what it would have begun with."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)


class _Save(TrainerCallback):
    """Asks all ranks after each step whether any of them has had the signal: one all-reduce of one number."""

    asked = False

    def _ask(self, *_: Any) -> None:
        self.asked = True  # no more: the signal may come in the middle of anything
        # Where a peer is dead, this rank waits in a collective and never ends its step: then SIGALRM ends it, in time for
        # torchrun to start all ranks again. The other half of the time is for the save.
        signal.alarm(int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) // 2)

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self.before = signal.signal(signal.SIGTERM, self._ask)
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # below Accelerate's
        if loader is not None:
            # torchrun signals its ranks' process groups, and a worker that dies would take its rank down before the save
            loader.worker_init_fn = functools.partial(_ignore_sigterm, loader.worker_init_fn)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        asked = torch.tensor(int(self.asked), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked.item():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a later one would set the alarm again, in the save
            signal.alarm(0)
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.is_initialized():
            dist.barrier()  # Slurm ends all machines once the ranks of one have left: not before rank 0 has written
        signal.alarm(0)  # of a signal after the last step
        signal.signal(signal.SIGTERM, self.before or signal.SIG_DFL)


class SaveOnSigterm(BasePlugin):
    """Adds the callback to every rank's trainer."""

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Called by Axolotl once the trainer exists, before training."""
        trainer.add_callback(_Save())
