"""Bytes that really left this process, as the operating system counted them.

gloo speaks TCP, also between two ranks of one machine, and Linux keeps a byte counter for every TCP connection. NCCL
inside one machine uses shared memory or NVLink, where no socket counts anything: there the answer is ``None``.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

# struct tcp_info, linux/tcp.h: __u64 tcpi_bytes_acked at 120, tcpi_bytes_received at 128, tcpi_bytes_sent at 200
_BYTES_SENT_AT, _TCP_INFO_SIZE = 200, 256


def sent_bytes() -> int | None:
    """Bytes that this process has sent on its open TCP connections since each was opened; headers of TCP/IP excluded.

    Returns:
        bytes, or ``None`` where the system does not count them (not Linux, or a kernel before 4.19).
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            descriptor = os.dup(int(name))
        except OSError:  # closed between the listing and the look
            continue
        connection = socket.socket(fileno=descriptor)
        with connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        if len(info) < _BYTES_SENT_AT + 8:
            return None
        total += struct.unpack_from("<Q", info, _BYTES_SENT_AT)[0]
    return total


class WireMeter:
    """Counts what this rank sends inside a ``with`` block.

    >>> with WireMeter() as wire:
    ...     loss.backward()
    >>> wire.bytes            # bytes, or None where nothing counts them
    """

    bytes: int | None = None

    def __enter__(self) -> WireMeter:
        self._before = sent_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        after = sent_bytes()
        self.bytes = None if after is None or self._before is None else after - self._before
