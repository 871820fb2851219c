"""Every collective written out over send and receive, one algorithm a file.

>>> from course_lib.collectives.by_hand import ring
>>> ring.all_reduce(gradient)            # in place, as torch.distributed.all_reduce(gradient)

The functions take what the library's call of the same name takes, in the same order, and always sum:

    broadcast(tensor, root=0, group=None)              naive, tree
    reduce(tensor, root=0, group=None)                 naive, tree
    all_reduce(tensor, group=None)                     naive, tree, doubling, halving, ring
    reduce_scatter(output, inputs, group=None)         naive, ring
    all_gather(outputs, tensor, group=None)            naive, ring
    gather(tensor, outputs=None, root=0, group=None)   naive
    scatter(output, inputs=None, root=0, group=None)   naive
    all_to_all(outputs, inputs, group=None)            naive, all_to_all

``root`` is a global rank, as in torch.distributed; ``inputs`` and ``outputs`` are lists with one tensor a rank of the
group, which may differ in size. Tensors are contiguous; one without elements is fine, and nothing is sent for it.
``check=False`` leaves out the exchange of headers that tells bad input before it hangs (see ``agreement``).
"""

from course_lib.collectives.by_hand import all_to_all, doubling, halving, naive, parameter_server, ring, tree
from course_lib.collectives.by_hand.traffic import Traffic

__all__ = ["Traffic", "all_to_all", "doubling", "halving", "naive", "parameter_server", "ring", "tree"]
