"""The arithmetic of links: what a collective costs, by ranks, bytes and link. Nothing here needs torch.

>>> ring_seconds("all_reduce", 8, 1e9, "nvlink4")
>>> Cluster(gpus=8, nodes=4, inner="nvswitch-h100", outer="infiniband-ndr", outer_links=8).seconds("all_reduce", 1e9)
>>> fit(sizes, seconds_measured).bandwidth
"""

from course_lib.collectives.links.cluster import Cluster
from course_lib.collectives.links.fitting import Fit, fit
from course_lib.collectives.links.link import LINKS, Link, link
from course_lib.collectives.links.ring import algorithm_bandwidth, bus_bandwidth, bus_factor, ring_seconds

__all__ = [
    "LINKS",
    "Cluster",
    "Fit",
    "Link",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "bus_factor",
    "fit",
    "link",
    "ring_seconds",
]
