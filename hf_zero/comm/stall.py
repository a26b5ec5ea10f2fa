"""The stall watch: find waits for other ranks that will not end, and end them on every rank with the same error.

Each rank has one thread, the `StallWatch`. The threads of ranks 1, 2, … keep one connection to rank 0's (`channel`).
A rank that waits for long sends its position there. Then rank 0 asks all ranks for theirs, once a tick, and decides:
if no rank makes progress for `stall_s`, it sends a verdict, which every rank raises as a `StallError`. A rank makes
progress while its waits end, while it or its children use the processor or a disk, and while a debugger holds it.

No wait depends on the process group's store. It only passes on the address of rank 0, in a thread of its own. A rank
that cannot reach rank 0 decides for itself.

Waits of one thread are one *lane*: the training loop's, over all wires, and that of each wire that saves behind it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .channel import Channel, listen, store_clients
from .position import Position, Work, explain, is_debugged, last_error, ranks_text, torch_wait, user_code
from .watch import STALL_S, Wait, Watch

SLOW = 10
"""A rank that waits for no other or does not answer, and ranks that all wait for the same (a long transfer), get this
many times `stall_s`: they may continue by themselves. Meanwhile rank 0 reports on stderr who waits for whom."""

_KEY = "hf_zero/watch"
_TICKS = 12
"""Looks per `stall_s`."""
_ENDED_S = 3.0
"""A wait this long asks where the others are. What a rank sent before it ended has arrived by then."""
_SILENT = 0.7
"""A host that does not answer for this part of `stall_s` cannot be reached."""
_NEWS_S = 1.5
"""A broken connection waits this long for the reason."""
_WORDS = {
    "gather": "the parameters of {}",
    "reduce": "the gradients of {}",
    "scalar": "a sum over all ranks",
    "across": "the gradients of {}",
    "node": "the parameters of {}",
    "agree": "the agreement on which units take part in a backward",
}
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

    channel: Channel | None = None
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
        stall_s: float | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.stall_s = STALL_S if stall_s is None else stall_s
        self.engines = 0
        self.is_met = rank == 0
        self.fault: str | None = None
        self.lanes: dict[str, _Lane] = {}
        self.home_interrupt: Any = None
        self._store, self._endpoint = store, endpoint
        self._store_address: tuple[str, int] | None = None
        self._store_answered = time.perf_counter()
        self._found: tuple[tuple[str, int], str] | None = None
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._peers = {each: _Peer() for each in range(1, size)} if rank == 0 else {}
        self._strangers: list[Channel] = []
        self._probes: list[Channel] = []
        self._channel: Channel | None = None
        self._is_greeted = False
        self._hosts: list[str] = []
        self._ended: dict[int, str] = {}
        self._asked = self._heard = self._healed = -1e9
        self._told_s = 0.0
        self._next = 0.0
        self._work: Work | None = None
        self._stop = threading.Event()
        self._wake = socket.socketpair()
        for end in self._wake:
            end.setblocking(False)
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
            self.lanes = {**self.lanes, lane: _Lane(self, lane)}
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

    @property
    def is_on(self) -> bool:
        return self.stall_s > 0 and self.fault is None

    def nudge(self) -> None:
        """Let the thread look now."""
        with suppress(OSError):
            self._wake[1].send(b".")

    # In a thread that calls the store: it may be behind a cut link, and then no call returns ------------------------

    def _meet(self) -> None:
        try:
            if self._endpoint is not None:
                self._store_address = _resolve(*self._endpoint)
                self._store = self._store.clone()  # a connection of its own
            if self.rank == 0:
                listener, address = listen(self._endpoint)
                self._store.set(_KEY, json.dumps([*address, self._token]))
                self._listener = listener
                self.nudge()
                return
            while not self.is_met and not self._stop.wait(0.02 if self.lanes else 0.2):
                if self._found is None and self._store.check([_KEY]):
                    host, port, token = json.loads(self._store.get(_KEY))
                    self._found = _resolve(host or (self._endpoint or ("",))[0], port), token
                    self.nudge()
                self._store_answered = time.perf_counter()
        except (RuntimeError, OSError) as error:
            if not self._stop.is_set():
                self.fault = f"rank {self.rank}: {error}"

    # In the watch thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll
        while not self._stop.is_set():
            try:
                poller = poll()
                channels = [self._channel, *self._strangers, *(peer.channel for peer in self._peers.values())]
                descriptors = [channel.fileno() for channel in channels if channel is not None]
                descriptors += [self._wake[0].fileno()] + ([self._listener.fileno()] if self._listener else [])
                for descriptor in descriptors:
                    if descriptor >= 0:
                        poller.register(descriptor, select.POLLIN)
                is_starting = not self.is_met or (self._channel is not None and not self._channel.is_open)
                poller.poll(1000 * (0.05 if is_starting else self.tick_s))
                with suppress(BlockingIOError):
                    self._wake[0].recv(4096)
                if self.is_on:
                    self._look(time.perf_counter())
                else:
                    self._stop.wait(self.tick_s)
            except Exception:  # no descriptor is left, say; without this thread no wait would end
                self._stop.wait(self.tick_s)
        # Not in `_end`: what is under way here must not meet a closed socket.

    def _look(self, now: float) -> None:
        if self.rank == 0:
            self._accept(now)
        else:
            self._listen_to_rank_0(now)
        if now < self._next:
            return
        self._next = now + 0.9 * self.tick_s
        is_asked = now - self._asked < 3 * self.tick_s
        blocked_s = max((lane.blocked_s(now) for lane in self.lanes.values()), default=0.0)
        own: dict[str, Position] = {}
        if is_asked or blocked_s > self._patience_s:
            work, before = Work.now(), self._work
            works = before is None or work.has_grown(before) or is_debugged()
            self._work = work
            own = {name: lane.position(now, works) for name, lane in self.lanes.items()}
        else:
            self._work = None
        if self.rank == 0:
            self._decide(now, own)
        elif own and self._channel is not None:
            self._channel.send({"at": {name: position.to_dict() for name, position in own.items()}})
        if self.rank:
            self._decide_alone(now, blocked_s)

    @property
    def _patience_s(self) -> float:
        return min(self.stall_s / 3, _ENDED_S)

    def _listen_to_rank_0(self, now: float) -> None:
        channel = self._channel
        if channel is None or (channel.has_ended and not self.is_met):
            if channel is not None:  # the address was an earlier process group's
                channel.close()
                self._found, self._channel = None, None
            if self._found is not None:
                self._channel, self._is_greeted = Channel(None, self.stall_s, self._found[0]), False
            channel = self._channel
        if channel is None:
            silent_s = now - self._store_answered
            if silent_s > max(1.0, 3 * self.tick_s) and self._store_address is not None:
                self._probes = self._probes or [Channel(None, self.stall_s, self._store_address, is_known=True)]
            for probe in self._probes:
                probe.poll(now)
            return
        messages = channel.poll(now)
        if not channel.is_open:
            self._is_greeted = False
        elif not self._is_greeted and self._found is not None:
            hello = {"hello": self.rank, "host": socket.gethostname(), "token": self._found[1]}
            channel.send(hello)
            self._is_greeted = True
        for message in messages:
            self.is_met, self._heard = True, now
            self._hosts = message.get("hosts", self._hosts)
            self._ended |= {int(rank): text for rank, text in message.get("ended", {}).items()}
            if "ask" in message:
                self._asked = now
            if "verdicts" in message:
                self._finish(message["verdicts"])
        if channel.has_ended:
            self._ended.setdefault(0, "has ended")

    # Rank 0 ---------------------------------------------------------------------------------------------------------

    def _accept(self, now: float) -> None:
        with suppress(BlockingIOError):
            while self._listener is not None:
                self._strangers.append(Channel(self._listener.accept()[0], self.stall_s))
        for stranger in [*self._strangers]:
            for number, message in enumerate(stranger.poll(now)):
                peer = self._peers.get(message.get("hello", 0))
                if number == 0 and peer is not None and message.get("token") == self._token:
                    self._admit(peer, stranger, message["host"], now)
                    break
                stranger.has_ended = True
            if stranger.has_ended or not stranger.is_open or any(p.channel is stranger for p in self._peers.values()):
                self._strangers.remove(stranger)
                if not any(peer.channel is stranger for peer in self._peers.values()):
                    stranger.close()
        for rank, peer in self._peers.items():
            if peer.channel is None or peer.ended:
                continue
            for message in peer.channel.poll(now):
                peer.heard = now
                peer.lanes = {name: Position(**each) for name, each in message.get("at", {}).items()}
                peer.ended = message.get("bye", "")
            if peer.channel.has_ended and not peer.ended:
                peer.ended = "has ended"
            if peer.ended:
                self._ended[rank] = peer.ended
                self._send_all({"ended": {rank: peer.ended}})

    def _admit(self, peer: _Peer, channel: Channel, host: str, now: float) -> None:
        if peer.channel is not None:
            self._healed = now
            peer.channel.close()
        peer.channel, peer.host, peer.heard = channel, host, now
        channel.send({})
        if all(each.host for each in self._peers.values()):
            self._hosts = [socket.gethostname(), *(each.host for each in self._peers.values())]
            self._send_all({"hosts": self._hosts})

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for peer in self._peers.values():
            if peer.channel is not None:
                peer.channel.send(message)

    def _decide(self, now: float, own: dict[str, Position]) -> None:
        """Ask for positions while a rank waits; send a verdict where no rank makes progress."""
        fresh_s = 3 * self.tick_s
        by_rank = {0: own}
        by_rank |= {rank: peer.lanes for rank, peer in self._peers.items() if now - peer.heard < fresh_s}
        everyone = [position for lanes in by_rank.values() for position in lanes.values()]
        blocked_s = max((position.waited_s for position in everyone), default=0.0)
        if blocked_s <= self._patience_s:
            self._told_s = self.stall_s
            for peer in self._peers.values():
                peer.lanes = {}
            self._probes = []
            return
        self._asked = now
        self._send_all({"ask": 1})
        self._probe_clients(now)
        verdicts: dict[str, str] = {}
        if blocked_s > self.stall_s and (cut := self.unreachable(_SILENT * self.stall_s)):
            names = {*self.lanes, *(name for lanes in by_rank.values() for name in lanes)}
            verdicts = {name: self._text(cut, _NETWORK, name, now) for name in names}
        else:
            for name in {name for lanes in by_rank.values() for name in lanes}:
                positions = {rank: lanes[name] for rank, lanes in by_rank.items() if name in lanes}
                if text := self._judge(name, positions, now):
                    verdicts[name] = text
        if verdicts := {name: text for name, text in verdicts.items() if not self._has_verdict(name)}:
            self._send_all({"verdicts": verdicts})
            self._finish(verdicts)

    def _has_verdict(self, name: str) -> bool:
        return name in self.lanes and self.lanes[name].verdict is not None

    def _judge(self, name: str, positions: Mapping[int, Position], now: float) -> str | None:
        """Return why no rank will get further; None while one may."""
        waited_s, who = max(((p.waited_s, rank) for rank, p in positions.items() if p.is_in_wire), default=(0.0, 0))
        if waited_s <= (min(_ENDED_S, self.stall_s) if self._ended else self.stall_s):
            return None
        every = positions[who]
        together = len(positions) == self.size and all(every.is_with(each) for each in positions.values())
        late = (
            []
            if self._ended
            else [r for r in range(self.size) if not self._is_stuck(positions.get(r), r, waited_s, together, now)]
        )
        # What was lost in a cut is sent again no later than the cut was long.
        if not late and now - self._healed < self.stall_s and waited_s < SLOW * self.stall_s:
            late = [rank for rank in range(self.size) if rank != who]
        if not late:
            what = f"ranks have diverged: no rank has made progress for {waited_s:.0f} s"
            return self._text(what, _DIVERGED, name, now)
        if waited_s > self._told_s:
            self._told_s = 2 * waited_s
            texts = self._positions(name, now)
            self._tell(who, every, waited_s, [(rank, texts[rank]) for rank in late])
        return None

    def _is_stuck(self, position: Position | None, rank: int, waited_s: float, together: bool, now: float) -> bool:
        if position is None:
            heard = self._peers[rank].heard if rank else now
            return min(waited_s, now - heard) > SLOW * self.stall_s
        patience = 0.5 if position.waits_for and not together else SLOW
        return position.still_s > patience * self.stall_s

    def _probe_clients(self, now: float) -> None:
        """Before all ranks have reached this one: watch the hosts that are connected to the store of this process."""
        if self._endpoint is None or all(peer.host for peer in self._peers.values()):
            self._probes = []
        elif not self._probes or all(probe.has_ended for probe in self._probes):
            clients = store_clients(self._endpoint[1])
            self._probes = [Channel(None, self.stall_s, client, is_known=True) for client in clients]
        for probe in self._probes:
            probe.poll(now)

    # Texts ----------------------------------------------------------------------------------------------------------

    def _silences(self, now: float) -> dict[int, float]:
        """Return for how long ranks cannot be reached, of those that cannot be."""
        if self.rank == 0:
            channels = {rank: peer.channel for rank, peer in self._peers.items() if not peer.ended}
        else:
            channels = {rank: self._channel for rank in range(self.size) if rank == 0 or self._is_beside_rank_0(rank)}
        found = {rank: channel.silent_s(now) for rank, channel in channels.items() if channel is not None}
        return {rank: silent_s for rank, silent_s in found.items() if silent_s}

    def _is_beside_rank_0(self, rank: int) -> bool:
        return bool(self._hosts) and self._hosts[rank] == self._hosts[0]

    def unreachable(self, at_least_s: float = 0.0) -> str:
        """Return which hosts have not answered for so long; empty: none is known."""
        now, here = time.perf_counter(), socket.gethostname()
        silences = self._silences(now)
        longest_s = max((*silences.values(), *(probe.silent_s(now) for probe in self._probes), 0.0))
        if longest_s == 0 or longest_s < at_least_s:
            return ""
        by_host: dict[str, list[int]] = {}
        for rank in silences:
            host = (
                self._hosts[rank] if self._hosts else self._peers[rank].host if self.rank == 0 else "the host of rank 0"
            )
            by_host.setdefault(host, []).append(rank)
        hosts = [f"{host} ({ranks_text(ranks)})" for host, ranks in by_host.items()]
        if not hosts and self.rank:
            store = f" at {self._endpoint[0]}:{self._endpoint[1]}" if self._endpoint else ""
            hosts = [f"the host of the process group's store{store}"]
        elif not hosts:
            hosts = [probe.address[0] for probe in self._probes if probe.address and probe.silent_s(now)]
        return f"{', '.join(hosts)} cannot be reached from {here}: no answer for {longest_s:.0f} s"

    def _positions(self, name: str, now: float) -> dict[int, str]:
        """Return the position of each rank in a lane, as text."""
        silences, texts = self._silences(now), {}
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
            elif peer is not None and position is not None and now - peer.heard > max(1.0, 3 * self.tick_s):
                text += f"; no answer for {now - peer.heard:.0f} s"
            texts[rank] = text
        return texts

    def _text(self, what: str, advice: str, name: str, now: float) -> str:
        return explain(what, self._positions(name, now), self._hosts, advice)

    def _tell(self, who: int, at: Position, waited_s: float, late: Iterable[tuple[int, str]]) -> None:
        what = f"in {at.purpose}" if at.purpose else f"for {at.waits_for}"
        for_whom = "; ".join(f"rank {rank}: {text}" for rank, text in late)
        report(f"hf_zero: rank {who} has waited {waited_s:.0f} s {what}, for {for_whom}")

    # Verdicts -------------------------------------------------------------------------------------------------------

    def _decide_alone(self, now: float, blocked_s: float) -> None:
        """End waits of this rank that rank 0 cannot judge."""
        if blocked_s > self.stall_s and (cut := self.unreachable(_SILENT * self.stall_s)):
            self._finish({name: self._text(cut, _NETWORK, name, now) for name in self.lanes})
            return
        for name, lane in self.lanes.items():
            waited_s = lane.waited_s(now)
            silent_s = min(waited_s, now - self._heard)
            if lane.verdict is not None:
                continue
            if 0 in self._ended and waited_s > min(_ENDED_S, self.stall_s):
                self._finish(
                    {
                        name: self._text(
                            f"rank 0 {self._ended[0]}, and this rank waits for {waited_s:.0f} s", _DIVERGED, name, now
                        )
                    }
                )
            elif silent_s > SLOW * self.stall_s:
                self._finish({name: self._text(f"rank 0 has not answered for {silent_s:.0f} s", _SILENCE, name, now)})
            elif silent_s > max(self.stall_s, self._told_s):
                self._told_s = 2 * silent_s
                self._tell(self.rank, lane.position(now), waited_s, [(0, f"no answer for {silent_s:.0f} s")])
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

    def news(self, now: float) -> bool:
        """Return True if this rank knows of one that has ended or cannot be reached."""
        return bool(self._ended or self._silences(now))

    def ended_text(self) -> str:
        return "; ".join(f"rank {rank} {text}" for rank, text in sorted(self._ended.items()))

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # a fork has neither the threads nor a right to the connections
            return
        self._stop.set()
        self.nudge()
        for thread in (self._thread, self._meeting):
            if thread is not threading.current_thread():
                thread.join(10 if thread is self._thread else 1)
        lane = self.lanes.get("")
        error = last_error().partition("\n")[0]
        text = f"has left the job after {lane.steps if lane is not None else 0} steps" + (f": {error}" if error else "")
        if self.rank == 0:
            self._send_all({"ended": {0: text}})
        elif self._channel is not None:
            self._channel.send({"bye": text})
        channels = [self._channel, *self._strangers, *self._probes, *(peer.channel for peer in self._peers.values())]
        for each in (*channels, self._listener, *self._wake):
            if each is not None:
                each.close()


class _Lane:
    """The waits of one thread, over any number of wires.

    Args:
        name: empty for the training loop's.
    """

    def __init__(self, stall: StallWatch, name: str) -> None:
        self.name = name
        self.verdict: str | None = None
        self.steps = 0
        self._stall = stall
        self._watches: tuple[weakref.ref[Watch], ...] = ()
        self._purposes: list[str] = []
        self._state: object = None
        self._moved = time.perf_counter()
        self._torch: tuple[str, int, float] = ("", 0, 0.0)

    def join(self, watch: Watch) -> None:
        self._watches = (*(each for each in self._watches if each() is not None), weakref.ref(watch))
        watch.lane, watch.verdict, watch.purposes = self, self.verdict, self._purposes

    def _open(self) -> list[Watch]:
        return [watch for each in self._watches if (watch := each()) is not None]

    def _current(self) -> tuple[Watch, Wait | None]:
        """Return the watch that waits, else the one that waited last."""
        watches = self._open()
        waiting = [watch for watch in watches if watch.at is not None]
        watch = max(waiting or watches, key=lambda watch: watch.last, default=None) or Watch()
        self.steps = max(self.steps, watch.step)
        return watch, watch.at

    def waited_s(self, now: float) -> float:
        """Return the seconds in the current wait of a wire."""
        _, at = self._current()
        return 0.0 if at is None else now - at.started

    def blocked_s(self, now: float) -> float:
        """Return the seconds in the current wait, torch's own collectives included."""
        return self.waited_s(now) or self._torch_s(now)[1]

    def _torch_s(self, now: float) -> tuple[str, float]:
        call = "" if self.name else torch_wait()
        done = sum(watch.done for watch in self._open())
        if not call or (call, done) != self._torch[:2]:
            self._torch = (call, done, now)
        return call, now - self._torch[2]

    def position(self, now: float, works: bool = False) -> Position:
        """Return where the thread stands.

        Args:
            works: the process has used the processor or a disk since the last call.
        """
        watch, at = self._current()
        waits_for, waited_s = self._torch_s(now) if at is None else ("", now - at.started)
        if at is not None:
            waits_for = _WORDS.get(at.kind, "all ranks").format(watch.units.get(at.tag, "a unit"))
            waits_for += watch.among.get(at.kind, "")
        state = sum(each.done for each in self._open()), at
        if state != self._state or (works and at is None):
            self._state, self._moved = state, now
        return Position(
            step=watch.step,
            phase=watch.phase,
            waits_for=waits_for,
            purpose=self._purposes[-1] if self._purposes else "",
            code=user_code(),
            waited_s=waited_s,
            still_s=waited_s if waits_for else now - self._moved,
            engine=watch.engine,
        )

    def adopt(self, verdict: str) -> None:
        self.verdict = verdict
        for watch in self._open():
            watch.verdict = verdict

    def interrupt(self) -> None:
        """End the waits with an error, whose reason is the verdict."""
        ended = [watch for watch in self._open() if watch.at is not None]
        call, _, since = self._torch
        if not ended and call and time.perf_counter() - since > _ENDED_S:
            report(f"hf_zero: {self.verdict}")  # torch's own error ends the wait, which is one of the user's calls
            ended = self._open()
            self._stall.home_interrupt()
        for watch in ended:
            for interrupt in watch.interrupts:
                interrupt()

    def explain_break(self) -> tuple[str, bool]:
        stall = self._stall
        until = time.perf_counter() + (_NEWS_S if stall.is_on else 0.0)
        while self.verdict is None and not stall.news(now := time.perf_counter()) and now < until:
            stall.nudge()
            time.sleep(0.02)
        now = time.perf_counter()
        if self.verdict is not None:
            return self.verdict, True
        if cut := stall.unreachable():
            return stall._text(cut, _NETWORK, self.name, now), True
        ended = stall.ended_text()
        return (
            f"rank {stall.rank}, {self.position(now)}: the connection to another rank has broken. "
            + (f"{ended}. " if ended else "")
            + _LOST
        ), False


def report(text: str) -> None:
    """Write a line to stderr."""
    with suppress(OSError, ValueError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)


def _resolve(host: str, port: int) -> tuple[str, int]:
    found: Sequence[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    return str(found[0]), int(found[1])
