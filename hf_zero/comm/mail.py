"""Exchange positions and verdicts of ranks through the process group's store.

One thread makes all calls of the store. Other threads wait for it with a limit: a store behind a cut link never answers.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, Protocol

from .links import Card
from .position import Position, Work

FIRST_S = 0.1
"""Time between rounds until all ranks have published their cards."""
_ASK_S = 1.0
"""Time that an error waits for the positions of other ranks."""


class Box:
    """Contents of the store for one lane, as of the last round.

    Attributes:
        posted: the verdict.
        positions: of all ranks, by rank.
        fetched: when that round began; 0: never.
        proposal: a verdict to post, if there is none.
    """

    def __init__(self) -> None:
        self.posted: str | None = None
        self.positions: list[Position | None] = []
        self.fetched = 0.0
        self.proposal: str | None = None


class Correspondent(Protocol):
    """A lane of `watch`."""

    name: str
    box: Box

    def asks(self) -> bool:
        """Return True if this rank has waited long enough to ask for positions."""

    def answer(self, work: Work) -> Position: ...

    def position(self, *, ended: bool = False) -> Position: ...


class Mail:
    """The thread that talks to the store, over a connection of its own.

    Args:
        store: the process group's.
        prefix: of keys in the store.
        lanes: returns the existing lanes.
        tick_s: returns the seconds between two rounds; 0: waits are not watched.

    Attributes:
        opened: set once the store has answered the first calls, or refused them.
        fault: why this rank, or another, cannot be watched.
        answered: start of the last round that the store has answered.
        cards: of all ranks, by rank; empty: not all are known yet.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        lanes: Callable[[], Sequence[Correspondent]],
        tick_s: Callable[[], float],
    ) -> None:
        self.rank, self.size, self.prefix = rank, size, prefix
        self.asked = 0
        self.fault: str | None = None
        self.answered = time.perf_counter()
        self.cards: list[Card] = []
        self.card: Card | None = None
        self._given = store
        self._store: Any = None
        self._lanes, self._tick_s = lanes, tick_s
        self.opened, self._stop, self._wake = Event(), Event(), Event()
        self._is_wanted = False
        self._carded = ""
        self._thread = threading.Thread(target=self._run, name="hf_zero mail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def adopt(self, prefix: str) -> None:
        """Use rank 0's prefix from now on."""
        if prefix != self.prefix:
            self.prefix, self.asked = prefix, 0

    def fresh(self) -> None:
        """Wait for a round that began after this call, for at most a second."""
        until = (now := time.perf_counter()) + _ASK_S
        while self.answered <= now and self._thread.is_alive() and time.perf_counter() < until:
            self._is_wanted = True
            self._wake.set()
            time.sleep(0.01)

    def close(self, within_s: float) -> None:
        """Post verdicts and end the thread. Without an answer within `within_s`, close its connection."""
        self._stop.set()
        self._wake.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join(within_s)
        if self._thread.is_alive():
            # The call must return before Python ends, or its return would abort the process (SIGABRT).
            _shut(self._store or self._given)
            self._thread.join(1)

    def _key(self, *names: object) -> str:
        return "/".join((self.prefix, *(str(name) for name in names)))

    # In the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # A store may outlive a process group, and then has keys of an earlier one.
            self.prefix = f"{self.prefix}/{self._given.add(f'{self.prefix}/{self.rank}', 1)}"
            self._store = self._given.clone()
            self.answered = time.perf_counter()
        except RuntimeError as error:  # a file that may not grow, a server that takes no more connections
            self.fault = f"rank {self.rank}: {error}"
            return
        finally:
            self.opened.set()
        while not self._stop.is_set():
            tick_s = self._tick_s()
            self._wake.wait(tick_s if self.cards and tick_s else min(tick_s or FIRST_S, FIRST_S))
            self._wake.clear()
            try:
                if tick_s:
                    self._round()
            except RuntimeError:  # the store is gone with its process
                return
            except (
                Exception
            ):  # such as no descriptors; must continue: without this thread the rank would seem to have ended
                continue
        with suppress(RuntimeError):
            self._post()
            for lane in self._lanes():
                self._publish(lane, lane.position(ended=True))

    def _round(self) -> None:
        began, store, lanes = time.perf_counter(), self._store, self._lanes()
        if self._carded != self.prefix or not self.cards:
            self._exchange_cards()
        key, asked = self._key("asks"), self.asked
        if any(lane.asks() for lane in lanes):
            asked = store.add(key, 1)
        elif store.check([key]):  # a rank that does not ask writes nothing: a store that is a file would grow
            asked = int(store.get(key))
        is_new, self.asked = asked != self.asked, asked
        is_wanted, self._is_wanted = self._is_wanted, False
        if is_new or is_wanted:
            work = Work.now()
            for lane in lanes:
                lane.box.posted = self._posted(lane)
                if is_new and lane.box.posted is None:
                    self._publish(lane, lane.answer(work))
                if is_wanted or lane.asks():
                    lane.box.positions, lane.box.fetched = self._positions(lane), began
        self._post()
        self.answered = began

    def _post(self) -> None:
        """Post verdicts. If two ranks reach different ones at once, the first that is posted holds for all."""
        for lane in self._lanes():
            if lane.box.proposal is not None and lane.box.posted is None:
                key = self._key(lane.name, "verdict")
                lane.box.posted = self._store.compare_set(key, "", lane.box.proposal).decode()

    def _exchange_cards(self) -> None:
        if self._carded != self.prefix and self.card is not None:
            self._store.set(self._key("card", self.rank), self.card.to_json())
            self._carded = self.prefix
        keys = [self._key("card", rank) for rank in range(self.size)]
        if self._store.check(keys):
            self.cards = [Card.of_json(text) for text in self._store.multi_get(keys)]

    def _publish(self, lane: Correspondent, position: Position) -> None:
        self._store.set(self._key(lane.name, self.rank), position.to_json())

    def _posted(self, lane: Correspondent) -> str | None:
        key = self._key(lane.name, "verdict")
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _positions(self, lane: Correspondent) -> list[Position | None]:
        keys, store = [self._key(lane.name, rank) for rank in range(self.size)], self._store
        if store.check(keys):
            return [Position.of_json(text) for text in store.multi_get(keys)]
        return [Position.of_json(store.get(key)) if store.check([key]) else None for key in keys]


def server_of(store: Any) -> Any:
    """Return the store under the prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _shut(store: Any) -> None:
    """Close the connection of a TCPStore from another thread. torch offers no call for it, but shows the descriptor."""
    found = re.search(r"client=\w*\(SocketImpl\(fd=(\d+)", repr(server_of(store)))
    if found is not None:
        with suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as connection:
            connection.shutdown(socket.SHUT_RDWR)
