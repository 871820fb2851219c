"""Launch ranks that see several machines where there is one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from course_lib.collectives.links import Link
from course_lib.collectives.links import link as preset
from course_lib.launch import Run, launch
from course_lib.launch.emulation import namespaces
from course_lib.launch.emulation.delay import slow_down
from course_lib.launch.supervision import Folder
from course_lib.validation import check_counts


@dataclass(frozen=True)
class Hosts:
    """What ``emulated_hosts`` gives.

    Attributes:
        hosts, ranks_per_host: as asked.
        link: each host's link, ``None`` for one as fast as the machine.
        how: "namespaces" (real packets through shaped links) or "delay" (all-reduces are held back).
        why: why it is not namespaces; empty where it is.
        paths: of the namespaces, by host.
    """

    hosts: int
    ranks_per_host: int
    link: Link | None
    how: str
    why: str = ""
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)}"
        many = f"{self.hosts} host{'s' * (self.hosts > 1)} of {ranks}"
        speed = f"{self.link.bandwidth * 8 / 1e6:g} Mbit/s each way" if self.link else "as fast as this machine"
        if self.how == "namespaces":
            return f"Emulated: {many} in network namespaces on one machine, links {speed}, latency this machine's own."
        reason = f" ({self.why})" if self.why else ""
        return f"Emulated: {many} on one machine, links {speed} by holding all-reduces back{reason}."

    def launch(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> Run:
        """``course_lib.launch.launch`` on all hosts, over gloo: rank r runs on host r // ranks_per_host.

        In the function LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (the host) say what torchrun would. The stamp of the
        run says that it is an emulation.

        Args:
            function, args, timeout, kwargs: as ``launch`` takes them, without ``ranks`` and ``backend``.
        """
        folder = Folder()
        meet_at = f"file://{folder.path}/store"

        @functools.wraps(function)
        def on_host(*args: Any, **kwargs: Any) -> Any:
            _move(self, meet_at, timedelta(seconds=timeout + 60))
            return function(*args, **kwargs)

        ranks = self.hosts * self.ranks_per_host
        try:
            run = launch(on_host, *args, ranks=ranks, backend="gloo", timeout=timeout, **kwargs)
        finally:
            folder.remove()
        run.stamp["summary"] += f". {self}"
        run.stamp["emulated"] = str(self)
        return run


@contextmanager
def emulated_hosts(hosts: int = 3, ranks_per_host: int = 1, link: Link | str | None = None) -> Iterator[Hosts]:
    """Several hosts on this machine for the length of a ``with`` block; nothing of them outlives it.

    Network namespaces where the machine allows them (Linux, root), else a delay; the ``Hosts`` says which and why.
    Cores, memory and clocks are shared all the same: ranks that compute slow each other down.

    Args:
        hosts: at most 250.
        ranks_per_host: ranks of one host talk past the link.
        link: what joins each host to the switch, or the key of a preset; ``None`` for one as fast as the machine. Only
            its bandwidth is emulated by namespaces; the delay adds its latency too, and holds back what stays in a host.
    """
    check_counts(hosts=hosts, ranks_per_host=ranks_per_host)
    wire = None if link is None else preset(link)
    switch, why = None, ""
    try:
        switch = namespaces.Namespaces(hosts, wire.bandwidth if wire else None)
    except namespaces.CannotEmulate as error:
        why = str(error)
    try:
        how, paths = ("namespaces", switch.paths) if switch else ("delay", ())
        yield Hosts(hosts, ranks_per_host, wire, how, why, paths)
    finally:
        if switch:
            switch.close()


def _move(hosts: Hosts, meet_at: str, timeout: timedelta) -> None:
    """In a rank: move to its host, and meet the others there."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    host, local_rank = divmod(rank, hosts.ranks_per_host)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(hosts.ranks_per_host), GROUP_RANK=str(host))
    if hosts.how == "namespaces":
        dist.destroy_process_group()  # its connections run over this machine's loopback interface
        namespaces.enter(hosts.paths[host])
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = namespaces.INTERFACE
        dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=ranks, timeout=timeout)
    elif hosts.link and hosts.hosts > 1:
        slow_down(hosts.link)
