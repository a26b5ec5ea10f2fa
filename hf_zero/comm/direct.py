"""Transfers between ranks of one machine: each rank reads the other ranks' memory, without a socket.

The sender posts the address of its buffer. A thread of the receiver reads it once, straight into place
(`process_vm_readv`), and acknowledges it. A socket would copy each byte twice, in small parts. In a reduce, the thread reads
pieces that stay in the processor's cache and sums them **in rank order**, so ranks need no receive buffers.

Every rank has a `Mailbox`, into which the other ranks write (`process_vm_writev`): the addresses of their messages, and which
messages of this rank they have received. A key identifies a span, and gather or reduce. Each rank numbers the messages of a key
and adds its step: a rank at another step does not accept a message of this one.

If the kernel refuses (other machines, other users, `kernel.yama.ptrace_scope`, a sandbox), no rank has a `DirectTransfers`,
and messages go through the process group.

Linux's "cross memory attach"; as in Goglin and Moreaud, "KNEM: a generic and scalable kernel-assisted intra-node MPI
communication framework", Journal of Parallel and Distributed Computing 73 (2013).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from .cross_memory import SLOTS, Mailbox, MailboxWriter, Peer, machine_id
from .inflight import Inflight
from .watch import Wait
from .wire import Cuts, Wire, average_in_order

PIECE_BYTES = 1 << 20
"""Bytes of each peer's gradients that are read at a time: they are summed while they are in the cache."""

_ALIVE_S = 0.5  # a wait this long checks that the peers are alive
_SHORTEST_S, _LONGEST_S, _SHARE = 20e-6, 5e-3, 16  # pauses of a polling wait: a share of the time waited, within bounds
# Of the 63 bits of a word. `_NUMBERS` must exceed `SLOTS`: an old word in a slot could otherwise pass for a new one.
_ADDRESS_BITS, _STEPS, _NUMBERS = 48, 256, 128

Addresses = Mapping[int, int]


class DirectTransfers:
    """Gathers and reduces of one wire, as `Wire` describes them. Only one thread at a time may use it."""

    def __init__(self, wire: Wire, mailbox: Mailbox, peers: Sequence[Peer], reader: Reader) -> None:
        self.rank, self.size, self.watch, self.traffic = wire.rank, wire.size, wire.watch, wire.traffic
        self.mailbox, self.peers, self.reader = mailbox, peers, reader
        self._peer_of = {peer.rank: peer for peer in peers}
        self._posts = [MailboxWriter(peer, wire.rank) for peer in peers]
        self._acks = [MailboxWriter(peer, wire.rank) for peer in peers]  # for the reader's thread
        self._channels: dict[int, Channel] = {}

    def gather(self, full: Tensor, own: Tensor, span: int, cuts: Cuts, kind: str) -> Inflight:
        """Gather as `Wire.gather`. `own` already lies in `full`. Waits count as `kind`."""

        def take(addresses: Addresses) -> None:
            base, width = full.data_ptr(), full.element_size()  # not earlier: released memory has no address
            for rank, address in addresses.items():
                target, nbytes = base + cuts[rank] * width, (cuts[rank + 1] - cuts[rank]) * width
                self._peer_of[rank].read(address, target, nbytes)

        return self._exchange(2 * span, own, take, kind, span)

    def reduce(self, source: Tensor, out: Tensor, span: int, cuts: Cuts, kind: str) -> Inflight:
        """Reduce as `Wire.reduce`."""

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
                    self._peer_of[rank].read(there, rows[rank].data_ptr(), nbytes)
                parts = {rank: row[: stop - start] for rank, row in rows.items()} | {self.rank: mine[start:stop]}
                average_in_order([parts[rank] for rank in range(self.size)], out[start:stop])
            out[numel:].zero_()

        return self._exchange(2 * span + 1, source, take, kind, span)

    def all_to_all(self, sent: Tensor, received: Tensor, span: int, kind: str) -> Inflight:
        """Exchange parts as `GroupWire.all_to_all`. This rank's own part already lies in `received`."""

        def take(addresses: Addresses) -> None:
            base, nbytes = received.data_ptr(), sent.nbytes // self.size
            for rank, address in addresses.items():
                self._peer_of[rank].read(address + self.rank * nbytes, base + rank * nbytes, nbytes)

        return self._exchange(2 * span + 1, sent, take, kind, span)

    def _exchange(self, key: int, sent: Tensor, take: Callable[[Addresses], None], kind: str, span: int) -> Inflight:
        """Post `sent` for the peers. Calls `take` in the reader's thread once all peers have posted theirs."""
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(self, key, span)
        channel.begun = number = channel.begun + 1
        # The slot still holds message `number - SLOTS`. Its reader would never find it if it were overwritten now.
        if number - SLOTS > channel.taken:
            channel.wait(partial(channel.until_taken, number - SLOTS), kind)
        step = self.watch.step % _STEPS
        word = sent.data_ptr() | step << _ADDRESS_BITS | (number % _NUMBERS) << _ADDRESS_BITS + 8
        # `sent` must be final here: the peers may read it from now on, until they acknowledge it.
        for post in self._posts:
            post.write(word, channel.slots[number % SLOTS])
        message = Message(channel, number, step, sent, take, kind)
        self.reader.arrivals.put(weakref.ref(message))
        return message

    def find(self, key: int, number: int, step: int) -> dict[int, int] | None:
        """Return the addresses of the messages with this number and step, by rank; None until all are posted."""
        words, addresses = self.mailbox.words, {}
        label, first = step | number % _NUMBERS << 8, self.mailbox.slot_index(key, number)
        for peer in self.peers:
            at = first + 2 * peer.rank
            word = words[at]
            # Word and complement are written together. Unless both are new they do not match, even after a torn write.
            if words[at + 1] != ~word or word >> _ADDRESS_BITS != label:
                return None
            addresses[peer.rank] = word & (1 << _ADDRESS_BITS) - 1
        return addresses

    def acknowledge(self, key: int, number: int) -> None:
        """Tell the senders that their messages up to `number` were received. Ignores peers that have ended.

        Only the last number is stored: messages of a key are received in order.
        """
        for ack in self._acks:
            with suppress(RuntimeError):
                ack.write(number, self.mailbox.ack_index(key))

    def check(self) -> None:
        """Check during a wait that it can still end.

        Raises:
            RuntimeError: the ranks have diverged, or a peer's process has ended.
        """
        if self.watch.verdict is not None:
            raise RuntimeError("the ranks have diverged")
        for peer in self.peers:
            if not peer.is_alive:
                raise RuntimeError(f"connection closed by peer: the process of rank {peer.rank} is gone")


class Message(Inflight):
    """Messages of one key and number, to and from all other ranks.

    The reader's thread receives the incoming ones. It holds a weak reference only: a message that no caller can wait for (its
    engine was freed during a pass) is dropped. A `Wait` is created only if this rank must block.

    Args:
        channel: of the key.
        number: in the channel.
        step: of this rank.
        sent: read by the peers until `close`. Its memory must stay alive and unchanged until then.
        take: called with the addresses of the incoming messages, in the reader's thread.
        kind: of the waits.
    """

    __slots__ = (
        "__weakref__",
        "_blocked",
        "_channel",
        "_error",
        "_is_over",
        "_kind",
        "_number",
        "_sent",
        "_step",
        "_take",
    )

    def __init__(
        self, channel: Channel, number: int, step: int, sent: Tensor, take: Callable[[Addresses], None], kind: str
    ) -> None:
        self._channel, self._number, self._step, self._take, self._kind = channel, number, step, take, kind
        self._sent: Tensor | None = sent
        self._error: Exception | None = None
        self._is_over = False
        self._blocked: threading.Lock | None = None

    @property
    def ready(self) -> bool:
        """Return as `Inflight.ready`."""
        return self._sent is None

    def wait(self) -> None:
        """Wait as `Inflight.wait`."""
        if self._is_over and self._error is None:
            self._channel.direct.watch.done += 1
        else:
            self._channel.wait(self._until_taken, self._kind)

    def close(self) -> None:
        """Wait as `Inflight.close`."""
        if self._sent is None:
            return
        self.wait()
        channel, number = self._channel, self._number
        words = channel.words
        for at in channel.acks:
            if words[at] < number or words[at + 1] != ~words[at]:
                channel.wait(partial(channel.until_taken, number), self._kind)
                break
        channel.taken = max(channel.taken, number)
        self._sent = None

    def _until_taken(self) -> None:
        blocked = threading.Lock()
        blocked.acquire()
        self._blocked = blocked
        while not self._is_over:  # must be checked after `_blocked` is set: the thread does it the other way round
            if not blocked.acquire(timeout=_ALIVE_S):
                self._channel.direct.check()
        if self._error is not None:
            raise self._error

    @property
    def channel(self) -> Channel:
        return self._channel

    def try_take(self) -> bool:
        """Receive the incoming messages if all are posted. Returns True once the message was received or has failed."""
        direct, key = self._channel.direct, self._channel.key
        try:
            if direct.watch.verdict is not None:
                direct.check()
            addresses = direct.find(key, self._number, self._step)
            if addresses is None:
                return False
            self._take(addresses)
            # Must follow `_take`: after the acknowledgement the senders write to their buffers again.
            direct.acknowledge(key, self._number)
        except Exception as error:  # `wait` raises it
            self._error = error
        self._take = lambda addresses: None  # releases the tensors that it holds
        # Must follow `_error`, which `wait` reads without a lock, and precede the check of `_blocked`; see `_until_taken`.
        self._is_over = True
        if self._blocked is not None:
            self._blocked.release()
        return True


class Channel:
    """All messages of one key of one wire, in order.

    Attributes:
        begun: number of the last message.
        taken: all other ranks are known to have read this rank's messages up to this number.
        slots: by number, the index of its words on a mailbox.
        acks: by peer, the index of its acknowledgement on this rank's mailbox.
    """

    __slots__ = ("acks", "begun", "direct", "key", "slots", "span", "taken", "words")

    def __init__(self, direct: DirectTransfers, key: int, span: int) -> None:
        mailbox = direct.mailbox
        self.direct, self.key, self.span, self.words = direct, key, span, mailbox.words
        self.begun = self.taken = 0
        self.slots = [mailbox.slot_index(key, number) for number in range(SLOTS)]
        self.acks = [mailbox.ack_index(key) + 2 * peer.rank for peer in direct.peers]

    def wait(self, call: Callable[[], None], kind: str) -> None:
        Wait(call, self.direct.traffic, self.direct.watch, kind, self.span).wait()

    def until_taken(self, number: int) -> None:
        """Wait until all other ranks have read this rank's messages up to `number`."""
        words = self.words
        checked = start = time.perf_counter()
        for at in self.acks:
            while words[at] < number or words[at + 1] != ~words[at]:
                now = time.perf_counter()
                if now - checked > _ALIVE_S:
                    self.direct.check()
                    checked = now
                time.sleep(pause_s(now - start))


class Reader:
    """The thread of this process that receives messages. It ends when `owner` is freed.

    Attributes:
        mailboxes: of all wires; their first word promises that this thread receives messages.
    """

    def __init__(self, owner: object) -> None:
        self.mailboxes: list[Mailbox] = []
        self.arrivals: SimpleQueue[weakref.ref[Message] | None] = SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(target=_take_all, args=(self.arrivals,), name="hf_zero reader", daemon=True)
        self._thread.start()
        # Runs at exit too: a daemon thread inside torch's C++ code would abort the process when Python ends.
        weakref.finalize(owner, self._end)

    def _end(self) -> None:
        if os.getpid() == self._process:  # a forked child has no such thread
            self.arrivals.put(None)
            self._thread.join(10)
            for mailbox in self.mailboxes:
                # Must follow the thread's end: a mailbox without its first word says that no thread reads for it any more.
                mailbox.words[0] = 0  # a peer that still waits for this rank sees that it has left


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
        held: set[Channel] = set()
        left = [arrival for arrival in waiting if not _is_over(arrival, held)]
        now = time.perf_counter()
        if len(left) < len(waiting):
            moved = now
        else:
            time.sleep(pause_s(now - moved))
        waiting = left


def _is_over(awaited: weakref.ref[Message], held: set[Channel]) -> bool:
    """Try to take a message. Until it is over, later ones of its channel wait; see `DirectTransfers.acknowledge`."""
    message = awaited()  # must not outlive this call: the thread would keep a dropped message alive
    if message is None:
        return True
    if message.channel not in held and message.try_take():
        return True
    held.add(message.channel)
    return False


def open_direct(wire: Wire, reader: Callable[[], Reader]) -> DirectTransfers | None:
    """Return a `DirectTransfers` if every rank can read every other rank's memory, else None. A collective."""
    mailbox = Mailbox(wire.size)
    machine = machine_id()
    # Between the two exchanges every rank writes to all mailboxes that it received nothing. A message that started before the
    # second exchange ended could lose its acknowledgement to that write.
    reports = wire.exchange((machine, os.getpid(), mailbox.address))
    is_able = bool(machine) and all(there == machine for there, _, _ in reports)
    peers = [Peer(rank, process, at) for rank, (_, process, at) in enumerate(reports) if rank != wire.rank]
    is_able = is_able and all(peer.is_alive and peer.accepts_writes(wire.rank, mailbox.ack_index(0)) for peer in peers)
    if not all(wire.exchange(is_able)):
        return None
    reads = reader()
    reads.mailboxes.append(mailbox)
    return DirectTransfers(wire, mailbox, peers, reads)


def pause_s(waited_s: float) -> float:
    """Return the pause of a polling wait that has lasted `waited_s`."""
    return min(max(waited_s / _SHARE, _SHORTEST_S), _LONGEST_S)
