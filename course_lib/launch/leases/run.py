"""The GPUs that one `launch` wants: leased where the class shares them, and nothing at all where it does not."""

from __future__ import annotations

import os
from collections.abc import Callable

from course_lib.launch.leases.lease import Lease
from course_lib.launch.leases.machine import COUNT_VARIABLE, count_gpus
from course_lib.launch.leases.pool import FOLDER_VARIABLE, Pool


def for_run(ranks: int, chosen: str, asked: str | None, tell: Callable[[str], None]) -> Lease:
    """The lease of a run, not taken yet; of no GPUs where BEYOND_ONE_GPU_LEASES is not set or the ranks are on the CPU.

    Args:
        ranks: processes of the run.
        chosen: its backend; NCCL wants one GPU a rank.
        asked: the backend that the caller named. Where none was named, BEYOND_ONE_GPU_GPUS makes a machine without GPUs
            lease what it would want if it had them: a rehearsal.
        tell: where the sentences of the wait go.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        return Lease(None, 0)
    rehearsal = asked is None and os.environ.get(COUNT_VARIABLE, "") != "" and ranks <= count_gpus()
    return Pool(folder).lease(ranks, tell=tell) if chosen == "nccl" or rehearsal else Lease(None, 0)
