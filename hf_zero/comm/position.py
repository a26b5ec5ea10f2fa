"""The position of a rank, and the questions by which ranks learn of each other's.

Every rank listens on one TCP port and answers from a separate thread. If a host's kernel does not answer the connection, the
host is unreachable. If the kernel refuses it, the process has ended. A process that is stopped, or holds the interpreter lock,
accepts the connection and does not answer. User code is read from the main thread's stack: the innermost frame outside of this
package, PyTorch, and libraries built on them.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import Enum, auto
from ipaddress import ip_address
from types import FrameType

import psutil

_log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "hf_zero", "accelerate", "transformers", "peft", "trl")
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep

ANSWER_S = 2.0
"""Time for an answer; long enough to resend the first packet of a connection once."""
_MAX_BYTES = 1 << 16
"""Bytes of a message."""
_AT_ONCE = 200
"""Connections at a time, below the usual limit of open files."""


@dataclass(frozen=True)
class Position:
    """A rank's position, as it reports it.

    Attributes:
        waits_for: what it waits for; empty if it waits for no rank.
        operation: the call of user code that needs other ranks: `state_dict()`, `saving to …`; empty within a step.
        code: file, line and function of user code; after its end, the error that ended it.
        waits: number of waits that have ended.
        engine: number of the engine that it is in, or was in last.
        group: the ranks that take part in what it waits for, if these are not all.
        ended: its process is about to end, or has released the process group.
    """

    rank: int
    step: int
    phase: str
    waits_for: str
    operation: str
    code: str
    waits: int = 0
    engine: int = 0
    group: str = ""
    ended: bool = False

    def __str__(self) -> str:
        if self.ended:
            return f"has ended after {self.step} steps" + (f": {self.code}" if self.code else "")
        doing = f"in {self.operation}" if self.operation else f"in {self.phase} of step {self.step}"
        waits = f"waits for {self.waits_for}{self.group}" if self.waits_for else "waits for no other rank"
        return f"{doing}, {waits}; user code is at {self.code}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


# User code ----------------------------------------------------------------------------------------------------------


def _main_frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith((_STANDARD, "<"))


def user_code() -> str:
    """Return file, line and function of the innermost frame of user code in the main thread."""
    frame = next(filter(_is_users, _main_frames()), None) or next(_main_frames(), None)
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def torch_wait() -> str:
    """Return the call of torch.distributed that the main thread is in, if user code made it."""
    frame = next(_main_frames(), None)
    inside = frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")
    return f"torch.distributed, in {frame.f_code.co_name}" if frame is not None and inside else ""


def last_error() -> str:
    """Return the exception that ended this process; empty: none."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


# Questions between ranks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Address of a rank. `machine` is equal for ranks without a network between them; no `address`: it cannot be asked."""

    host: str
    machine: str
    address: str = ""
    port: int = 0
    token: str = ""


@dataclass(frozen=True)
class Message:
    """A question or its answer.

    Attributes:
        lane: see `watcher`.
        token: of the rank that is asked, which ignores messages without it.
        verdict: of the sender; empty: none.
        position: of the rank that answers, or of one that asks and has ended.
    """

    lane: str = ""
    token: str = ""
    verdict: str = ""
    position: Position | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_bytes(cls, text: bytes) -> Message:
        """Raises:
        ValueError: not a message.
        """
        try:
            found = json.loads(text)
            position = found.pop("position")
            return cls(**found, position=position and Position(**position))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ValueError("not a message") from error


class Listener:
    """The port of this rank, and the thread that answers there.

    Args:
        address: of this host; empty: no rank can ask this one.
        answer: called in the thread.
    """

    def __init__(self, address: str, answer: Callable[[Message], Message]) -> None:
        self._answer = answer
        self._socket: socket.socket | None = None
        self.endpoint = Endpoint(socket.gethostname(), _machine())
        with suppress(OSError):
            if address:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                self._socket = socket.create_server((address, 0), family=family, backlog=4096)
                port = self._socket.getsockname()[1]
                self.endpoint = Endpoint(self.endpoint.host, self.endpoint.machine, address, port, secrets.token_hex())
                threading.Thread(target=self._serve, name="hf_zero positions", daemon=True).start()

    def close(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # wakes the thread
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _serve(self) -> None:
        while self._socket is not None and self._socket.fileno() != -1:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or no descriptor is left
                time.sleep(0.05)
                continue
            try:
                with connection, connection.makefile("rb") as lines:
                    connection.settimeout(ANSWER_S)
                    question = Message.of_bytes(lines.readline(_MAX_BYTES))
                    if hmac.compare_digest(question.token, self.endpoint.token):
                        connection.sendall(self._answer(question).to_bytes())
            except Exception:  # must continue: without this thread the rank would look stopped
                _log.debug("a question of another rank was not answered", exc_info=True)


class Contact(Enum):
    """Outcome of a question to another rank."""

    UNREACHABLE = auto()
    """The host does not answer."""
    REFUSED = auto()
    """The host answers that the process has ended."""
    SILENT = auto()
    """The process does not answer."""
    ANSWERED = auto()


@dataclass(frozen=True)
class Reply:
    """Outcome of a question, and the answer if there is one."""

    contact: Contact
    message: Message | None = None


def ask(questions: Sequence[tuple[Endpoint, bytes]], limit_s: float = ANSWER_S) -> list[Reply]:
    """Ask ranks, all at the same time.

    Raises:
        OSError: no descriptor is left.
    """
    replies = []
    for start in range(0, len(questions), _AT_ONCE):
        replies += _ask(questions[start : start + _AT_ONCE], limit_s)
    return replies


def _ask(questions: Sequence[tuple[Endpoint, bytes]], limit_s: float) -> list[Reply]:
    contacts, texts = [Contact.UNREACHABLE] * len(questions), [b""] * len(questions)
    until = time.perf_counter() + limit_s
    with ExitStack() as opened, selectors.DefaultSelector() as waiting:
        connections: list[socket.socket] = []
        for number, (endpoint, _) in enumerate(questions):
            family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
            connections += (opened.enter_context(socket.socket(family, socket.SOCK_STREAM)),)
            connections[-1].setblocking(False)
            code = connections[-1].connect_ex((endpoint.address, endpoint.port))
            if code in (0, errno.EINPROGRESS):
                waiting.register(connections[-1], selectors.EVENT_WRITE, number)
            elif code == errno.ECONNREFUSED:
                contacts[number] = Contact.REFUSED
        while waiting.get_map() and (left_s := until - time.perf_counter()) > 0:
            for key, events in waiting.select(left_s):
                number, connection, question = key.data, connections[key.data], questions[key.data][1]
                part = b""
                try:
                    if events & selectors.EVENT_READ:
                        part = connection.recv(_MAX_BYTES)
                        texts[number] += part
                    elif code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(code, os.strerror(code))  # the number determines the subclass
                    else:
                        contacts[number] = Contact.SILENT
                        connection.sendall(question)
                        waiting.modify(connection, selectors.EVENT_READ, number)
                        part = question
                except (ConnectionRefusedError, ConnectionResetError):
                    contacts[number] = Contact.REFUSED
                except OSError:  # unreachable
                    pass
                if not part:
                    waiting.unregister(connection)
    return [_reply(contact, text) for contact, text in zip(contacts, texts)]


def _reply(contact: Contact, text: bytes) -> Reply:
    with suppress(ValueError):
        if text:
            return Reply(Contact.ANSWERED, Message.of_bytes(text))
    return Reply(contact)


# Addresses ----------------------------------------------------------------------------------------------------------


def own_address(store: tuple[str, int] | None) -> str:
    """Return the address under which other ranks reach this one: gloo's interface, or the route to the store.

    Args:
        store: host name and port of the process group's store, if it has them.
    """
    addresses = {
        name: each.address
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET
    }
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface in addresses:
        return addresses[interface]
    try:
        if store is None:
            return socket.gethostbyname(socket.gethostname())
        family, kind, protocol, _, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as route:
            route.connect(address)  # sends nothing
            found = str(route.getsockname()[0]).removeprefix("::ffff:")
    except OSError:
        return "127.0.0.1"
    if not ip_address(found).is_loopback or store[0] in ("localhost", "127.0.0.1", "::1"):
        return found
    # The host of the store may know its own name as a loopback address only.
    return next((each for each in addresses.values() if not ip_address(each).is_loopback), found)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
