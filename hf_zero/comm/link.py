"""Connections between the stall watches of two ranks: JSON lines over TCP.

TCP's keepalive probes tell a host that cannot be reached from a process that does not answer: the kernel of a
stopped process still answers them.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import psutil

RETRY_S = 2.0
"""An attempt to connect sends two packets in this time."""
_PROBES = 3
"""Keepalive probes without an answer after which the kernel closes a connection."""
_UNSENT_BYTES = 1 << 20
"""More is not kept for a peer that does not read."""
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class Link:
    """A connection that is opened again while its peer's host cannot be reached.

    Args:
        is_known: the host has answered before.

    Attributes:
        has_ended: the peer has closed the connection or refuses it.
    """

    def __init__(self, stall_s: float, *, is_known: bool = False) -> None:
        self.has_ended = False
        self._is_known, self._stall_s = is_known, stall_s
        self._lost_at: float | None = None
        self._writer: asyncio.StreamWriter | None = None

    def silent_s(self) -> float:
        """Return for how long the host has not answered; 0 if it answers or never did."""
        return time.perf_counter() - self._lost_at if self._lost_at is not None and self._is_known else 0.0

    async def connect(self, address: tuple[str, int]) -> asyncio.StreamReader | None:
        """Return a reader for `receive`; None if there is no connection."""
        began = time.perf_counter()
        try:
            opening = asyncio.open_connection(*address)
            reader, writer = await asyncio.wait_for(opening, max(RETRY_S, self._stall_s / 6))
        except OSError as error:
            self._fail(error, began)
            return None
        self.adopt(writer)
        return reader

    def adopt(self, writer: asyncio.StreamWriter) -> None:
        """Use an open connection; its kernel closes it if the host does not answer for `_silence_s`."""
        self._writer, self._is_known, self._lost_at = writer, True, None
        connection, every_s = writer.get_extra_info("socket"), max(1, int(self._stall_s / 8))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
        options = {idle: every_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": _PROBES}
        for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * self._silence_s}.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def _silence_s(self) -> int:
        """Half of `stall_s`, at least 4 s."""
        return (1 + _PROBES) * max(1, int(self._stall_s / 8))

    async def receive(self, reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
        """Yield messages until the connection ends."""
        try:
            while line := await reader.readline():
                yield json.loads(line)
            self.has_ended = True
        except (OSError, ValueError) as error:
            self._fail(error, time.perf_counter() - self._silence_s)
        finally:
            self.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or drop it if the connection is not open or its peer does not read."""
        writer = self._writer
        if writer is not None and writer.transport.get_write_buffer_size() < _UNSENT_BYTES:
            writer.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _fail(self, error: Exception, silent_since: float) -> None:
        if isinstance(error, TimeoutError) or getattr(error, "errno", 0) in _UNREACHABLE:
            self._lost_at = self._lost_at or silent_since
        elif isinstance(error, (ConnectionResetError, BrokenPipeError)):
            # Says nothing about the process: in a cut, its kernel may have closed the connection.
            self._lost_at = self._lost_at or time.perf_counter()
        elif isinstance(error, (ConnectionRefusedError, ValueError)):
            self.has_ended, self._is_known, self._lost_at = True, True, None


def listen(store: tuple[str, int] | None) -> tuple[socket.socket, tuple[str, int]]:
    """Open the socket of rank 0 on the interface through which other ranks reach it.

    Args:
        store: host name and port of the process group's store, if it has them.

    Returns:
        The socket, and the address under which other ranks connect. An empty host stands for the store's.
    """
    address = _own_address(store)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(4096)
    return listener, (address, listener.getsockname()[1])


def _own_address(store: tuple[str, int] | None) -> str:
    """Return gloo's interface, else the route to the store; empty: all interfaces."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, ()):
        if each.family == socket.AF_INET:
            return each.address
    if store is None:
        with suppress(OSError):
            return socket.gethostbyname(socket.gethostname())
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)  # sends nothing
        found = str(route.getsockname()[0]).removeprefix("::ffff:")
    # The host of the store may know its own name as a loopback address only; other hosts know it as another.
    is_local = store[0] == "localhost" or _is_loopback(store[0])
    return "" if _is_loopback(found) and not is_local else found


def store_clients(port: int) -> list[tuple[str, int]]:
    """Return the addresses on other hosts that are connected to the store of this process.

    A port without a listener refuses a connection. That is an answer, too.
    """
    found = {}
    with suppress(psutil.Error, OSError, ValueError):
        for each in psutil.Process().net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.laddr.port == port:
                here, there = (end.ip.removeprefix("::ffff:") for end in (each.laddr, each.raddr))
                if here != there and not _is_loopback(there) and ip_address(there).is_private:
                    found[there] = int(each.raddr.port)
    return list(found.items())


def resolve(host: str, port: int) -> tuple[str, int]:
    found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    return str(found[0]), int(found[1])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
