"""A plugin that gives every token the same weight, whichever rank it is on.

In a YAML: ``plugins: [course_tools.axolotl.token_mean.TokenMean]``. Axolotl 0.21 averages the ranks' means: a
token on the rank with the shorter texts weighs more, and two ranks are not one rank with twice the batch.
Transformers can divide by the tokens of all ranks instead; no key of the YAML reaches that setting.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault


class TokenMean(BasePlugin):
    """Sets `average_tokens_across_devices` of transformers' training arguments."""

    def get_training_args(self, cfg: DictDefault) -> dict[str, Any]:
        """Arguments that go over Axolotl's own."""
        return {"average_tokens_across_devices": True}
