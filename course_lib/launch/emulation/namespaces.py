"""Build hosts as network namespaces around a switch, joined by cables (veth) whose speed a token bucket (tbf) sets.

A namespace lives as long as a process is in it, and nothing else holds these: no name, no file, no interface outside.
So each is held by a `cat` that reads from this process. Whatever becomes of this process, the pipe closes, `cat` ends,
and the kernel takes namespace, cable and switch away. There is nothing to clean up after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_SECONDS = 10.0  # a command that has not ended by then never will
INTERFACE = "eth0"


class CannotEmulate(RuntimeError):
    """This machine does not let this process make network namespaces with shaped links; the message says what failed."""


class Namespaces:
    """A switch and `hosts` hosts, 10.77.0.1 upwards, until ``close``.

    Args:
        hosts: 1 to 250.
        bandwidth: bytes/s of each host's cable, in each direction; ``None`` leaves it as fast as the machine is.

    Raises:
        CannotEmulate: not Linux, not root, a tool or a kernel module is missing.
    """

    def __init__(self, hosts: int, bandwidth: float | None) -> None:
        missing = [tool for tool in _TOOLS if not shutil.which(tool)]
        if sys.platform != "linux" or missing:
            raise CannotEmulate(f"needs Linux with {', '.join(_TOOLS)}; missing: {', '.join(missing) or sys.platform}")
        self._holders: list[subprocess.Popen] = []
        try:
            for _ in range(hosts + 1):
                self._holders.append(_holder())
            for holder in self._holders:
                _wait_until_ready(holder)
            self._connect(bandwidth)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """Of each host's namespace, for ``enter``."""
        return tuple(f"/proc/{holder.pid}/ns/net" for holder in self._holders[1:])

    def _connect(self, bandwidth: float | None) -> None:
        switch, *hosts = (holder.pid for holder in self._holders)
        lines = ["link add name switch type bridge", "link set switch up"]
        for i, host in enumerate(hosts):
            lines.append(f"link add port{i} type veth peer name {INTERFACE} netns {host}")
            lines.append(f"link set port{i} master switch up")
        _inside(switch, "ip", lines)
        for i, host in enumerate(hosts):
            address = f"addr add 10.77.0.{i + 1}/24 dev {INTERFACE}"
            _inside(host, "ip", [address, f"link set {INTERFACE} up", "link set lo up"])
        if bandwidth is not None:  # at both ends of a cable: what comes in to a server is as slow as what goes out
            _inside(switch, "tc", [_bucket(f"port{i}", bandwidth) for i in range(len(hosts))])
            for host in hosts:
                _inside(host, "tc", [_bucket(INTERFACE, bandwidth)])

    def close(self) -> None:
        """Let go of the namespaces: they end as soon as the last process in them does."""
        for holder in self._holders:
            for pipe in (holder.stdin, holder.stdout, holder.stderr):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        for holder in self._holders:
            try:
                holder.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()


def enter(path: str) -> None:
    """Move the calling thread, and every thread that it starts from now on, into a namespace.

    Raises:
        OSError: the system refuses (not root), or the namespace is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(handle)


def _holder() -> subprocess.Popen:
    """A process in a namespace of its own that does nothing, until the pipe from this process closes."""
    return subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the notebook, which ends the holders in its own time
    )


def _wait_until_ready(holder: subprocess.Popen) -> None:
    if holder.stdout.readline() != b"ready\n":
        raise CannotEmulate(holder.stderr.read().decode(errors="replace").strip() or "unshare ended without a word")


def _inside(pid: int, tool: str, lines: Sequence[str]) -> None:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", tool, "-batch", "-"]
    try:
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise CannotEmulate(f"`{tool}` did not answer within {_SECONDS:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise CannotEmulate(f"`{tool}` failed: {lines[0]}")


def _bucket(interface: str, bandwidth: float) -> str:
    """A token bucket that lets 2 ms of traffic, at least one segment, pass at once, and queues rather than drops."""
    burst = max(2**16, int(bandwidth * 2e-3))
    return f"qdisc add dev {interface} root tbf rate {int(bandwidth * 8)}bit burst {burst} limit {burst + 2**24}"
