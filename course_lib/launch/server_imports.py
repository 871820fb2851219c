"""Import what ranks need, once, in the forkserver that ranks are forked from. Nothing else should import this module.

Slow to import and used by nearly every lesson: PyTorch and Transformers. The order is that of need.
"""

import contextlib
import gc
import importlib
import logging
import os
import signal
from collections.abc import Iterable, Iterator

from course_lib.launch.agent import ALSO

SLOW = (
    "torch",
    "torch.distributed.elastic.multiprocessing.api",
    "cloudpickle",
    "course_lib.launch.rank",
    "course_lib.observe.collectives",
    "course_lib.observe.memory",
    "torch.distributed.tensor",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)

# A notebook's interrupt goes to its whole process group; it means the cell, not the server. warm() blocked the signal
# for the time before this line.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

_notebook = os.getppid()


def _import(names: Iterable[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # a package that is missing or broken is reported by the rank that needs it
            continue
        if os.getppid() != _notebook:  # the notebook was killed meanwhile: nobody waits for this any more
            os._exit(0)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What others say while they are imported is no news for the notebook, whose cell this is."""
    shown, nowhere = [(os.dup(number), number) for number in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    try:
        yield
    finally:
        for kept, number in shown:
            os.dup2(kept, number)
            os.close(kept)
        os.close(nowhere)


gc.disable()  # an import creates many objects and frees few: looking for garbage meanwhile costs a fifth of the time
_import(SLOW)
with _silence():
    _import(filter(None, os.environ.pop(ALSO, "").split(",")))
logging.captureWarnings(
    False
)  # Axolotl turns it on for its own log; the ranks of others would write their warnings there
gc.freeze()  # what a fork never collects it never writes to, and so keeps sharing
gc.enable()
