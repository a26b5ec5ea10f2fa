"""Non-blocking TCP connections between the watch threads of two ranks.

Keepalive probes tell a host that cannot be reached from a process that does not answer: the kernel of a
stopped process still answers them.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import psutil

_PROBES = 3
"""Keepalive probes without an answer after which the kernel closes a connection."""
_RETRY_S = 2.0
"""An attempt to connect sends two packets in this time."""
_BUFFER_BYTES = 1 << 20
"""More is neither kept for a peer that does not read, nor read of one message."""
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_RESET = (errno.ECONNRESET, errno.EPIPE)


class Channel:
    """A TCP connection that carries JSON objects, one per line. No call blocks.

    Args:
        connection: an accepted connection, or None to connect to `address`.
        address: host and port to connect to, again and again while the host cannot be reached.

    Attributes:
        is_open: messages can be sent.
        has_ended: the peer has closed the connection or refuses it.
        lost_at: since when the host has not answered; None while it answers.
        is_known: the host has answered at least once.
    """

    def __init__(
        self,
        connection: socket.socket | None,
        stall_s: float,
        address: tuple[str, int] | None = None,
        *,
        is_known: bool = False,
    ) -> None:
        self.address = address
        self.is_open = connection is not None
        self.is_known = is_known or connection is not None
        self.has_ended = False
        self.lost_at: float | None = None
        self._stall_s = stall_s
        self._socket = connection
        self._in, self._out = b"", b""
        self._began = 0.0
        if connection is not None:
            self._set_up(connection)

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 if there is none."""
        return -1 if self._socket is None or not self.is_open else self._socket.fileno()

    def silent_s(self, now: float) -> float:
        """Return for how long the host has not answered; 0 if it answers or never did."""
        return now - self.lost_at if self.lost_at is not None and self.is_known else 0.0

    def poll(self, now: float) -> list[dict[str, Any]]:
        """Connect, send and receive as far as possible; return the messages that have arrived."""
        try:
            if self._socket is None:
                if self.address is not None and not self.has_ended and now - self._began >= self._retry_s():
                    self._connect(now)
                return []
            if not self.is_open:
                self._finish_connecting(now)
                return []
            self._flush()
            return self._receive()
        except OSError as error:
            # A reset says nothing about the process: the peer's kernel may have closed the connection in a cut.
            if error.errno in (*_UNREACHABLE, *_RESET):
                silence_s = _silence_s(self._stall_s) if error.errno in _UNREACHABLE else 0
                if self.lost_at is None:
                    self.lost_at = now - silence_s if self.is_open else self._began
            elif error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):  # refused
                self._set_ended()
            self.close()
            return []

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or drop it if the channel is not open or its peer does not read."""
        if self.is_open and len(self._out) < _BUFFER_BYTES:
            self._out += json.dumps(message).encode() + b"\n"
            with suppress(OSError):  # `poll` meets the error again
                self._flush()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self.is_open = None, False
        self._in, self._out = b"", b""

    def _set_ended(self) -> None:
        self.has_ended, self.is_known, self.lost_at = True, True, None

    def _connect(self, now: float) -> None:
        self._began = now
        address = self.address or ("", 0)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._set_up(self._socket)
        with suppress(BlockingIOError):
            self._socket.connect(address)

    def _finish_connecting(self, now: float) -> None:
        connection = self._socket
        if connection is None:
            return
        if failed := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(failed, os.strerror(failed))
        try:
            connection.getpeername()
        except OSError:
            if now - self._began >= self._retry_s():
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        else:
            self.is_open, self.is_known, self.lost_at = True, True, None

    def _retry_s(self) -> float:
        return max(_RETRY_S, self._stall_s / 6)

    def _flush(self) -> None:
        if self._out and self._socket is not None:
            with suppress(BlockingIOError):
                self._out = self._out[self._socket.send(self._out) :]

    def _receive(self) -> list[dict[str, Any]]:
        with suppress(BlockingIOError):
            while self._socket is not None:
                data = self._socket.recv(1 << 16)
                if not data:
                    lines = self._in.split(b"\n")[:-1]
                    self._set_ended()
                    self.close()
                    return [json.loads(line) for line in lines]
                self._in += data
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > _BUFFER_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        return [json.loads(line) for line in lines]

    def _set_up(self, connection: socket.socket) -> None:
        """Let the kernel close the connection if the other host does not answer for `_silence_s`."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle, every_s = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE", _probe_s(self._stall_s)
        silence_ms = 1000 * _silence_s(self._stall_s)
        options = ((idle, every_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", _PROBES))
        for name, value in (*options, ("TCP_USER_TIMEOUT", silence_ms)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _probe_s(stall_s: float) -> int:
    return max(1, int(stall_s / 8))


def _silence_s(stall_s: float) -> int:
    """Return the silence after which the kernel closes a connection: half of `stall_s`, at least 4 s."""
    return (1 + _PROBES) * _probe_s(stall_s)


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
    listener.setblocking(False)
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
    is_local = store[0] == "localhost" or is_loopback(store[0])
    return "" if is_loopback(found) and not is_local else found


def store_clients(port: int) -> list[tuple[str, int]]:
    """Return the addresses on other hosts that are connected to this process's store.

    A port without a listener refuses a connection. That is an answer, too.
    """
    found = {}
    with suppress(psutil.Error, OSError, ValueError):
        for each in psutil.Process().net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.laddr.port == port:
                here, there = (end.ip.removeprefix("::ffff:") for end in (each.laddr, each.raddr))
                if here != there and not is_loopback(there) and ip_address(there).is_private:
                    found[there] = int(each.raddr.port)
    return list(found.items())


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
