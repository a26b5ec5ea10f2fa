"""What comes and goes in the passes of a step, played through on byte counts: no tensor, no process group.

`schedule` says when a unit moves, and `unit` and `flat_param` what a move allocates; here in integers, for one rank.
Every moment at which memory is taken is looked at: the highest are a real step's, and no sums of what is never there together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..core.layout import Visit
from ..tiers.pool import KEPT_BUFFERS

STEPS = 5
"""Steps that are played where the host lends buffers: what a step leaves is there for the next, until that is the same."""


@dataclass(frozen=True, slots=True)
class SpanBytes:
    """One trained span's gradients."""

    fresh: int
    """As backward leaves them."""
    bucket: int
    """The copy of them that is sent; 0 where they are sent as they are, or are copied to where they rest."""
    mean: int
    """This rank's slice as it comes back; 0 alone."""
    kept: int
    """At rest on the device."""
    is_kept: bool
    """The mean (alone: the copy) is itself what rests."""
    held: int
    """The copy that adds up on this rank between backwards; 0 where fresh gradients do."""
    sent: int
    """What of it is sent: less, where gradients travel in a narrower type than they add up in."""
    down: tuple[int, ...]
    """What goes down to host memory, one count per shard."""
    lands: bool
    """It is added there through a landing buffer also where it is the step's first, being of another type."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    full: int
    """Gathered, of spans that come and go."""
    reads: tuple[tuple[int, ...], ...] = ()
    """By span that rests on disk: the host buffer that it is read to, and a second one where it is cast."""
    spans: tuple[SpanBytes, ...] = ()
    tied: int = 0
    """What is there beside fresh gradients when autograd adds up those of parameters that an embedding and a head have."""
    is_trained: bool = False


@dataclass(slots=True)
class High:
    """The highest of each. `scratch` is host memory."""

    gathered: int = 0
    communication: int = 0
    gradients: int = 0
    passing: int = 0
    """Of one moment: gathered and communication."""
    device: int = 0
    """Of one moment: all three."""
    scratch: int = 0
    later_scratch: int = 0
    """Without the first step, which finds no buffers and has no optimizer state beside it."""
    resting_scratch: int = 0
    """Between the last backward and the step, in the end."""
    gathers: list[int] = field(default_factory=list)
    """How often a pass, forward and backward, brings each unit in."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a stage on so many ranks goes about it."""

    frees: bool
    """Units are gathered before each use and released after it."""
    defers: bool
    """Gradients are sent with the last backward of a step only."""
    alone: bool
    consumes: bool
    """Gradients are stepped as they come, and their host memory is lent out again."""
    backwards: int


class _Pool:
    """Host buffers that are lent, as `storage.Storage` does it."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.nbytes = 0
        """Lent or free."""

    def lend(self, nbytes: int) -> int:
        fitting = min((size for size in self.free if size >= nbytes), default=None)
        if fitting is None:
            self.nbytes += nbytes
            return nbytes
        self.free.remove(fitting)
        return fitting

    def give_back(self, size: int) -> None:
        self.free = sorted([size, *self.free], reverse=True)
        self.nbytes -= sum(self.free[KEPT_BUFFERS:])
        del self.free[KEPT_BUFFERS:]


def play(visits: Sequence[Visit], units: Sequence[UnitBytes], manner: Manner) -> High:
    """Play the passes of a step and look at every moment."""
    player = _Player(visits, units, manner)
    lends = any(unit.reads or any(span.down for span in unit.spans) for unit in units)
    before: object = None
    for _ in range(STEPS if lends else 2):
        player.step()
        if (left := player.left()) == before:
            break  # the next one would be the same again
        before = left
    return player.high


class _Player:
    def __init__(self, visits: Sequence[Visit], units: Sequence[UnitBytes], manner: Manner) -> None:
        self.units, self.manner = units, manner
        self.high = High()
        self._pool = _Pool()
        self._landing: int | None = None
        self._forward = list(_forward(visits))
        flat = [visit for visit, enters in self._forward if enters]
        reached, late = set(), set()
        has_trained = False
        for visit in flat:
            is_open = visit.is_embedding or not has_trained
            has_trained = has_trained or units[visit.unit].is_trained
            if is_open and has_trained:
                late.add(visit.unit)
            if has_trained and not visit.is_embedding:
                reached.add(id(visit))
        self._late = late
        self._open = {id(visit) for visit in flat if visit.unit in late and self._is_open(visit, flat)}
        self._backward = list(_backward(visits, reached))
        self._expected = [0] * len(units)
        for visit in flat:
            self._expected[visit.unit] += 1
        self._first, self._latest = self._times()
        used = [unit for unit in range(len(units)) if self._first[unit]]
        self._turns = sorted(used, key=lambda unit: -self._first[unit])  # of reduces
        self._walk = sorted(used, key=lambda unit: -self._latest[unit])  # of gathers
        self._steps_of = {unit: step for step, unit in enumerate(self._walk)}
        seen_whole = {visit.unit for visit in flat if not visit.is_embedding}
        self._weightless = [unit not in seen_whole for unit in range(len(units))]
        self._joins = {visit.unit for visit in flat if id(visit) in reached}
        self._turn = self._walked = 0
        self._arrived: set[int] = set()  # units that were gathered for this backward
        self._made: set[int] = set()  # units whose fresh gradients have been there, in this backward
        self._gone: set[int] = set()  # and are sent
        self._order: list[int] = []  # of the last pass
        self._order_back: list[int] = []
        self._steps = 0
        self._passes = 0
        self._embedded = [v.unit for v in reversed(flat) if v.is_embedding and units[v.unit].is_trained]
        self._state = ["away"] * len(units)
        self._lent: dict[int, list[tuple[int, ...]]] = {}
        self._full = self._moving = self._kept = self._held = self._fresh = 0
        self._has_kept = [False] * len(units)  # of this step
        self._is_held = [False] * len(units)
        self._sending: int | None = None
        self._stepping: list[list[int]] = []

    def _times(self) -> tuple[list[int], list[int]]:
        """By unit, when its use in a pass begins, and when it ends. 0: it has none."""
        first, latest = [0] * len(self.units), [0] * len(self.units)
        for clock, (visit, enters) in enumerate(self._forward, 1):
            first[visit.unit] = first[visit.unit] or clock
            if not enters:
                latest[visit.unit] = clock
        return first, latest

    def _is_open(self, visit: Visit, flat: Sequence[Visit]) -> bool:
        """Its inputs need no gradient: no hook shows where its backward ends."""
        if visit.is_embedding:
            return True
        before = flat[: next(place for place, other in enumerate(flat) if other is visit)]
        return not any(self.units[other.unit].is_trained for other in before)

    # A step -----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        for index in range(min(2, self.manner.backwards)):
            self.high.gathers = [0] * len(self.units)
            self._is_last = index == min(2, self.manner.backwards) - 1
            self._pass_forward()
            self._pass_backward()
        self.high.resting_scratch = self._pool.nbytes
        self._land(None)
        self._steps += 1
        self._kept = 0
        self._has_kept = [False] * len(self.units)
        while self._stepping:
            for size in self._stepping.pop(0):
                self._pool.give_back(size)

    def left(self) -> object:
        """What a step leaves to the next one."""
        return self._steps > 1, tuple(self._pool.free), self._pool.nbytes, tuple(self._order), tuple(self._order_back)

    def _pass_forward(self) -> None:
        if not self.manner.frees:
            return
        seen = [0] * len(self.units)
        tail: int | None = None
        needs = _Needs(self._order)
        for visit, enters in self._forward:
            unit = visit.unit
            if enters:
                if tail is not None and tail != unit:
                    self._release(tail)
                    tail = None
                self._need(unit, needs)
                continue
            seen[unit] += 1
            if seen[unit] >= self._expected[unit]:
                tail = unit
        for unit in range(len(self.units)):
            if unit != tail:
                self._release(unit)
        self._order = needs.now

    def _pass_backward(self) -> None:
        needs = _Needs(self._order_back)
        left = [0] * len(self.units)
        self._turn = self._walked = 0
        self._arrived = {unit for unit, state in enumerate(self._state) if state != "away"}
        self._made.clear()
        self._gone.clear()
        for what, visit in self._backward:
            if what == "done" and id(visit) not in self._open:
                left[visit.unit] += 1
        for what, visit in self._backward:
            unit = visit.unit
            if what == "pre":
                if self.manner.frees:
                    self._need_in_backward(unit, needs)
            elif what == "done":
                is_over = left[unit] == 1 and id(visit) not in self._open
                if is_over or unit in self._late:
                    # Of a tied unit, the other use's gradient waits within autograd for the embedding's.
                    self._make(unit)
            elif id(visit) not in self._open:
                left[unit] -= 1
                if left[unit] == 0:
                    self._release(unit)
                    if unit not in self._late:
                        self._pass_by(unit)
        for unit in self._embedded:
            if unit in self._made and unit not in self._gone:
                self._mark(0 if self._is_held[unit] else self.units[unit].tied)
            self._make(unit)
        self._order_back = needs.now
        self._passes += 1
        for unit in range(len(self.units)):
            self._release(unit)
        rest = [] if self.manner.alone else [*self._turns]
        for unit in (*rest, *reversed(range(len(self.units)))):
            self._make(unit)
            self._go(unit)
        if self._sending is not None:
            self._finish(self._sending)
        self._sending = None

    def _make(self, unit: int) -> None:
        if self.units[unit].is_trained and unit not in self._made:
            self._made.add(unit)
            self._fresh += self._fresh_of(unit)
            self._mark()

    def _go(self, unit: int) -> None:
        """Its gradients are complete."""
        if self.units[unit].is_trained and unit not in self._gone:
            self._gone.add(unit)
            self._ready(unit)

    def _pass_by(self, unit: int) -> None:
        """Backward has come to where it was first used."""
        if self.manner.alone or (self.manner.defers and not self._is_last):
            self._go(unit)
            return
        self._leave_used_after(self._first[unit] - 1)

    def _leave_used_after(self, clock: int) -> None:
        """In turn, units that are used after that only: released, their gradients sent."""
        while self._turn < len(self._turns):
            unit = self._turns[self._turn]
            if self._first[unit] <= clock:
                break
            self._turn += 1
            self._release(unit)
            self._make(unit)
            self._go(unit)

    # Parameters -------------------------------------------------------------------------------------------------------

    def _need(self, unit: int, needs: _Needs) -> None:
        following = needs.note(unit)
        self._gather(unit)
        if following is not None:
            self._gather(following)
        self._wait(unit)

    def _need_in_backward(self, unit: int, needs: _Needs) -> None:
        following = needs.note(unit)
        if unit in self._joins:
            self._walked = max(self._walked, self._steps_of[unit] + 1)
            following = self._next_in_walk(following)
        if self.units[unit].reads:
            self._wait(unit)
        self._leave_used_after(self._latest[unit])
        self._arrived.add(unit)
        self._gather(unit)
        if following is not None:
            self._gather(following)
        self._wait(unit)

    def _next_in_walk(self, otherwise: int | None) -> int | None:
        """What all ranks gather next in this backward."""
        for step in range(self._walked, len(self._walk)):
            unit = self._walk[step]
            if unit not in self._arrived and not self._weightless[unit]:
                return unit if unit in self._joins else otherwise
        return otherwise

    def _gather(self, unit: int) -> None:
        if self._state[unit] != "away":
            return
        self._state[unit] = "coming"
        self.high.gathers[unit] += 1
        self._full += self.units[unit].full
        # Each span's first buffer; where it is cast, the second comes when the first is filled.
        self._lent[unit] = [(self._pool.lend(sizes[0]), *sizes[1:]) for sizes in self.units[unit].reads]
        self._mark()

    def _wait(self, unit: int) -> None:
        if self._state[unit] != "coming":
            return
        for buffer, *cast in self._lent.pop(unit):
            if cast:
                second = self._pool.lend(cast[0])
                self._mark()
                self._pool.give_back(buffer)
                buffer = second
            self._pool.give_back(buffer)
        self._state[unit] = "there"

    def _release(self, unit: int) -> None:
        if self._state[unit] == "away":
            return
        self._wait(unit)
        self._full -= self.units[unit].full
        self._state[unit] = "away"

    # Gradients --------------------------------------------------------------------------------------------------------

    def _fresh_of(self, unit: int) -> int:
        # Where gradients of an earlier backward wait uncopied, autograd adds each to the one that is there.
        return sum(span.fresh for span in self.units[unit].spans if span.held or not self._is_held[unit])

    def _ready(self, unit: int) -> None:
        if self.manner.defers and not self._is_last:
            self._hold(unit)
            return
        previous, self._sending = self._sending, unit
        if previous is not None:
            self._finish(previous)
        if self.manner.alone:
            self._add(unit)
        else:
            self._send(unit)

    def _hold(self, unit: int) -> None:
        for span in self.units[unit].spans:
            if not self._is_held[unit]:
                self._held += span.held or span.fresh
            if span.held:
                self._mark()
            self._fresh -= span.fresh
        self._is_held[unit] = True
        self._mark()

    def _send(self, unit: int) -> None:
        was_held, self._is_held[unit] = self._is_held[unit], False
        for span in self.units[unit].spans:
            if was_held:  # into the copy that is there, or into one that is made now
                self._held -= span.held or span.fresh
                self._moving += span.sent or span.bucket or span.fresh
                narrowed = span.held if span.held != span.sent else 0
                self._mark(narrowed if span.held or not span.bucket else span.fresh)
                self._fresh -= span.fresh if span.held else 0
            else:
                self._moving += span.bucket
                self._mark()
                self._fresh -= span.fresh
                self._moving += 0 if span.bucket else span.fresh
            self._moving += span.mean
            self._mark()

    def _finish(self, unit: int) -> None:
        if self.manner.alone:
            return
        first = not self._has_kept[unit]
        self._has_kept[unit] = True
        means = 0
        landed: list[int] = []
        for span in self.units[unit].spans:
            if first:
                self._kept += span.kept
            if first and span.is_kept:
                self._moving -= span.mean
            else:
                means += span.mean
            self._go_down(span, first, landed)
            self._mark()
            self._moving -= span.bucket or span.sent or span.fresh
        self._moving -= means
        self._let_step(landed)

    def _add(self, unit: int) -> None:
        """Alone: where they rest, through a copy in their own type where that is not all on the device."""
        first = not self._has_kept[unit]
        self._has_kept[unit] = True
        landed: list[int] = []
        for span in self.units[unit].spans:
            self._moving += span.bucket
            if first:
                self._kept += span.kept
            self._go_down(span, first, landed)
            self._mark()
            self._moving -= span.bucket
            self._fresh -= span.fresh
        self._let_step(landed)

    def _go_down(self, span: SpanBytes, first: bool, landed: list[int]) -> None:
        for nbytes in span.down:
            if self.manner.consumes:
                landed.append(self._pool.lend(nbytes))
            elif (span.lands and self._passes) or not first:
                self._land(self._pool.lend(nbytes))
            self._mark()

    def _land(self, buffer: int | None) -> None:
        """The one before is added now."""
        before, self._landing = self._landing, buffer
        self._mark()
        if before is not None:
            self._pool.give_back(before)

    def _let_step(self, landed: list[int]) -> None:
        """The unit's gradients are taken once those of the unit before are used up.

        Those are counted on, as if none of their memory could serve again yet: how far the thread is nobody knows.
        """
        self._stepping.append(landed)
        while len(self._stepping) > 2:
            for size in self._stepping.pop(0):
                self._pool.give_back(size)

    # Looking ----------------------------------------------------------------------------------------------------------

    def _mark(self, extra: int = 0) -> None:
        high = self.high
        communication = self._moving + self._fresh + extra
        gradients = self._kept + self._held
        passing = self._full + communication
        if self._full > high.gathered:
            high.gathered = self._full
        if communication > high.communication:
            high.communication = communication
        if gradients > high.gradients:
            high.gradients = gradients
        if passing > high.passing:
            high.passing = passing
        if passing + gradients > high.device:
            high.device = passing + gradients
        scratch = self._pool.nbytes
        if scratch > high.scratch:
            high.scratch = scratch
        if self._steps and scratch > high.later_scratch:
            high.later_scratch = scratch


class _Needs:
    """The unit that came next, the last time: `schedule.Order`."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self.now: list[int] = []

    def note(self, unit: int) -> int | None:
        if not self.now or self.now[-1] != unit:
            self.now.append(unit)
        place = len(self.now)
        return self._order[place] if place < len(self._order) and self._order[place - 1] == unit else None


def _forward(visits: Sequence[Visit]) -> Iterator[tuple[Visit, bool]]:
    """Entries (True) and exits of forwards."""
    for visit in visits:
        yield visit, True
        yield from _forward(visit.inner)
        yield visit, False


def _backward(visits: Sequence[Visit], reached: set[int]) -> Iterator[tuple[str, Visit]]:
    """`pre`: before the first operation of a visit's backward. `done`: after its last. `post`: it may be released.

    Where one visit's input is the output of another, that one's `pre` comes first.
    """
    chain = [visit for visit in reversed(visits) if id(visit) in reached or visit.inner]
    began: set[int] = set()
    for place, visit in enumerate(chain):
        is_needed = id(visit) in reached
        if is_needed and id(visit) not in began:
            yield "pre", visit
        yield from _backward(visit.inner, reached)
        if not is_needed:
            continue
        yield "done", visit
        following = chain[place + 1] if place + 1 < len(chain) else None
        if visit.follows and following is not None and id(following) in reached:
            began.add(id(following))
            yield "pre", following
        yield "post", visit
