"""The tracker and the heartbeat as an Axolotl plugin: two lines of YAML.

    plugins:
      - course_tools.axolotl.tracking_plugin.EveryRankPlugin

It writes below ``output_dir``: the metrics to ``tracking/``, the heartbeats to ``heartbeats/``. The environment may
say otherwise: ``EVERY_RANK_FOLDER`` another folder, ``EVERY_RANK_SECONDS`` another time between two beats.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin

from course_lib.observe.heartbeat import Heartbeat
from course_lib.observe.tracking.callback import EveryRank
from course_lib.observe.tracking.tracker import Tracker


class EveryRankPlugin(BasePlugin):
    """Adds `EveryRank` to the Trainer that Axolotl builds, on every rank."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        folder = Path(os.environ.get("EVERY_RANK_FOLDER") or cfg.output_dir)
        seconds = float(os.environ.get("EVERY_RANK_SECONDS", "10"))
        rank, world_size = trainer.args.process_index, trainer.args.world_size
        tracker = Tracker(folder / "tracking", rank=rank, world_size=world_size)
        heartbeat = Heartbeat(folder / "heartbeats", rank=rank, every=seconds)
        return [EveryRank(tracker, heartbeat, trainer=trainer)]
