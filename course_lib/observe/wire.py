"""Count the bytes that really left this process, as the operating system counts them.

gloo speaks TCP, also between two ranks of one machine, and Linux keeps a byte counter for every TCP connection. NCCL
inside one machine uses shared memory or NVLink, where no socket counts anything: there the answer is ``None``.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

# struct tcp_info, linux/tcp.h: __u32 tcpi_notsent_bytes at 144, __u64 tcpi_bytes_sent at 200, tcpi_bytes_retrans at 208
_NOT_SENT_AT, _SENT_AT, _SENT_AGAIN_AT, _TCP_INFO_SIZE = 144, 200, 208, 256


# Last count of every connection seen, by inode: a peer that leaves closes its connection, and what it carried stays sent.
_seen: dict[int, int] = {}


def sent_bytes() -> int | None:
    """Bytes that this process has given to its TCP connections since each was opened; headers of TCP/IP excluded.

    Bytes that wait in the system's buffer count already, bytes that had to be sent again count once. A connection that
    closed since the last call counts with what it had sent by then.

    Returns:
        bytes, or ``None`` where the system does not count them (not Linux, or a kernel before 4.19).
    """
    if not sys.platform.startswith("linux"):
        return None
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            if not stat.S_ISSOCK(status.st_mode):
                continue
            descriptor = os.dup(int(name))
        except OSError:  # closed between the listing and the look
            continue
        connection = socket.socket(fileno=descriptor)
        with connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        if len(info) < _SENT_AGAIN_AT + 8:
            return None
        (waiting,) = struct.unpack_from("=I", info, _NOT_SENT_AT)
        sent, sent_again = struct.unpack_from("=QQ", info, _SENT_AT)
        _seen[status.st_ino] = sent - sent_again + waiting
    return sum(_seen.values())


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
