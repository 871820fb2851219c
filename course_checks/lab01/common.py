"""What the checks of lab 1 share: the lab itself, and refusing the course's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from course_checks.harness import Lab, NotYet

lab = Lab("01_gpu_memory", title="Out of memory")


@contextmanager
def refused(sentence: str, *targets: tuple[Any, str]) -> Iterator[None]:
    """Within the block each target, an owner and the name of its function, raises NotYet with this sentence."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotYet(sentence)

    with ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(patch.object(owner, name, refuse))
        yield
