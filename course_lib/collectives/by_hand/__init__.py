"""Collectives written out over send and receive, one algorithm per file.

>>> from course_lib.collectives.by_hand import ring
>>> ring.all_reduce(gradient)            # in place, as torch.distributed.all_reduce(gradient)

The functions take what the library's call of the same name takes, in the same order, and always sum:

    broadcast(tensor, root=0, group=None)              naive
    reduce(tensor, root=0, group=None)                 naive
    all_reduce(tensor, group=None)                     naive, ring
    reduce_scatter(output, inputs, group=None)         ring
    all_gather(outputs, tensor, group=None)            ring
    gather(tensor, outputs=None, root=0, group=None)   naive
    scatter(output, inputs=None, root=0, group=None)   naive

``root`` is a global rank, as in torch.distributed; ``inputs`` and ``outputs`` are lists with one tensor per rank of the
group, which may differ in size. Tensors are contiguous; one without elements is fine, and nothing is sent for it.
Before the payload the ranks compare shape and dtype, so that bad input raises a ValueError instead of hanging;
``check=False`` leaves that out.
"""

from course_lib.collectives.by_hand import naive, parameter_server, ring
from course_lib.collectives.by_hand.traffic import Traffic

__all__ = ["Traffic", "naive", "parameter_server", "ring"]
