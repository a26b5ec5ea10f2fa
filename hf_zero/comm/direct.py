"""Messages between ranks of one machine, without a socket: each rank reads what it needs out of the others' memory.

The sender posts where its buffer lies. A thread of the receiver reads it from there, once and straight to where it belongs
(`process_vm_readv`), and tells the sender that it has. A socket copies each byte twice, in small parts. Of a reduce the thread
reads pieces that stay in the processor's cache and adds them up **in rank order**: no rank has memory for what arrives.

Every rank has a `Board`, which the other ranks write into (`process_vm_writev`): where their messages lie, and which of this
rank's they have taken. Messages of one key (a span, and gather or reduce) are numbered on each rank, and have the sender's step
with them: a rank that has made another number of steps is not given what does not belong to this one.

Where the kernel refuses (other machines, other users, `kernel.yama.ptrace_scope`, a sandbox) no rank of the group has a
`Direct`, and messages go through the process group.

Linux's "cross memory attach"; as in Goglin and Moreaud, "KNEM: a generic and scalable kernel-assisted intra-node MPI
communication framework", Journal of Parallel and Distributed Computing 73 (2013).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .inflight import Inflight
from .watch import Wait
from .wire import Cuts, SoloWire, average_in_order

PIECE_BYTES = 1 << 20
"""Of each peer's gradients, what is read at a time: it is added up while it is in the cache."""

SPANS = 4096
"""Whose messages a board has room for; those of later ones go by sockets."""

# Fewer than `_NUMBERS`, or an old word in a slot could pass for a new one.
_SLOTS = 4  # messages of one key that a rank may be ahead of those that take them
_MAGIC = 0x5A65_726F_426F_6172
_ALIVE_S = 0.5  # a wait this long asks whether the others are still there
_SHORTEST_S, _LONGEST_S, _SHARE = 20e-6, 5e-3, 16  # of what was waited so far, up to which nobody looks again
_WORD = 8
_ADDRESS_BITS, _STEPS, _NUMBERS = 48, 256, 128  # of the 63 bits of a word

Addresses = Mapping[int, int]


class Direct:
    """The gathers and reduces of one wire, as `SoloWire` describes them. Of one thread at a time.

    Args:
        board: this rank's, and `peers`: all others' memory.
    """

    def __init__(self, home: SoloWire, board: Board, peers: Sequence[Peer], reader: Reader) -> None:
        self.rank, self.size, self.watch, self.traffic = home.rank, home.size, home.watch, home.traffic
        self.board, self.peers, self.reader = board, peers, reader
        self._of = {peer.rank: peer for peer in peers}
        self._posts = [Note(peer, home.rank) for peer in peers]
        self._answers = [Note(peer, home.rank) for peer in peers]  # of the other thread
        self._lines: dict[int, Line] = {}

    def gather(self, full: Tensor, own: Tensor, span: int, cuts: Cuts, kind: str) -> Inflight:
        """As `SoloWire.gather`; `own` is in its place in `full` already, and `cuts` are given. Counts its waits as `kind`."""

        def take(addresses: Addresses) -> None:
            base, width = full.data_ptr(), full.element_size()  # of now: memory that was given back has no address
            for rank, address in addresses.items():
                target, nbytes = base + cuts[rank] * width, (cuts[rank + 1] - cuts[rank]) * width
                self._of[rank].read(address, target, nbytes)

        return self._exchange(2 * span, own, take, kind, span)

    def reduce(self, source: Tensor, out: Tensor, span: int, cuts: Cuts, kind: str) -> Inflight:
        """As `SoloWire.reduce`; `cuts` are given."""

        def take(addresses: Addresses) -> None:
            begin, width = cuts[self.rank], source.element_size()
            mine = source[begin : cuts[self.rank + 1]]
            numel, piece = mine.numel(), PIECE_BYTES // width
            others = torch.empty((self.size - 1, min(piece, numel)), dtype=source.dtype, device="cpu").unbind()
            rows = dict(zip(addresses, others))
            for start in range(0, numel, piece):
                stop = min(start + piece, numel)
                for rank, address in addresses.items():
                    there, nbytes = address + (begin + start) * width, (stop - start) * width
                    self._of[rank].read(there, rows[rank].data_ptr(), nbytes)
                parts = {rank: row[: stop - start] for rank, row in rows.items()} | {self.rank: mine[start:stop]}
                average_in_order([parts[rank] for rank in range(self.size)], out[start:stop])
            out[numel:].zero_()

        return self._exchange(2 * span + 1, source, take, kind, span)

    def swap(self, sent: Tensor, landing: Tensor, span: int, kind: str) -> Inflight:
        """As `GroupWire.swap`; this rank's own part is in `landing` already."""

        def take(addresses: Addresses) -> None:
            base, nbytes = landing.data_ptr(), sent.nbytes // self.size
            for rank, address in addresses.items():
                self._of[rank].read(address + self.rank * nbytes, base + rank * nbytes, nbytes)

        return self._exchange(2 * span + 1, sent, take, kind, span)

    def _exchange(self, key: int, sent: Tensor, take: Callable[[Addresses], None], kind: str, span: int) -> Inflight:
        """Let the others read `sent`; when they all let this rank read theirs, `take` it (in the reader's thread)."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self, key, span)
        line.begun = number = line.begun + 1
        # The slot holds message `number - _SLOTS` until that is taken: written over sooner, its reader would never find it.
        if number - _SLOTS > line.taken:
            line.wait(partial(line.until_taken, number - _SLOTS), kind)
        step = self.watch.step % _STEPS
        word = sent.data_ptr() | step << _ADDRESS_BITS | (number % _NUMBERS) << _ADDRESS_BITS + 8
        # From here on the others read `sent`, at any moment until they have said that they have: it must be final before.
        for post in self._posts:
            post.write(word, line.slots[number % _SLOTS])
        message = Message(line, number, step, sent, take, kind)
        self.reader.arrivals.put(weakref.ref(message))
        return message

    def find(self, key: int, number: int, step: int) -> dict[int, int] | None:
        """Where the messages of this number and step lie, by rank; None: not all are there."""
        words, addresses = self.board.words, {}
        label, first = step | number % _NUMBERS << 8, self.board.slot(key, number)
        for peer in self.peers:
            at = first + 2 * peer.rank
            word = words[at]
            # The complement is written with the word: while one of them is old the pair does not fit, whatever tears.
            if words[at + 1] != ~word or word >> _ADDRESS_BITS != label:
                return None
            addresses[peer.rank] = word & (1 << _ADDRESS_BITS) - 1
        return addresses

    def answer(self, key: int, number: int) -> None:
        """Tell the senders that their messages were taken; one that has ended since then need not know.

        A number stands for all before it as well, and only the last one written is there: messages of a key are taken in order.
        """
        for answer in self._answers:
            with suppress(RuntimeError):
                answer.write(number, self.board.taken(key))

    def check(self) -> None:
        """Now and then, while somebody waits.

        Raises:
            RuntimeError: it would be for ever.
        """
        if self.watch.verdict is not None:
            raise RuntimeError("the ranks have diverged")
        for peer in self.peers:
            if not peer.is_there:
                raise RuntimeError(f"connection closed by peer: the process of rank {peer.rank} is gone")


class Message(Inflight):
    """Messages of one key and number, to and from all other ranks.

    Those that come are under way until the reader's thread has taken them. The thread does not hold it: what nobody can
    wait for any more (an engine that went in the middle of a pass) is given up. A `Wait` is made only where this rank
    must block.

    Args:
        sent: what the others read until `close`. Its memory must live, and stay as it is, until then.
        take: what the thread does with those that came.
    """

    __slots__ = (
        "__weakref__",
        "_blocked",
        "_error",
        "_is_over",
        "_kind",
        "_line",
        "_number",
        "_sent",
        "_step",
        "_take",
    )

    def __init__(self, line: Line, number: int, step: int, sent: Tensor, take: Callable[[Addresses], None], kind: str):
        self._line, self._number, self._step, self._take, self._kind = line, number, step, take, kind
        self._sent: Tensor | None = sent
        self._error: Exception | None = None
        self._is_over = False
        self._blocked: threading.Lock | None = None

    @property
    def ready(self) -> bool:
        """As `Inflight.ready`."""
        return self._sent is None

    def wait(self) -> None:
        """As `Inflight.wait`."""
        if self._is_over and self._error is None:
            self._line.direct.watch.done += 1
        else:
            self._line.wait(self._until_here, self._kind)

    def close(self) -> None:
        """As `Inflight.close`."""
        if self._sent is None:
            return
        self.wait()
        line, number = self._line, self._number
        words = line.words
        for at in line.answers:
            if words[at] < number or words[at + 1] != ~words[at]:
                line.wait(partial(line.until_taken, number), self._kind)
                break
        line.taken = max(line.taken, number)
        self._sent = None

    def _until_here(self) -> None:
        blocked = threading.Lock()
        blocked.acquire()
        self._blocked = blocked
        while not self._is_over:  # looked at after the lock is shown: the thread does it the other way round
            if not blocked.acquire(timeout=_ALIVE_S):
                self._line.direct.check()
        if self._error is not None:
            raise self._error

    @property
    def line(self) -> Line:
        return self._line

    def look(self) -> bool:
        """In the thread. Whether it is over now: taken, failed, or given up."""
        direct, key = self._line.direct, self._line.key
        try:
            if direct.watch.verdict is not None:
                direct.check()
            addresses = direct.find(key, self._number, self._step)
            if addresses is None:
                return False
            self._take(addresses)
            # Only now: with the answer the senders write to their memory again.
            direct.answer(key, self._number)
        except Exception as error:  # whoever waits raises it
            self._error = error
        self._take = lambda addresses: None  # it holds the tensors
        # After `_error`, which whoever sees this reads without a lock; before `_blocked` is looked at, see `_until_here`.
        self._is_over = True
        if self._blocked is not None:
            self._blocked.release()
        return True


class Line:
    """All messages of one key of one wire, in order.

    Attributes:
        begun: the number of the last one.
        taken: a number up to which all other ranks are known to have read this rank's.
        slots: by number, where its words lie on a board.
        answers: by peer, where this rank's board says what that has taken.
    """

    __slots__ = ("answers", "begun", "direct", "key", "slots", "span", "taken", "words")

    def __init__(self, direct: Direct, key: int, span: int) -> None:
        board = direct.board
        self.direct, self.key, self.span, self.words = direct, key, span, board.words
        self.begun = self.taken = 0
        self.slots = [board.slot(key, number) for number in range(_SLOTS)]
        self.answers = [board.taken(key) + 2 * peer.rank for peer in direct.peers]

    def wait(self, call: Callable[[], None], kind: str) -> None:
        Wait(call, self.direct.traffic, self.direct.watch, kind, self.span).wait()

    def until_taken(self, number: int) -> None:
        """Return when all other ranks have read this rank's message of that number, and those before it."""
        words = self.words
        looked = start = time.perf_counter()
        for at in self.answers:
            while words[at] < number or words[at + 1] != ~words[at]:
                now = time.perf_counter()
                if now - looked > _ALIVE_S:
                    self.direct.check()
                    looked = now
                time.sleep(pause_s(now - start))


class Reader:
    """The thread of this process that takes messages. It ends with `owner`."""

    def __init__(self, owner: object) -> None:
        self.boards: list[Board] = []
        """What tells the others that messages are taken here, until `_end`."""
        self.arrivals: SimpleQueue[weakref.ref[Message] | None] = SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(target=_take_all, args=(self.arrivals,), name="hf_zero reader", daemon=True)
        self._thread.start()
        # Also at exit: a daemon thread that is in torch's C++ code while Python ends would abort the process.
        weakref.finalize(owner, self._end)

    def _end(self) -> None:
        if os.getpid() == self._process:  # a fork has no such thread
            self.arrivals.put(None)
            self._thread.join(10)
            for board in self.boards:
                # After the thread's end: a board without its word promises that nobody reads for it any more.
                board.words[0] = 0  # who still waits for this rank finds it gone, though its process may live on


@torch.no_grad()
def _take_all(arrivals: SimpleQueue[weakref.ref[Message] | None]) -> None:
    waiting: list[weakref.ref[Message]] = []
    moved = time.perf_counter()
    while True:
        try:
            while True:
                arrival = arrivals.get(block=not waiting)
                if arrival is None:
                    return
                moved = time.perf_counter() if not waiting else moved
                waiting.append(arrival)
        except Empty:
            pass
        held: set[Line] = set()
        left = [arrival for arrival in waiting if not _is_over(arrival, held)]
        now = time.perf_counter()
        if len(left) < len(waiting):
            moved = now
        else:
            time.sleep(pause_s(now - moved))
        waiting = left


def _is_over(awaited: weakref.ref[Message], held: set[Line]) -> bool:
    """Whether the thread is done with it. Else it holds up all later ones of its key: see `Direct.answer`."""
    arrival = awaited()  # no longer than here: the last to hold it may let go
    if arrival is None:
        return True
    if arrival.line not in held and arrival.look():
        return True
    held.add(arrival.line)
    return False


class Board:
    """Memory that other ranks write into, in pairs of a word and its complement, for who reads one while it is written.

    For each key of each other rank its last messages (address, step and number in one word), and how many of this rank's it
    has taken. Pages that nobody has touched take no memory.
    """

    def __init__(self, size: int) -> None:
        self._size, self._row = size, size * (_SLOTS + 1)
        nbytes = 2 * (1 + 2 * SPANS * self._row) * _WORD
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Never given back: other ranks may still write here when this one has let go of its group, and what would lie here
        # then would have their words in it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.words = memoryview(self._memory).cast("q")
        self.words[0] = _MAGIC

    def slot(self, key: int, number: int) -> int:
        """The place in `words` of rank 0's pair for a message; those of the other ranks follow."""
        return 2 * (1 + key * self._row + number % _SLOTS * self._size)

    def taken(self, key: int) -> int:
        """The place in `words` of the pair that says what rank 0 has taken; those of the other ranks follow."""
        return 2 * (1 + key * self._row + _SLOTS * self._size)


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Peer:
    """Another rank's memory.

    Args:
        board: where its `Board` lies there.
    """

    def __init__(self, rank: int, process: int, board: int) -> None:
        self.rank, self.process, self.board = rank, process, board

    def read(self, there: int, here: int, nbytes: int) -> None:
        """Raises:
        RuntimeError: the process is gone, or has no such memory.
        """
        call, _ = _system_calls()
        while nbytes:  # the kernel moves at most 2 GiB at once
            mine, theirs = _Part(here, nbytes), _Part(there, nbytes)
            moved = call(self.process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            if moved <= 0:
                raise self.error()
            here, there, nbytes = here + moved, there + moved, nbytes - moved

    def error(self) -> RuntimeError:
        """For a system call that has just failed."""
        why = os.strerror(ctypes.get_errno())
        return RuntimeError(f"connection closed by peer: memory of rank {self.rank} (process {self.process}): {why}")

    @property
    def is_there(self) -> bool:
        """Whether the process lives, takes messages for that board, and may be read."""
        found = ctypes.c_int64()
        try:
            self.read(self.board, ctypes.addressof(found), _WORD)
        except RuntimeError:
            return False
        return found.value == _MAGIC

    def takes_notes(self, rank: int, place: int) -> bool:
        """Whether it may be written to as well: a sandbox can refuse one of two calls. Rank `rank` has taken nothing so far."""
        try:
            Note(self, rank).write(0, place)
        except RuntimeError:
            return False
        return True


class Note:
    """Writes a pair of words into a peer's board, again and again. Of one thread.

    Args:
        rank: this one.
    """

    def __init__(self, peer: Peer, rank: int) -> None:
        _, self._call = _system_calls()
        self._peer, self._base = peer, peer.board + 2 * rank * _WORD
        self._words = (ctypes.c_int64 * 2)()
        self._there = _Part(0, 2 * _WORD)
        self._parts = ctypes.byref(_Part(ctypes.addressof(self._words), 2 * _WORD)), ctypes.byref(self._there)

    def write(self, word: int, place: int) -> None:
        """`place` is that of rank 0's pair.

        Raises:
            RuntimeError: the process is gone.
        """
        self._words[0], self._words[1] = word, ~word
        self._there.base = self._base + place * _WORD
        here, there = self._parts
        if self._call(self._peer.process, here, 1, there, 1, 0) != 2 * _WORD:
            raise self._peer.error()


def open_direct(home: SoloWire, reader: Callable[[], Reader]) -> Direct | None:
    """None where not every rank can read every other's memory. A collective."""
    board = Board(home.size)
    machine = _machine()
    # Between the two exchanges every rank writes on every board that it has taken nothing: a message that was begun before the
    # second one is over could lose its answer to that.
    told = home.exchange((machine, os.getpid(), board.address))
    is_able = bool(machine) and all(there == machine for there, _, _ in told)
    peers = [Peer(rank, process, at) for rank, (_, process, at) in enumerate(told) if rank != home.rank]
    is_able = is_able and all(peer.is_there and peer.takes_notes(home.rank, board.taken(0)) for peer in peers)
    if not all(home.exchange(is_able)):
        return None
    reads = reader()
    reads.boards.append(board)
    return Direct(home, board, peers, reads)


def pause_s(waited_s: float) -> float:
    """Until somebody who has waited so long looks again."""
    return min(max(waited_s / _SHARE, _SHORTEST_S), _LONGEST_S)


def _machine() -> str:
    """The same where process numbers mean the same; empty where there are no such system calls."""
    if not sys.platform.startswith("linux") or _system_calls() == (None, None):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@cache
def _system_calls() -> tuple[Any, Any]:
    word, count = ctypes.c_void_p, ctypes.c_ulong
    kind = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, word, count, word, count, count, use_errno=True)
    library = ctypes.CDLL(None)
    try:
        return kind(("process_vm_readv", library)), kind(("process_vm_writev", library))
    except AttributeError:
        return None, None
