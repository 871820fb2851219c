"""One tracker per rank: TensorBoard's event files in a folder of the rank's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.observe.tracking.event_files import EventFiles


class Tracker:
    """Writes this rank's metrics to ``folder/rank<n>``.

    Most loops log on rank 0 only, so a rank that is slow, short of memory or fed with other data is never seen. Here
    every rank writes, each to its own folder, and nothing travels between ranks for it.

    A tracker that fails never ends a training run: a full disk or a folder that cannot be written gives one sentence on
    stderr, kept in ``problem``; what comes later is dropped. Whoever would rather stop looks at ``problem``.

    Args:
        folder: of the run; the same for all ranks, and again after a restart.
        rank: this rank; ``None`` reads ``RANK``, and is 0 without it.

    Raises:
        ValueError: a rank that is no whole number of at least 0.
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int | None = None) -> None:
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"rank={rank!r}: a whole number of at least 0.")
        self.folder = Path(folder).resolve() / f"rank{rank}"
        self.rank = rank
        self.problem = ""  # why nothing is written any more
        self._files: EventFiles | None = None
        self._try(self._open)

    def log(self, step: int, **numbers: Any) -> None:
        """Write this rank's numbers of one step.

        Args:
            step: the step they belong to.
            numbers: numbers, also tensors of one element (reading one waits for the GPU); None is left out.

        Raises:
            TypeError, ValueError: what is no number.
        """
        plain = {name: float(value) for name, value in numbers.items() if value is not None}
        if self._files is not None:
            files = self._files
            self._try(lambda: files.log(int(step), plain))

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        files, self._files = self._files, None
        if files is not None:
            self._try(files.close)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = EventFiles(self.folder)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, also a missing TensorBoard: not worth a training run
            self._files = None
            reason = str(error) or type(error).__name__
            self.problem = (
                f"the tracker of rank {self.rank} cannot write to {self.folder} ({reason}): training goes on, "
                "its further metrics are lost."
            )
            print(self.problem, file=sys.stderr)
