"""The arithmetic of links: what a collective costs, by algorithm, ranks, bytes and link. Nothing here needs torch.

>>> seconds("ring", "all_reduce", 8, 1e9, "nvlink4")
>>> Cluster(gpus=8, nodes=4, inner="nvswitch-h100", outer="infiniband-ndr", outer_links=8).seconds("all_reduce", 1e9)
>>> fit(sizes, seconds_measured).bandwidth
"""

from course_lib.collectives.links.bus import algorithm_bandwidth, bus_bandwidth, bus_factor
from course_lib.collectives.links.cluster import Cluster
from course_lib.collectives.links.cost import ALGORITHMS, COLLECTIVES, Path, algorithms, path, seconds
from course_lib.collectives.links.fitting import Fit, fit
from course_lib.collectives.links.link import LINKS, Link, link

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "LINKS",
    "Cluster",
    "Fit",
    "Link",
    "Path",
    "algorithm_bandwidth",
    "algorithms",
    "bus_bandwidth",
    "bus_factor",
    "fit",
    "link",
    "path",
    "seconds",
]
