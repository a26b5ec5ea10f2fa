"""Find waits for other ranks that will not end, and end them on every rank with a `StallError`.

One daemon thread per process group, the `Watcher`, checks the watches of all wires once a tick. A rank that waits for long asks
every other rank for its position (`position`). Three facts end the wait: a rank has ended; a host has not answered for most of
`stall_s`; no rank has moved for `stall_s`. The rank that finds one sends its verdict to all others before it raises.

Waits of one thread are one *lane*, because a thread is at one position at a time: the training loop's, over all wires of the
process group, and one of each wire that saves a checkpoint in the background.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from .position import (
    ANSWER_S,
    Contact,
    Endpoint,
    Listener,
    Message,
    Position,
    Reply,
    ask,
    last_error,
    own_address,
    ranks_text,
    torch_wait,
    user_code,
)
from .watch import SLOW_FACTOR, STALL_S, Watch

_log = logging.getLogger(__name__)

_TICKS = 12
"""Checks per `stall_s`."""
_ASKS_EACH_S = 200
"""Approximate limit on how many ranks one rank asks per second."""
_ASK_S = 3.0
"""A longer wait asks for positions. Messages that a rank sent before it ended have arrived by then."""
_SILENT = 0.7
"""A host that has not answered for this part of `stall_s` is unreachable."""
_ENDING_S = 1.0
"""Time in which a process ends after its connections have broken."""
_LEAVE_S = 0.5
"""Time that a rank takes to report its end."""
_GLOO_S = 5.0
"""The longest time that a rank waits at its end for gloo's threads."""

_SAME_STEPS = "Every rank needs the same number of batches, and an exception on one rank ends all"
_DIVERGED = (
    "Every rank makes the same calls in the same order. Look for a collective inside `if rank == 0`, and for a batch, a step "
    "or a layer that one rank left out"
)
_NO_ANSWER = "Find out why that process does not answer, then start all ranks again from the last checkpoint"
_NETWORK = "Restore the network or that host, then start all ranks again from the last checkpoint"
_LOST = "Read the output of the other ranks, above or in their logs: the first error there is the cause"
_WORDS = {
    "gather": "the parameters of {}",
    "reduce": "the gradients of {}",
    "scalar": "a sum over all ranks",
    "across": "the gradients of {}",
    "agree": "the agreement on which units take part in a backward",
}


@dataclass
class _Peer:
    """Another rank.

    Attributes:
        is_remote: there is a network between it and this rank.
        was_reached: it has been connected before. One that never was (a firewall) counts as unknown, not as unreachable.
        unreachable_since: since when its host has not answered; None: it answers.
        has_exited: its process has ended.
        ended: position that it reported at its end.
    """

    endpoint: Endpoint
    rank: int
    is_remote: bool
    was_reached: bool = False
    unreachable_since: float | None = None
    has_exited: bool = False
    ended: Position | None = None

    def note(self, contact: Contact, began: float) -> None:
        """Record the outcome of a question that was sent at `began`."""
        self.was_reached |= contact in (Contact.SILENT, Contact.ANSWERED)
        self.has_exited |= contact is Contact.REFUSED and (self.was_reached or not self.is_remote)
        if contact is not Contact.UNREACHABLE:
            self.unreachable_since = None
        elif self.is_remote and self.was_reached:
            self.unreachable_since = self.unreachable_since or began

    @property
    def unreachable_s(self) -> float:
        """Seconds for which its host has not answered; 0: it answers, or is not known."""
        return 0.0 if self.unreachable_since is None else time.perf_counter() - self.unreachable_since


class Watcher:
    """Checks all watches of this process over one process group and its side groups, until the group is freed.

    Args:
        owner: the process group.
        store: host name and port of its store, if it has them.
        rank, size: of this process.
        stall_s: limit of waits; 0: not watched.

    Attributes:
        endpoint: of this rank.
        engines: number of engines so far.
        groups: this rank's process group of each partition into groups, by the partition.
    """

    def __init__(
        self, owner: object, store: tuple[str, int] | None, rank: int, size: int, stall_s: float | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.stall_s = STALL_S if stall_s is None else stall_s
        self.engines = 0
        self.groups: dict[str, Any] = {}
        self.lanes: dict[str, _Lane] = {}
        self._endpoints_since: float | None = None
        self.hosts: list[str] = []
        self.last_unreachable = 0.0
        """When a host was last found unreachable. After an outage TCP resends lost bytes within the time that it lasted."""
        self._peers: dict[int, _Peer] = {}
        self._listener = Listener(own_address(store), self._answer)
        self.endpoint = self._listener.endpoint
        self._wake, self._is_over = Event(), False
        self._thread = threading.Thread(target=self._run, name="hf_zero watch", daemon=True)
        self._thread.start()
        weakref.finalize(owner, self._end, os.getpid())  # runs at exit, too

    def join(self, watch: Watch, lane: str) -> None:
        """Check this watch too, until it is freed.

        Args:
            lane: the same on every rank; one per thread and process group.
        """
        if lane not in self.lanes:
            self.lanes = {**self.lanes, lane: _Lane(self, lane)}
        self.lanes[lane].join(watch)

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Use the endpoints of all ranks, by rank."""
        self._peers = {
            rank: _Peer(endpoint, rank, endpoint.machine != self.endpoint.machine)
            for rank, endpoint in enumerate(endpoints)
            if endpoint != self.endpoint and endpoint.address
        }
        self.hosts = [endpoint.host for endpoint in endpoints]
        self._endpoints_since = time.perf_counter()
        self._wake.set()  # asks at once: only ranks that were reached before can become unreachable

    @property
    def has_endpoints(self) -> bool:
        """Return whether the ranks have exchanged their endpoints."""
        return self._endpoints_since is not None

    @property
    def tick_s(self) -> float:
        return max(min(1.0, max(0.05, (self.stall_s or STALL_S) / _TICKS)), self.size / _ASKS_EACH_S)

    # In any thread --------------------------------------------------------------------------------------------------

    def ask_all_ranks(self, message: Message, limit_s: float = ANSWER_S) -> dict[int, Reply]:
        """Send a message to all other ranks; return the replies by rank.

        Raises:
            OSError: no descriptor is left.
        """
        began, peers = time.perf_counter(), [*self._peers.values()]
        questions = [(peer.endpoint, replace(message, token=peer.endpoint.token).to_bytes()) for peer in peers]
        replies = ask(questions, limit_s)
        for peer, reply in zip(peers, replies):
            peer.note(reply.contact, began)
            if peer.unreachable_since is not None:
                self.last_unreachable = time.perf_counter()
        return {peer.rank: reply for peer, reply in zip(peers, replies)}

    def peer(self, rank: int) -> _Peer | None:
        return self._peers.get(rank)

    def ended(self) -> list[int]:
        """Return the ranks that have ended."""
        return [rank for rank, peer in self._peers.items() if peer.has_exited or peer.ended is not None]

    def unreachable(self, at_least_s: float = 0.0) -> str:
        """Return which hosts have not answered for `at_least_s`; empty: none is known."""
        lost = [peer for peer in self._peers.values() if peer.unreachable_s]
        longest_s = max((peer.unreachable_s for peer in lost), default=0.0)
        if not lost or longest_s < at_least_s:
            return ""
        ranks: dict[str, list[int]] = {}
        for peer in lost:
            ranks.setdefault(peer.endpoint.host, []).append(peer.rank)
        hosts = ", ".join(f"{host} ({ranks_text(each)})" for host, each in ranks.items())
        return f"{hosts} cannot be reached from {self.endpoint.host}: no answer for {longest_s:.0f} s"

    # In the listener's thread ---------------------------------------------------------------------------------------

    def _answer(self, question: Message) -> Message:
        lane, asker = self.lanes.get(question.lane), question.position
        if asker is not None and asker.rank in self._peers:
            self._peers[asker.rank].ended = asker
        if lane is None:
            return Message()
        if question.verdict and lane.verdict is None:
            lane.received = question.verdict
        return Message(verdict=lane.verdict or "", position=lane.position())

    # In the watcher's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait(self.tick_s)
            self._wake.clear()
            if self._is_over:
                return
            try:
                if self.stall_s > 0:
                    self._check()
            except Exception:  # such as no descriptors; must continue: without this thread no wait would end
                _log.debug("the stall watch failed", exc_info=True)

    def _check(self) -> None:
        is_new = self._endpoints_since is not None and time.perf_counter() - self._endpoints_since < STALL_S
        if is_new and not all(peer.was_reached for peer in self._peers.values()):  # while the network still works
            self.ask_all_ranks(Message())
        for lane in self.lanes.values():
            lane.check(time.perf_counter())

    def finish(self, verdict: str, lanes: Sequence[_Lane]) -> None:
        """Raise `verdict` in the threads that wait, on all ranks that can be reached."""
        # Must reach all wires before one wait is broken: that wait, and any that begins next, raises the verdict.
        for lane in lanes:
            lane.verdict = verdict
        for lane in lanes:
            self.ask_all_ranks(Message(lane.name, verdict=verdict))
        for lane in lanes:
            lane.end_waits(verdict)

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # a forked child has no such threads
            return
        self._is_over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10)
        if self.stall_s and "" in self.lanes:
            with suppress(OSError):  # no descriptor is left
                self.ask_all_ranks(Message(position=self.lanes[""].position(ended=True)), _LEAVE_S)
        self._listener.close()
        _wait_for_gloo()


def _wait_for_gloo() -> None:
    """Wait until gloo's threads are idle, at most `_GLOO_S`.

    They free a collective's tensors after its end, which needs Python's lock. At exit that aborts the process, and torch does
    not wait for them even in `destroy_process_group`.
    """
    until = time.perf_counter() + _GLOO_S
    is_running = True
    while is_running and time.perf_counter() < until:
        time.sleep(0.001)  # releases the lock
        is_running = False
        for file in Path("/proc/self/task").glob("*/stat"):
            with suppress(OSError):  # the thread has ended
                is_running |= "(pt_gloo_runloop) R" in file.read_text()


class _Lane:
    """The waits of one thread, over any number of wires.

    Attributes:
        name: the same on every rank; empty: the main thread's.
        verdict: why this rank cannot continue.
        received: the verdict of another rank.
    """

    def __init__(self, watcher: Watcher, name: str) -> None:
        self.name = name
        self.verdict: str | None = None
        self.received: str | None = None
        self._watcher = watcher
        self._watches: tuple[weakref.ref[Watch], ...] = ()
        self._operations: list[str] = []
        self._seen: dict[int, _Progress] = {}
        self._reported_s = 0.0

    def join(self, watch: Watch) -> None:
        self._watches = (*(each for each in self._watches if each() is not None), weakref.ref(watch))
        watch.explain, watch.verdict, watch.operations = self.explain_error, self.verdict, self._operations

    def _open(self) -> list[Watch]:
        return [watch for each in self._watches if (watch := each()) is not None]

    def position(self, *, ended: bool = False) -> Position:
        watches = self._open()
        # The one that waits, else the one that waited last.
        waiting = [watch for watch in watches if watch.current is not None]
        watch = max(waiting or watches, key=lambda each: each.last, default=None) or Watch()
        at = watch.current
        waits_for = "" if ended or self.name else torch_wait()
        if at is not None:
            waits_for = _WORDS.get(at.kind, "all ranks").format(watch.units.get(at.tag, "a unit"))
        return Position(
            rank=self._watcher.rank,
            step=watch.step,
            phase=watch.phase,
            waits_for=waits_for,
            operation=self._operations[-1] if self._operations else "",
            code=last_error() if ended else user_code(),
            waits=sum(each.done for each in watches),
            engine=watch.engine,
            group="" if at is None else watch.groups.get(at.kind, ""),
            ended=ended,
        )

    # In the watcher's thread ----------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End this rank's wait if it will not end by itself."""
        watcher, stall_s = self._watcher, self._watcher.stall_s
        if self.verdict is not None:
            return
        if self.received is not None:
            self.end_waits(self.received)
            return
        waited_s = max((now - at.started for watch in self._open() if (at := watch.current) is not None), default=0.0)
        if waited_s <= min(stall_s / 3, _ASK_S):
            self._seen.clear()
            self._reported_s = stall_s
            return
        replies, theirs = self._ask_all()
        for rank in range(watcher.size):
            self._seen.setdefault(rank, _Progress(now)).note(replies.get(rank), now)
        if waited_s > stall_s and (lost := watcher.unreachable(_SILENT * stall_s)):
            lanes = [lane for lane in watcher.lanes.values() if lane.verdict is None]
            watcher.finish(self._explain(lost, _NETWORK), lanes)
        elif theirs is not None:
            self.end_waits(theirs)
        elif verdict := self._judge(now, waited_s, stall_s):
            watcher.finish(verdict, [self])

    def end_waits(self, verdict: str) -> None:
        """End the waits with an error, whose reason is the verdict."""
        self.verdict = verdict
        watches = self._open()
        for watch in watches:
            watch.verdict = verdict
        for watch in watches:
            if watch.current is not None:
                watch.interrupt()

    def _ask_all(self) -> tuple[dict[int, Reply], str | None]:
        """Return the replies of all other ranks, and a verdict of one of them."""
        replies = self._watcher.ask_all_ranks(Message(self.name))
        verdicts = [reply.message.verdict for reply in replies.values() if reply.message is not None]
        return replies, next(filter(None, verdicts), None)

    def _judge(self, now: float, waited_s: float, stall_s: float) -> str | None:
        """Return why this rank cannot continue; None while it may."""
        watcher, here = self._watcher, self.position()
        if (ended := watcher.ended()) and waited_s > min(stall_s, _ASK_S):
            return self._explain(f"{ranks_text(ended)} has ended, but other ranks wait for it", _SAME_STEPS)
        positions = [seen.position for _, seen in sorted(self._seen.items())]
        positions[here.rank] = here
        late = [
            rank
            for rank, seen in self._seen.items()
            if rank != here.rank and now - seen.moved <= stall_s * _patience(seen, positions)
        ]
        if waited_s <= stall_s:
            return None
        # After an outage, lost messages arrive within `stall_s`. `unreachable` finds hosts that stay away.
        if late or now - watcher.last_unreachable < stall_s:
            if waited_s > self._reported_s:
                self._reported_s = 2 * waited_s
                self._report(waited_s, here, late)
            return None
        if silent := [rank for rank, seen in self._seen.items() if seen.is_silent and rank != here.rank]:
            what = f"{ranks_text(silent)} does not answer, and rank {here.rank} has waited {waited_s:.0f} s"
            return self._explain(what, _NO_ANSWER)
        return self._explain(f"ranks have diverged: no rank has made progress for {waited_s:.0f} s", _DIVERGED)

    def _line(self, rank: int) -> str:
        """Return what is known of a rank."""
        peer, seen = self._watcher.peer(rank), self._seen.get(rank)
        position = None if seen is None else seen.position
        last = "" if position is None else f"; last known: {position}"
        if rank == self._watcher.rank:
            return str(self.position())
        if peer is not None and peer.ended is not None:
            return str(peer.ended)
        if peer is not None and peer.has_exited:
            return f"its process has ended{last}"
        if peer is not None and peer.unreachable_s:
            return f"cannot be reached for {peer.unreachable_s:.0f} s{last}"
        if seen is None or position is None:
            return "no answer so far"
        silent_s = time.perf_counter() - seen.answered
        return f"{position}" + (f"; no answer for {silent_s:.0f} s" if seen.is_silent else "")

    def _explain(self, what: str, advice: str) -> str:
        """Return a verdict: what happened, the position of each rank, and what to do."""
        watcher = self._watcher
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in range(watcher.size):
            host = f" on {watcher.hosts[rank]}" if len({*watcher.hosts}) > 1 else ""
            groups.setdefault((host, self._line(rank)), []).append(rank)
        lines = [f"{ranks_text(ranks)}{host}: {text}" for (host, text), ranks in groups.items()]
        return f"{what}.\n  " + "\n  ".join(lines) + f"\n{advice}"

    def _report(self, waited_s: float, here: Position, late: Sequence[int]) -> None:
        what = f"in {here.operation}" if here.operation else f"for {here.waits_for}"
        for_whom = "; ".join(f"rank {rank}: {self._line(rank)}" for rank in late) or "a network that was cut"
        lost = f"; {found}" if (found := self._watcher.unreachable()) else ""
        _log.warning(
            "hf_zero: rank %d has waited %.0f s %s%s, for %s%s", here.rank, waited_s, what, here.group, for_whom, lost
        )

    # In the thread that waits ---------------------------------------------------------------------------------------

    def explain_error(self, is_lost: bool) -> str | None:
        """See `Watch.explain`."""
        watcher = self._watcher
        until = time.perf_counter() + _ENDING_S
        while watcher.stall_s:  # another rank may just have ended, or raised its verdict
            _, theirs = self._ask_all()
            if verdict := self.verdict or self.received or theirs:
                return verdict
            if not is_lost or watcher.ended() or watcher.unreachable() or time.perf_counter() > until:
                break
            time.sleep(0.05)
        if not is_lost:
            return None
        here, lost = self.position(), watcher.unreachable()
        ended = "; ".join(f"rank {rank}: {self._line(rank)}" for rank in watcher.ended())
        why = f"{lost}. {_NETWORK}" if lost else f"{ended}. {_SAME_STEPS}" if ended else _LOST
        return f"rank {here.rank}, {here}: the connection to another rank has broken. {why}"


class _Progress:
    """Progress of another rank, as this rank observed it during one wait.

    Attributes:
        position: the last one; None: unknown.
        moved: time of its last progress.
        answered: time of its last answer.
        is_silent: it did not answer the last question.
    """

    def __init__(self, now: float) -> None:
        self.position: Position | None = None
        self.moved = self.answered = now
        self.is_silent = True

    def note(self, reply: Reply | None, now: float) -> None:
        position = None if reply is None or reply.message is None else reply.message.position
        self.is_silent = position is None
        if position is None:
            return
        before, self.position, self.answered = self.position, position, now
        if before is None or (before.waits, before.waits_for) != (position.waits, position.waits_for):
            self.moved = now


def _patience(seen: _Progress, positions: Sequence[Position | None]) -> float:
    """Return how long a rank may make no progress, as a multiple of `stall_s`."""
    position = seen.position
    # It does not answer, or waits for no other rank: it may be reading, loading, compiling, or calling a server.
    if position is None or seen.is_silent or not position.waits_for:
        return SLOW_FACTOR
    together = all(
        other is not None
        and (other.waits_for, other.engine, other.step, other.operation)
        == (position.waits_for, position.engine, position.step, position.operation)
        for other in positions
    )
    # Positions are known from a third of `stall_s` on, and at first each rank seems to have moved.
    return SLOW_FACTOR if together else 0.5
