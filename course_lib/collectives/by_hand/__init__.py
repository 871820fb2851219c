"""Collectives written out over send and receive, one algorithm per file.

>>> from course_lib.collectives.by_hand import ring
>>> ring.all_reduce(gradient)            # in place, as torch.distributed.all_reduce(gradient)

``naive.all_reduce`` and ``ring.all_reduce`` take what the library's call takes, in the same order, and always sum.
Tensors are contiguous; one without elements is fine, and nothing is sent for it. Before the payload the ranks compare
shape and dtype, so that bad input raises a ValueError instead of hanging; ``check=False`` leaves that out.
"""

from course_lib.collectives.by_hand import naive, parameter_server, ring
from course_lib.collectives.by_hand.traffic import Traffic

__all__ = ["Traffic", "naive", "parameter_server", "ring"]
