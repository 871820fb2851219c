"""Imported once, in the forkserver; a rank is then a fork that has all this. Nothing else should import it.

Slow to import and used by nearly every lesson: PyTorch and Transformers. The order is that of need.
"""

import gc
import importlib
import os
import signal

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
_also = [_name for _name in os.environ.pop("COURSE_LIB_PRELOAD", "").split(",") if _name]
gc.disable()  # an import creates many objects and frees few: looking for garbage meanwhile costs a fifth of the time
for _name in (*SLOW, *_also):
    if _name in _also[:1]:  # what others say while they are imported is no news for the notebook, whose cell this is
        _shown = [(os.dup(_number), _number) for _number in (1, 2)]
        _nowhere = os.open(os.devnull, os.O_WRONLY)
        for _number in (1, 2):
            os.dup2(_nowhere, _number)
    try:
        importlib.import_module(_name)
    except Exception:  # a package that is missing or broken is reported by the rank that needs it
        continue
    if os.getppid() != _notebook:  # the notebook was killed meanwhile: nobody waits for this any more
        os._exit(0)
if _also:
    for _kept, _number in _shown:
        os.dup2(_kept, _number)
        os.close(_kept)
    os.close(_nowhere)
gc.freeze()  # what a fork never collects it never writes to, and so keeps sharing
gc.enable()
