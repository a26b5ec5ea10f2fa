"""The stall watch: find waits for other ranks that will not end, and end them on every rank with the same error.

Each rank has one thread, the `StallWatch`. The threads of ranks 1, 2, … keep one connection to rank 0's (`link`).
A rank that waits for long sends its position there. Then rank 0 asks all ranks for theirs, once a tick, and decides:
if no rank makes progress for `stall_s`, it sends a verdict, which every rank raises as a `StallError`. A rank makes
progress while its waits end, while it or its children use the processor or a disk, and while a debugger holds it.

No wait depends on the process group's store. It only passes on the address of rank 0, in a thread of its own. A rank
that cannot reach rank 0 decides for itself.

Waits of one thread are one *lane*: the training loop's, over all wires, and that of each wire that saves behind it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from .lane import ENDED_S, Lane, report
from .link import RETRY_S, Link, listen, resolve, store_clients
from .position import Position, Work, explain, is_debugged, last_error, ranks_text
from .watch import STALL_S, Watch

_log = logging.getLogger(__name__)

SLOW = 10
"""A rank that waits for no other or does not answer, and ranks that all wait for the same (a long transfer), get this
many times `stall_s`: they may continue by themselves. Meanwhile rank 0 reports on stderr who waits for whom."""

_KEY = "hf_zero/watch"
_TICKS = 12
"""Looks per `stall_s`."""
_SILENT = 0.7
"""A host that does not answer for this part of `stall_s` cannot be reached."""
_NEWS_S = 1.5
"""A broken connection waits this long for the reason."""
_DIVERGED = (
    "Every rank makes the same calls in the same order. Look for a collective inside `if rank == 0`, and for a batch, "
    "a step or a layer that one rank left out"
)
_RESTART = "then start all ranks again from the last checkpoint"
_NETWORK = f"The network between the hosts is cut, or a host is down. Restore it, {_RESTART}"
_SILENCE = f"Find out why that process does not run, {_RESTART}"
_LOST = "That rank's process has ended, or raised an error before this one: its own output, further up or in its log, says why"


@dataclass
class _Peer:
    """What rank 0 knows of another rank.

    Attributes:
        heard: when it last sent a message; 0: never.
        ended: how it has left; empty: it has not.
    """

    link: Link | None = None
    host: str = ""
    heard: float = 0.0
    lanes: dict[str, Position] = field(default_factory=dict)
    ended: str = ""


class StallWatch:
    """The watch thread of this process over one process group, until that is gone.

    Args:
        owner: the process group.
        store: its `torch.distributed.Store`.
        endpoint: host name and port of the store, if it has them.
        interrupt_home: breaks user code's own waits over the process group.

    Attributes:
        stall_s: seconds without progress after which ranks have diverged; 0: waits are not watched.
        engines: how many engines this rank has numbered.
        is_met: this rank has reached rank 0.
        fault: why no rank is watched.
    """

    def __init__(
        self,
        owner: object,
        store: Any,
        endpoint: tuple[str, int] | None,
        rank: int,
        size: int,
        interrupt_home: Callable[[], None],
        stall_s: float | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.stall_s = STALL_S if stall_s is None else stall_s
        self.engines = 0
        self.is_met = rank == 0
        self.fault: str | None = None
        self.lanes: dict[str, Lane] = {}
        self._interrupt_home = interrupt_home
        self._store, self._endpoint = store, endpoint
        self._store_address: tuple[str, int] | None = None
        self._store_answered = time.perf_counter()
        self._found: tuple[tuple[str, int], str] | None = None
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._link: Link | None = None
        self._peers = {each: _Peer() for each in range(1, size)} if rank == 0 else {}
        self._probes: dict[str, Link] = {}
        self._hosts: list[str] = []
        self._ended: dict[int, str] = {}
        self._asked = self._heard = self._healed = -1e9
        self._told_s = 0.0
        self._work: Work | None = None
        self._stop = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._meeting = threading.Thread(target=self._meet, name="hf_zero meets", daemon=True)
        self._thread = threading.Thread(target=self._run, name="hf_zero watch", daemon=True)
        self._meeting.start()
        self._thread.start()
        # Also at exit: a daemon thread that is in torch's C++ code while Python ends would abort the process.
        weakref.finalize(owner, self._end, os.getpid())

    def join(self, watch: Watch, lane: str) -> None:
        """Watch these waits, too.

        Args:
            lane: the same on every rank; one per thread and process group.
        """
        if lane not in self.lanes:
            found = Lane(lane, lambda: self._explain_break(lane), self._interrupt_home)
            self.lanes = {**self.lanes, lane: found}
        self.lanes[lane].join(watch)

    def meet(self, within_s: float) -> str | None:
        """Wait for the connection to rank 0, which has called `StallWatch`; return why there is none."""
        until = time.perf_counter() + within_s
        while not self.is_met and self.fault is None and time.perf_counter() < until:
            time.sleep(0.001)
        if self.is_met or self.fault is not None:
            return self.fault
        return f"rank {self.rank} has no connection to rank 0 at {self._found and self._found[0]}"

    @property
    def tick_s(self) -> float:
        return min(1.0, max(0.05, (self.stall_s or STALL_S) / _TICKS))

    # In a thread that calls the store: it may be behind a cut link, and then no call returns ------------------------

    def _meet(self) -> None:
        try:
            if self._endpoint is not None:
                self._store_address = resolve(*self._endpoint)
                self._store = self._store.clone()  # a connection of its own
            if self.rank == 0:
                listener, address = listen(self._endpoint)
                self._store.set(_KEY, json.dumps([*address, self._token]))
                self._listener = listener
                return
            while not self.is_met and not self._stop.wait(0.02 if self.lanes else 0.2):
                if self._found is None and self._store.check([_KEY]):
                    host, port, token = json.loads(self._store.get(_KEY))
                    self._found = resolve(host or (self._endpoint or ("",))[0], port), token
                self._store_answered = time.perf_counter()
        except (RuntimeError, OSError) as error:
            if not self._stop.is_set():
                self.fault = f"rank {self.rank}: {error}"

    # In the watch thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda loop, context: None)  # a task that fails is started again
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._start(self._serve() if self.rank == 0 else self._follow())
        while not self._stop.is_set():
            try:
                if self.stall_s > 0 and self.fault is None:
                    self._look(time.perf_counter())
            except Exception:  # no descriptor is left, say; without this thread no wait would end
                _log.debug("the stall watch has failed; it continues", exc_info=True)
            await asyncio.sleep(self.tick_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look(self, now: float) -> None:
        """Send this rank's positions while it waits or is asked for them; decide what to do."""
        blocked_s = max((lane.blocked_s(now) for lane in self.lanes.values()), default=0.0)
        own: dict[str, Position] = {}
        if now - self._asked < 3 * self.tick_s or blocked_s > self._patience_s:
            work, before = Work.now(), self._work
            works = before is None or work.has_grown(before) or is_debugged()
            self._work = work
            own = {name: lane.position(now, works) for name, lane in self.lanes.items()}
        else:
            self._work = None
        if self.rank == 0:
            self._decide(now, own)
            return
        if own and self._link is not None:
            self._link.send({"at": {name: asdict(position) for name, position in own.items()}})
        self._decide_alone(now, blocked_s)

    @property
    def _patience_s(self) -> float:
        return min(self.stall_s / 3, ENDED_S)

    async def _follow(self) -> None:
        """Keep a connection to rank 0, and receive its messages."""
        while not self.is_met or (self._link is not None and not self._link.has_ended):
            if self._found is None:
                silent_s = time.perf_counter() - self._store_answered
                if silent_s > max(1.0, 3 * self.tick_s) and self._store_address is not None:
                    self._probe(self._store_address)
                await asyncio.sleep(0.02)
                continue
            if self._link is None:
                self._link = Link(self.stall_s)
            address, token = self._found
            reader = await self._link.connect(address)
            if reader is not None:
                self._link.send({"hello": self.rank, "host": socket.gethostname(), "token": token})
                async for message in self._link.receive(reader):
                    self._hear(message)
            if not self.is_met and self._link.has_ended:  # the address was an earlier process group's
                self._found = self._link = None
            await asyncio.sleep(0.1)
        self._ended.setdefault(0, "has ended")

    def _hear(self, message: Mapping[str, Any]) -> None:
        """Handle a message from rank 0."""
        self.is_met, self._heard = True, time.perf_counter()
        self._hosts = message.get("hosts", self._hosts)
        self._ended |= {int(rank): text for rank, text in message.get("ended", {}).items()}
        if "ask" in message:
            self._asked = self._heard
        if "verdicts" in message:
            self._finish(message["verdicts"])

    def _probe(self, address: tuple[str, int]) -> None:
        """Watch a host that sends no messages."""

        async def keep(link: Link) -> None:
            while True:
                reader = await link.connect(address)
                if reader is not None:
                    async for _ in link.receive(reader):
                        pass
                await asyncio.sleep(RETRY_S)

        if address[0] not in self._probes:
            link = self._probes[address[0]] = Link(self.stall_s, is_known=True)
            self._start(keep(link))

    # Rank 0 ---------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while self._listener is None:
            await asyncio.sleep(0.005)
        server = await asyncio.start_server(self._receive, sock=self._listener)
        async with server:
            await server.serve_forever()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of another rank."""
        link, rank, peer = Link(self.stall_s), 0, _Peer()
        link.adopt(writer)
        async for message in link.receive(reader):
            if rank == 0:
                if message.get("token") != self._token:
                    break
                rank = message["hello"]
                peer = self._peers[rank]
                self._admit(peer, link, message["host"])
            elif "at" in message:
                peer.heard = time.perf_counter()
                peer.lanes = {name: Position(**each) for name, each in message["at"].items()}
            else:
                self._tell_end(rank, message["bye"])
        if rank and link.has_ended and peer.link is link and rank not in self._ended:
            self._tell_end(rank, "has ended")

    def _admit(self, peer: _Peer, link: Link, host: str) -> None:
        now = time.perf_counter()
        if peer.link is not None:
            self._healed = now
        peer.link, peer.host, peer.heard = link, host, now
        link.send({})
        if all(each.host for each in self._peers.values()):
            self._hosts = [socket.gethostname(), *(each.host for each in self._peers.values())]
            self._probes = {}
            self._send_all({"hosts": self._hosts})

    def _tell_end(self, rank: int, text: str) -> None:
        self._ended[rank] = text
        self._send_all({"ended": {rank: text}})

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.send(message)

    def _decide(self, now: float, own: dict[str, Position]) -> None:
        """Ask for positions while a rank waits; send a verdict where no rank makes progress."""
        by_rank = {0: own}
        by_rank |= {rank: peer.lanes for rank, peer in self._peers.items() if now - peer.heard < self._fresh_s}
        positions = [position for lanes in by_rank.values() for position in lanes.values()]
        blocked_s = max((position.waited_s for position in positions), default=0.0)
        if blocked_s <= self._patience_s:
            self._told_s = self.stall_s
            for peer in self._peers.values():
                peer.lanes = {}
            return
        self._asked = now
        self._send_all({"ask": 1})
        if self._endpoint is not None and not self._hosts:  # not all ranks have reached this one
            for client in store_clients(self._endpoint[1]):
                self._probe(client)
        cut = self.unreachable(_SILENT * self.stall_s) if blocked_s > self.stall_s else ""
        verdicts: dict[str, str] = {}
        for name in sorted({name for lanes in by_rank.values() for name in lanes}):
            if name in self.lanes and self.lanes[name].verdict is not None:
                continue
            found = {rank: lanes[name] for rank, lanes in by_rank.items() if name in lanes}
            text = self._text(cut, _NETWORK, name) if cut else self._judge(name, found, now)
            if text is not None:
                verdicts[name] = text
        if verdicts:
            self._send_all({"verdicts": verdicts})
            self._finish(verdicts)

    def _judge(self, name: str, positions: Mapping[int, Position], now: float) -> str | None:
        """Return why no rank will get further; None while one may."""
        waited_s, who = max(((at.waited_s, rank) for rank, at in positions.items() if at.is_in_wire), default=(0.0, 0))
        if waited_s <= (min(ENDED_S, self.stall_s) if self._ended else self.stall_s):
            return None
        first = positions[who]
        is_joint = len(positions) == self.size and all(first.is_with(each) for each in positions.values())

        def may_continue(rank: int) -> bool:
            position = positions.get(rank)
            if position is None:
                return min(waited_s, now - self._peers[rank].heard) <= SLOW * self.stall_s
            patience = 0.5 if position.waits_for and not is_joint else SLOW
            return position.still_s <= patience * self.stall_s

        late = [] if self._ended else [rank for rank in range(self.size) if may_continue(rank)]
        # What was lost in a cut is sent again no later than the cut was long.
        if not late and now - self._healed < self.stall_s and waited_s < SLOW * self.stall_s:
            late = [rank for rank in range(self.size) if rank != who]
        if not late:
            return self._text(f"ranks have diverged: no rank has made progress for {waited_s:.0f} s", _DIVERGED, name)
        if waited_s > self._told_s:
            self._told_s = 2 * waited_s
            texts = self._positions(name)
            _tell(who, first, [(rank, texts[rank]) for rank in late])
        return None

    @property
    def _fresh_s(self) -> float:
        return max(1.0, 3 * self.tick_s)

    # Texts ----------------------------------------------------------------------------------------------------------

    def _silences(self) -> dict[int, float]:
        """Return for how long ranks cannot be reached, of those that cannot be."""
        if self.rank == 0:
            links = {rank: peer.link for rank, peer in self._peers.items() if rank not in self._ended}
        else:
            links = {rank: self._link for rank in range(self.size) if rank == 0 or self._is_beside_rank_0(rank)}
        found = {rank: link.silent_s() for rank, link in links.items() if link is not None}
        return {rank: silent_s for rank, silent_s in found.items() if silent_s}

    def _is_beside_rank_0(self, rank: int) -> bool:
        return bool(self._hosts) and self._hosts[rank] == self._hosts[0]

    def unreachable(self, at_least_s: float = 0.0) -> str:
        """Return which hosts have not answered for so long; empty: none is known."""
        silences, lost = self._silences(), {host: link.silent_s() for host, link in self._probes.items()}
        longest_s = max((*silences.values(), *lost.values(), 0.0))
        if longest_s == 0 or longest_s < at_least_s:
            return ""
        by_host: dict[str, list[int]] = {}
        for rank in silences:
            host = (
                self._peers[rank].host if self.rank == 0 else self._hosts[rank] if self._hosts else "the host of rank 0"
            )
            by_host.setdefault(host, []).append(rank)
        hosts = [f"{host} ({ranks_text(ranks)})" for host, ranks in by_host.items()]
        if not hosts and self.rank and self._endpoint is not None:
            hosts = [f"the host of the process group's store at {self._endpoint[0]}:{self._endpoint[1]}"]
        hosts = hosts or [host for host, silent_s in lost.items() if silent_s]
        return f"{', '.join(hosts)} cannot be reached from {socket.gethostname()}: no answer for {longest_s:.0f} s"

    def _positions(self, name: str) -> dict[int, str]:
        """Return the position of each rank in a lane, as text."""
        now, silences, texts = time.perf_counter(), self._silences(), {}
        for rank in range(self.size):
            peer = self._peers.get(rank)
            position = peer.lanes.get(name) if peer is not None else None
            if rank == self.rank and name in self.lanes:
                position = self.lanes[name].position(now)
            text = "nothing heard of it" if position is None else str(position)
            if rank in silences:
                last = "" if position is None else f"; last known: {text}"
                text = f"cannot be reached for {silences[rank]:.0f} s{last}"
            elif rank in self._ended:
                text = self._ended[rank]
            elif peer is not None and position is not None and now - peer.heard > self._fresh_s:
                text += f"; no answer for {now - peer.heard:.0f} s"
            texts[rank] = text
        return texts

    def _text(self, what: str, advice: str, name: str) -> str:
        """Return a verdict: what happened, the position of each rank in a lane, and what to do."""
        return explain(what, self._positions(name), self._hosts, advice)

    # Verdicts -------------------------------------------------------------------------------------------------------

    def _decide_alone(self, now: float, blocked_s: float) -> None:
        """End waits of this rank that rank 0 cannot judge."""
        if blocked_s > self.stall_s and (cut := self.unreachable(_SILENT * self.stall_s)):
            self._finish({name: self._text(cut, _NETWORK, name) for name in self.lanes})
            return
        for name, lane in self.lanes.items():
            waited_s = lane.waited_s(now)
            silent_s = min(waited_s, now - self._heard)
            if 0 in self._ended and waited_s > min(ENDED_S, self.stall_s):
                what = f"rank 0 {self._ended[0]}, and this rank waits for {waited_s:.0f} s"
                self._finish({name: self._text(what, _DIVERGED, name)})
            elif silent_s > SLOW * self.stall_s:
                self._finish({name: self._text(f"rank 0 has not answered for {silent_s:.0f} s", _SILENCE, name)})
            elif silent_s > max(self.stall_s, self._told_s):
                self._told_s = 2 * silent_s
                _tell(self.rank, lane.position(now), [(0, f"no answer for {silent_s:.0f} s")])
            elif waited_s == 0:
                self._told_s = 0.0

    def _finish(self, verdicts: Mapping[str, str]) -> None:
        """Raise verdicts in the threads of user code."""
        lanes = [self.lanes[name] for name in verdicts if name in self.lanes and self.lanes[name].verdict is None]
        # On all wires before one wait is broken: the error of that wait, and of any that begins next, is this one.
        for lane in lanes:
            lane.adopt(verdicts[lane.name])
        if any(lane.waited_s(time.perf_counter()) for lane in lanes):
            self._stop.wait(0.2)  # other ranks receive the verdict before the connections of this one break
        for lane in lanes:
            lane.interrupt()

    def _explain_break(self, name: str) -> tuple[str, bool]:
        """Wait for a verdict, or for news of a rank that has ended or cannot be reached."""
        lane, until = self.lanes[name], time.perf_counter() + _NEWS_S
        while self.stall_s > 0 and self.fault is None and time.perf_counter() < until:
            if lane.verdict is not None or self._ended or self._silences():
                break
            time.sleep(0.02)
        if lane.verdict is not None:
            return lane.verdict, True
        if cut := self.unreachable():
            return self._text(cut, _NETWORK, name), True
        what = f"rank {self.rank}, {lane.position(time.perf_counter())}: the connection to another rank has broken. "
        ended = [f"rank {rank} {text}. " for rank, text in sorted(self._ended.items())]
        return what + "".join(ended) + _LOST, False

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # a fork has neither the threads nor a right to the connections
            return
        lane, error = self.lanes.get(""), last_error().partition("\n")[0]
        text = f"has left the job after {lane.steps if lane is not None else 0} steps" + (f": {error}" if error else "")
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._leave, text)
        self._thread.join(10)
        self._meeting.join(1)
        if self._listener is not None:
            self._listener.close()

    def _leave(self, text: str) -> None:
        if self.rank == 0:
            self._send_all({"ended": {0: text}})
        elif self._link is not None:
            self._link.send({"bye": text})
        self._stop.set()
        for task in self._tasks:
            task.cancel()


def _tell(who: int, at: Position, late: Iterable[tuple[int, str]]) -> None:
    what = f"in {at.purpose}" if at.purpose else f"for {at.waits_for}"
    for_whom = "; ".join(f"rank {rank}: {text}" for rank, text in late)
    report(f"hf_zero: rank {who} has waited {at.waited_s:.0f} s {what}, for {for_whom}")
