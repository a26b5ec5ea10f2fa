"""Runs a program on real ranks with the engine, then as the reference, and compares."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.kit.pool import RankFailure, RankPool
from tests.oracle import Program, Run, compare, fresh_folder, train
from tests.random.draw import KINDS, simpler
from tests.random.user import Call, Case, User
from tests.settings import Setting

LOOSE = {"fp32": 1.0, "bf16": 2.0}
"""Factor on the oracle's tolerances. A weight used several times is rounded to bf16 by each read, in other places than under
autocast; a dozen steps add that up."""


ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-9}
"""What one rounding changes, at most, as a share."""


def play(case: Case, run: Run, nudge: float = 0.0) -> None:
    """Run all calls, then look at everything on every rank."""
    user = User(case, run, nudge)
    for place, call in enumerate(case.parsed, 1):
        user.begin(place, call)
        KINDS[call.kind](user)
    user.begin(len(case.parsed) + 1, Call("end", 0))
    user.evaluate()
    with run.gathered([*user.model.parameters()]):
        user.see("weights", *user.params().values())
    if user.engine is not None:
        user.engine.wait_for_save()


def on_rank(rank: int, world: int, case: Case, reference: Case, folder: str, limit_s: float) -> list[str]:
    """Return what differs. Nothing does where plain training differs as much from itself after one more rounding."""
    warnings.simplefilter("ignore")
    program, plain, nudged = (
        Program("random", functools.partial(play, each, nudge=nudge), "average", loose=LOOSE[case.setting.precision])
        for each, nudge in ((case, 0.0), (reference, 0.0), (reference, ROUNDING[case.setting.precision]))
    )
    # Not `faulthandler.dump_traceback_later`: it reads the frames of a thread that runs, and has crashed processes.
    late = threading.Timer(max(1.0, limit_s - 2.0), write_stacks, [Path(folder) / f"stack{rank}"])
    late.start()
    try:
        ours = train(program, case.setting, rank, world, f"{folder}/engine", False)
        setting = Setting(ranks=world, precision=case.setting.precision)
        theirs = train(plain, setting, rank, world, f"{folder}/plain", True)
        wrong = compare(program, case.setting, ours, theirs)
        if any(everyone(len(wrong), world)):
            beside = train(nudged, setting, rank, world, f"{folder}/nudged", True)
            wrong = [] if any(everyone(len(compare(program, case.setting, beside, theirs)), world)) else wrong
    finally:
        late.cancel()
    return wrong


def everyone(mine: int, world: int) -> list[int]:
    """The numbers of all ranks."""
    found = [mine] * world
    if world > 1:
        dist.all_gather_object(found, mine)
    return found


def write_stacks(path: Path) -> None:
    """Write where each thread of this process is."""
    stacks = (traceback.format_stack(frame) for frame in sys._current_frames().values())
    path.write_text("\n".join("".join(lines) for lines in stacks))


def nothing(rank: int, world: int) -> None:
    """Let a pool start."""


@dataclass(frozen=True)
class Failure:
    """What went wrong with a case.

    Attributes:
        sort: Hang, Crash, Mismatch, or the name of the exception; prefixed with "Reference" if it is not the engine's.
    """

    case: Case
    sort: str
    text: str

    def __str__(self) -> str:
        lines = [f"{self.sort}: {self.text}", "Program:", f"  {self.case.arch}", f"  {self.case.setting}"]
        for at, call in enumerate(self.case.parsed, 1):
            lines.append(f"  {at:2} {call.kind:24} {(KINDS[call.kind].__doc__ or '').partition(chr(10))[0]}".rstrip())
        return "\n".join([*lines, "Run it again:", f'  python -m tests.random --case "{self.case}"'])


class Checker:
    """Runs cases on pools of ranks that stay up; only a case that stops its ranks costs a pool."""

    def __init__(self, pools: dict[int, RankPool] | None = None, limit_s: float = 30.0) -> None:
        self.limit_s = limit_s
        self._pools = pools or {world: RankPool(world) for world in (1, 2, 3, 4)}

    def check(self, case: Case, reference: Case | None = None) -> Failure | None:
        """Compare a case with plain data parallel training; `reference`: train another case there."""
        pool = self._pools[case.setting.ranks]
        with fresh_folder() as folder:
            try:
                pool.run(nothing)  # the start of a pool is no part of the case's time
                answers = pool.run(on_rank, case, reference or case, folder, self.limit_s, timeout_s=self.limit_s)
            except RankFailure as failure:
                return self._stopped(case, str(failure), folder)
        lines = [f"rank {rank}, {line}" for rank, wrong in enumerate(answers) for line in wrong[:5]]
        return Failure(case, "Mismatch", "\n".join(lines)) if lines else None

    @staticmethod
    def _stopped(case: Case, text: str, folder: str) -> Failure:
        places = [f"rank {path.name[4:]} was at: {path.read_text()}" for path in sorted(Path(folder).glob("rank*"))]
        stacks = [path.read_text() for path in sorted(Path(folder).glob("stack*"))]
        first = text.partition("--- rank")[2].partition("\n--- rank")[0]
        error = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|Interrupt))\b", first, re.MULTILINE)
        sorts = {"died with exit code": "Crash", "no answer within": "Hang", "": (error or ["Error"])[-1]}
        sort = next(sort for words, sort in sorts.items() if words in first)
        side = "Reference" if any("at: reference" in place for place in places) else ""
        return Failure(case, side + sort, "\n".join([*places, text, *stacks]))

    def shrink(self, failure: Failure, seconds: float) -> Failure:
        """Return the smallest case found that fails the same way."""
        until, tried = time.monotonic() + seconds, {failure.case}
        while True:
            for case in simpler(failure.case):
                if time.monotonic() > until:
                    return failure
                if case not in tried:
                    tried.add(case)
                    found = self.check(case)
                    if found is not None and found.sort == failure.sort:
                        failure = found
                        break
            else:
                return failure

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stop()
