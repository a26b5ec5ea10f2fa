"""Find out which hosts can be reached.

Every rank listens on one TCP socket and keeps one idle connection to each other host. It carries TCP's keepalive probes only.
The kernel of the other host answers them, even for a process that is stopped or holds the interpreter. A host that was never
reached (a firewall) counts as unknown, not as unreachable.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address

import psutil

_PROBES = 3
"""Keepalive probes without an answer after which the kernel closes a connection."""
_RETRY_S = 2.0
"""An attempt to connect sends two packets in this time."""
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


@dataclass(frozen=True)
class Card:
    """Address of a rank, published through the store. `machine` is equal for ranks without a network between them."""

    host: str
    machine: str
    address: str = ""
    port: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes) -> Card:
        return cls(**json.loads(text))


class Link:
    """One connection to another host.

    Attributes:
        is_known: the host has answered before.
        lost: since when the host has not answered; None: it answers.
    """

    def __init__(self, address: str, port: int, *, is_known: bool = False) -> None:
        self.is_known = is_known
        self.lost: float | None = None
        self.address, self._port = address, port
        self._socket: socket.socket | None = None
        self._is_connected = False
        self._began = self._next = 0.0

    def check(self, now: float, stall_s: float) -> None:
        """Check that the host still answers, without waiting. Called about once a second."""
        try:
            if self._socket is None:
                if now >= self._next:
                    self._begin(now, stall_s)
            elif self._is_connected:
                with suppress(BlockingIOError):
                    self._socket.recv(1)
                    self._answered(is_open=False)  # the process has ended; its kernel reports it
            elif failed := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failed, os.strerror(failed))  # the number determines the subclass
            elif self._has_peer():
                self._answered(is_open=True)
            elif now >= self._next:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        except (ConnectionRefusedError, ConnectionResetError):
            self._answered(is_open=False)
        except OSError as error:  # other numbers do not concern that host, such as EMFILE
            if error.errno in _UNREACHABLE and self.lost is None:
                self.lost = now - _silence_s(stall_s) if self._is_connected else self._began
            self.close()

    def silent_s(self, now: float) -> float:
        """Return for how long the host has not answered; 0 if it answers or never did."""
        return now - self.lost if self.is_known and self.lost is not None else 0.0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._is_connected = None, False

    def _begin(self, now: float, stall_s: float) -> None:
        self._began, self._next = now, now + max(_RETRY_S, stall_s / 6)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        probe(self._socket, stall_s)
        with suppress(BlockingIOError):
            self._socket.connect((self.address, self._port))

    def _has_peer(self) -> bool:
        with suppress(OSError):
            return self._socket is not None and bool(self._socket.getpeername())
        return False

    def _answered(self, *, is_open: bool) -> None:
        self.is_known, self.lost, self._is_connected = True, None, is_open
        if not is_open:
            self.close()


def probe(connection: socket.socket, stall_s: float) -> None:
    """Let the kernel close the connection where the other host does not answer for `_silence_s`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, every_s = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE", _probe_s(stall_s)
    for name, value in ((idle, every_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _probe_s(stall_s: float) -> int:
    return max(1, int(stall_s / 8))


def _silence_s(stall_s: float) -> int:
    """Return after how much silence the kernel closes a connection: half of `stall_s`, at least 4 s."""
    return (1 + _PROBES) * _probe_s(stall_s)


class Links:
    """Connections of this rank to the other hosts, and the socket that accepts theirs.

    Attributes:
        hosts: names by rank; empty: not all ranks are known yet.
        healed: when a host that could not be reached was last reached again.
    """

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.healed = 0.0
        self.has_clients = False
        self._links: dict[Link, list[int]] = {}
        self._listener: socket.socket | None = None
        self._taken: list[socket.socket] = []

    def listen(self, store: tuple[str, int] | None) -> Card:
        """Open the socket of this rank, unless the job has one host only.

        Args:
            store: host name and port of the process group's store, if it has them.
        """
        card = Card(socket.gethostname(), _machine())
        with suppress(OSError):
            address = _own_address(store)
            if address and not _is_loopback(address):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.bind((address, 0))
                listener.listen(4096)
                listener.setblocking(False)
                self._listener = listener
                return Card(card.host, card.machine, address, listener.getsockname()[1])
        return card

    def connect(self, cards: Sequence[Card], rank: int) -> None:
        """Connect to one rank of each other host: the one with this rank's position among the ranks of its host."""
        by_machine: dict[str, list[int]] = {}
        for each, card in enumerate(cards):
            by_machine.setdefault(card.machine, []).append(each)
        here = by_machine.pop(cards[rank].machine)
        links = {}
        for ranks in by_machine.values():
            card = cards[ranks[here.index(rank) % len(ranks)]]
            if card.address:
                links[Link(card.address, card.port)] = ranks
        self._drop_links()
        self._links = links
        self.hosts = [card.host for card in cards]

    def connect_to_clients(self, port: int) -> None:
        """Watch the hosts of ranks that are connected to this host's store, until all cards are known.

        Args:
            port: the store's.
        """
        self.has_clients = True
        # A port without a listener is refused. That is an answer, too.
        found = {there: there_port for (_, here_port), (there, there_port) in _connections() if here_port == port}
        self._links = {Link(there, there_port, is_known=True): [] for there, there_port in found.items()}

    @property
    def are_known(self) -> bool:
        """True if each host has been reached once."""
        return bool(self.hosts) and all(link.is_known for link in self._links)

    def check(self, now: float, stall_s: float) -> None:
        for link in self._links:
            was_lost = link.lost is not None
            link.check(now, stall_s)
            if was_lost and link.lost is None:
                self.healed = now
        self._take(stall_s)

    def lost(self, now: float) -> list[tuple[str, Sequence[int], float]]:
        """Return the hosts that do not answer: name, ranks, seconds of silence."""
        return [
            (self.hosts[ranks[0]] if ranks else link.address, ranks, silent_s)
            for link, ranks in self._links.items()
            if (silent_s := link.silent_s(now))
        ]

    def close(self) -> None:
        self._drop_links()
        for connection in (*self._taken, *filter(None, (self._listener,))):
            connection.close()
        self._taken, self._listener = [], None

    def _drop_links(self) -> None:
        for link in self._links:
            link.close()
        self._links = {}

    def _take(self, stall_s: float) -> None:
        """Accept connections and close ended ones: the queue of the socket must not fill up."""
        with suppress(OSError):
            while self._listener is not None:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                probe(connection, stall_s)
                self._taken.append(connection)
        for connection in [*self._taken]:
            try:
                connection.recv(1)
            except BlockingIOError:
                continue
            except OSError:
                pass
            connection.close()
            self._taken.remove(connection)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _connections() -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return this process's TCP connections to private addresses of other hosts: address and port here and there."""
    found = []
    with suppress(psutil.Error, OSError, ValueError):
        for each in psutil.Process().net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED and each.raddr:
                here, there = (end.ip.removeprefix("::ffff:") for end in (each.laddr, each.raddr))
                if here != there and not _is_loopback(there) and ip_address(there).is_private:
                    found.append(((here, int(each.laddr.port)), (there, int(each.raddr.port))))
    return found


def _own_address(store: tuple[str, int] | None) -> str:
    """Return the address under which other hosts reach this one: gloo's interface, or the route to the store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for each in psutil.net_if_addrs().get(interface, ()):
        if each.family == socket.AF_INET:
            return each.address
    if store is None:
        return socket.gethostbyname(socket.gethostname())
    family, kind, protocol, _, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)  # sends nothing
        found = str(route.getsockname()[0]).removeprefix("::ffff:")
    # The host of the store may know its own name as a loopback address only.
    return next((here for (here, _), _ in _connections()), found) if _is_loopback(found) else found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
