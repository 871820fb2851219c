"""A pool of GPUs to lease from, and the lease of one `launch`."""

from __future__ import annotations

import os
from collections.abc import Callable

from course_lib.launch.leases.lease import Lease
from course_lib.launch.leases.machine import COUNT_VARIABLE, count_gpus
from course_lib.launch.leases.state import PoolState

FOLDER_VARIABLE = "BEYOND_ONE_GPU_LEASES"


class Pool(PoolState):
    """The GPUs 0, 1, … of this machine, lent through the locks in ``folder``.

    Args:
        folder: of this machine (not of a network file system), the same for the whole class. Where there is none yet, the
            first lease makes it; `gpus init` does so beforehand, so that it belongs to the instructor.
        gpus: how many there are; None for as many as the folder was made for, or else as the machine has.
    """

    def lease(
        self, n: int = 1, *, name: str = "", wait: float | None = None, tell: Callable[[str], None] = print
    ) -> Lease:
        """A lease of ``n`` GPUs, for a ``with`` block: it is taken at the beginning and given back at the end.

        Args:
            n: GPUs, all at once or none.
            name: of the learner; "" for BEYOND_ONE_GPU_NAME, or else the user's name.
            wait: seconds to wait at most for one's turn (0: take it now or not at all); None for as long as it takes.
            tell: is given the sentences of the wait.

        Raises (at the beginning of the block):
            NoTurn: ``wait`` has passed.
            ValueError: more GPUs than the pool has, an impossible folder or wait, or this thread holds a lease already.
        """
        return Lease(self, n, name=name, wait=wait, tell=tell)


def for_run(ranks: int, chosen: str, asked: str | None, tell: Callable[[str], None]) -> Lease:
    """The lease of a run, not taken yet; of no GPUs where BEYOND_ONE_GPU_LEASES is not set or the ranks are on the CPU.

    Args:
        ranks: processes of the run.
        chosen: its backend; NCCL wants one GPU per rank.
        asked: the backend that the caller named. Where none was named, BEYOND_ONE_GPU_GPUS makes a machine without GPUs
            lease what it would want if it had them: a rehearsal.
        tell: where the sentences of the wait go.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        return Lease(None, 0)
    rehearsal = asked is None and os.environ.get(COUNT_VARIABLE, "") != "" and ranks <= count_gpus()
    return Pool(folder).lease(ranks, tell=tell) if chosen == "nccl" or rehearsal else Lease(None, 0)
