"""Transformers' Trainer, and so Axolotl, with a tracker and a heartbeat on every rank.

The Trainer hands its logs to callbacks on every rank, but its own integrations write on rank 0 only, and the loss in
them is the mean over all ranks. Here each rank writes its own.
"""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from course_lib.observe.heartbeat import Heartbeat
from course_lib.observe.tracking.tracker import Tracker

NAMES = {"grad_norm": "gradient_norm"}  # the Trainer's names -> the course's
MAY_TAKE = 600.0  # seconds for what the Trainer does outside of its steps: save, evaluate


class EveryRank(TrainerCallback):
    """Logs this rank's metrics and beats, phase by phase.

    Written at each log of the Trainer: ``loss`` (all ranks' mean), ``own_loss`` (this rank's; only where ``trainer``
    is given), ``gradient_norm``, ``learning_rate``, and of this rank alone ``tokens_per_second``, ``memory_bytes``
    (CUDA: peak of the allocator; CPU: resident memory) and ``heartbeat_gap`` (seconds, the longest since the last log).

    Args:
        tracker, heartbeat: either may be None. Both are closed when training ends.
        trainer: the Trainer, for this rank's own loss.
        may_take: seconds granted for saving, and for evaluating.
    """

    def __init__(
        self,
        tracker: Tracker | None = None,
        heartbeat: Heartbeat | None = None,
        *,
        trainer: Any = None,
        may_take: float = MAY_TAKE,
    ) -> None:
        self.tracker, self.heartbeat, self.trainer, self.may_take = tracker, heartbeat, trainer, may_take
        self._hooks: list[Any] = []
        self._tokens, self._since, self._own_loss, self._logged = 0, time.monotonic(), None, 0
        self._long: Any = None  # the declared phase that is under way

    # ------------------------------------------------------------------------------------------- where the loop is
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._since, self._logged = time.monotonic(), state.global_step
        if model is not None:
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                model.register_forward_hook(lambda *_: self._beat("backward") if model.training else None),
            ]
        self._beat("data", state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_long()
        self._beat("forward", state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._beat("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_log and hasattr(self.trainer, "_tr_loss"):  # before the Trainer takes the mean and resets it
            steps = max(1, state.global_step - self._logged)
            self._own_loss, self._logged = float(self.trainer._tr_loss) / steps, state.global_step
        self._beat("data", state.global_step)
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:  # the Trainer does them next, and tells when they are over
            self._begin_long("evaluating" if control.should_evaluate else "saving")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._beat("evaluating")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_long()
        if control.should_save:
            self._begin_long("saving")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_long()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_long()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.tracker is not None:
            self.tracker.close()
        if self.heartbeat is not None:
            self.heartbeat.close()

    # ------------------------------------------------------------------------------------------------ what it wrote
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.tracker is None:
            return
        numbers = {NAMES.get(k, k): v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
        if "loss" in numbers:  # not the summary at the end, nor an evaluation
            now = time.monotonic()
            numbers["tokens_per_second"] = self._tokens / max(now - self._since, 1e-9)
            self._tokens, self._since = 0, now
            numbers["memory_bytes"] = _memory_bytes()
            numbers["own_loss"] = self._own_loss
            if self.heartbeat is not None:
                numbers["heartbeat_gap"] = self.heartbeat.longest_gap()
        self.tracker.log(state.global_step, **numbers)

    def _before_forward(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._tokens += ids.numel() if isinstance(ids, torch.Tensor) else 0
        self._beat("forward")

    def _beat(self, phase: str, step: int | None = None) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat(step, phase)

    def _begin_long(self, name: str) -> None:
        self._end_long()
        if self.heartbeat is not None:
            self._long = self.heartbeat.phase(name, may_take=self.may_take)
            self._long.__enter__()

    def _end_long(self) -> None:
        long, self._long = self._long, None
        if long is not None:
            long.__exit__(None, None, None)


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss
