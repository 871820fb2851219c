"""Measure this machine's links: collectives by size, copies, and the topology as the driver reports it."""

from course_lib.collectives.measuring.collectives import KINDS, Curve, Point, bench_collective
from course_lib.collectives.measuring.copies import Copy, copy_bandwidth
from course_lib.collectives.measuring.machine import topology

__all__ = ["KINDS", "Copy", "Curve", "Point", "bench_collective", "copy_bandwidth", "topology"]
