"""One tracker per rank: TensorBoard's event files, or W&B's offline ones, in a folder of the rank's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

TO = ("tensorboard", "wandb", "none")


class Backend(Protocol):
    """Where metrics go. Both may raise whatever their library raises."""

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes this rank's metrics to ``folder/rank<n>``.

    Most loops log on rank 0 only, so a rank that is slow, short of memory or fed with other data is never seen. Here
    every rank writes, each to its own folder, and nothing travels between ranks for it.

    A tracker that fails never ends a training run: a full disk or a folder that cannot be written gives one sentence on
    stderr, kept in ``problem``; what comes later is dropped. Whoever would rather stop looks at ``problem``.

    Args:
        folder: of the run; the same for all ranks, and again after a restart.
        to: ``"tensorboard"`` (event files), ``"wandb"`` (a run per rank, grouped), ``"none"`` (log and write nothing).
        run_name: of the run, in W&B: the group; ``""`` takes the folder's name.
        rank, world_size: this rank's place; ``None`` reads ``RANK`` and ``WORLD_SIZE``, and is one of one without them.
        online: let W&B talk to its server; otherwise it is kept offline whatever the environment says.

    Raises:
        ValueError: another ``to``, a rank outside of its world.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        to: str = "tensorboard",
        run_name: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        online: bool = False,
    ) -> None:
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world_size = int(os.environ.get("WORLD_SIZE", str(rank + 1))) if world_size is None else world_size
        if to not in TO:
            raise ValueError(f"to={to!r}: choose one of {', '.join(TO)}.")
        for name, value, least in (("rank", rank, 0), ("world_size", world_size, rank + 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: a whole number of at least {least}; ranks count from 0.")
        self.folder = Path(folder).resolve() / f"rank{rank}"
        self.rank, self.to = rank, to
        self.problem = ""  # why nothing is written any more
        self._backend: Backend | None = None
        self._try(lambda: self._open(run_name or self.folder.parent.name, world_size, online))

    def log(self, step: int, **numbers: Any) -> None:
        """Write this rank's numbers of one step.

        Args:
            step: the step they belong to.
            numbers: numbers, also tensors of one element (reading one waits for the GPU); None is left out.

        Raises:
            TypeError, ValueError: what is no number.
        """
        plain = {name: float(value) for name, value in numbers.items() if value is not None}
        if self._backend is not None:
            backend = self._backend
            self._try(lambda: backend.log(int(step), plain))

    def close(self) -> None:
        """Write what waits. Further calls do nothing."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self._try(backend.close)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, run_name: str, world_size: int, online: bool) -> None:
        if self.to == "none":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.to == "tensorboard":
            from course_lib.observe.tracking.event_files import EventFiles

            self._backend = EventFiles(self.folder)
        else:
            self._backend = WandbRun(self.folder, run_name, self.rank, world_size, online)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # whatever a tracker's library raises: not worth a training run
            self._backend = None
            reason = str(error) or type(error).__name__
            self.problem = (
                f"the tracker of rank {self.rank} cannot write to {self.folder} ({reason}): training goes on, "
                "its further metrics are lost."
            )
            print(self.problem, file=sys.stderr)


class WandbRun:
    """One rank's run of Weights & Biases, in files that ``wandb sync`` can send later; all ranks' runs form a group."""

    def __init__(self, folder: Path, run_name: str, rank: int, world_size: int, online: bool) -> None:
        import wandb

        self._run = wandb.init(
            project="beyond-one-gpu",
            group=run_name,
            name=f"{run_name}-rank{rank}",
            config={"rank": rank, "world_size": world_size},
            dir=str(folder),
            mode="online" if online else "offline",
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_save_requirements=False),
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
