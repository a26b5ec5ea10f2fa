"""The table of faults: operation x system call x rank x kind. A named error on every rank, nothing lost, no silent wait."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero as zero
from tests.faults.faults import ANY, CALLS, faults
from tests.faults.operations import IN_MEMORY, OPERATIONS, TAIL, Job, Operation, refusal
from tests.kit.common import holders
from tests.kit.injection import Forked
from tests.kit.pool import RankPool
from tests.settings import Setting

pytestmark = pytest.mark.gloo
EVERY = {**OPERATIONS, **IN_MEMORY}


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: the sweeps make thousands of fsyncs."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def small() -> Iterator[RankPool]:
    """One rank without transformers: a fork takes as long as the process is large."""
    pool = RankPool(1, executed=True)
    yield pool
    pool.stop()


# A call fails ---------------------------------------------------------------------------------------------------------

NEEDED = ("read", "write", "allocate")
"""Without these no operation can be whole. Others clear up, or there is another path."""


def failing(rank: int, world: int, place: Path, name: str, victim: int) -> int:
    """Each class of call of one rank fails, at the first and at a late one. Return the number of trials."""
    operation, trials = OPERATIONS[name], 0
    job = Job(rank, world, place, operation.setting)
    job.make_templates()
    for call, names in CALLS.items():
        job.load(place / "new")
        job.restore_target(operation.start)
        with faults(place, names) as log:
            operation.act(job)
        count = len(job.everyone(log)[victim])
        for at in sorted({0, (count - 1) * 9 // 10}) if count else ():
            for kind in ("error", "ends") if call == "read" else ("error",):
                trial(job, name, call, at, kind, victim)
                trials += 1
    job.load(place / "new")
    job.restore_target(operation.start)
    with faults(place, CALLS["read"] + CALLS["write"], None, "short"):
        operation.act(job)
    check_after(job, name, None, "short transfers")
    job.engine.detach()
    return trials


def trial(job: Job, name: str, call: str, at: int, kind: str, victim: int) -> None:
    operation, what = OPERATIONS[name], f"{name}: {kind} at {call} {at} of rank {victim}"
    job.load(job.place / "new")
    job.restore_target(operation.start)
    error: zero.ZeroError | None = None
    fault = faults(job.place, CALLS[call], at, kind) if job.rank == victim else nullcontext([])
    with fault as log:
        try:
            operation.act(job)
        except zero.ZeroError as raised:  # any other exception fails the test
            error = raised
    errors = job.everyone(None if error is None else f"{type(error).__name__}: {error}")
    _, path = (job.everyone(log)[victim] + [("", "")] * (at + 1))[at]
    hit = f"{what} ({path}): {errors}"
    assert path, f"{what}: there was no such call"
    if operation.alone:
        assert all(each is None for rank, each in enumerate(errors) if rank != victim), hit
    else:
        assert len({each is None for each in errors}) == 1, hit
    if errors[victim] is None:
        assert call not in NEEDED, hit
    else:
        file = path.split("/")[-1] if "(deleted)" not in path else "disk tier of rank"
        assert str(job.place) in errors[victim] or file in errors[victim], hit
        for rank, each in enumerate(errors):
            assert rank == victim or operation.alone or victim == 0 or f"rank {victim}" in each, hit
    if operation.trains and error is not None:
        half_done = refusal(lambda: job.step(TAIL[0]))
        assert not half_done or "half-way" in refusal(job.model.state_dict), hit
        assert (refusal(lambda: job.save(job.place / "must not be")) == "") == (half_done == ""), hit
        shutil.rmtree(job.place / "must not be", ignore_errors=True) if not half_done and job.rank == 0 else None
        assert half_done == "" or not (job.place / "must not be").exists()
    check_after(job, name, errors[victim], hit)


def check_after(job: Job, name: str, error: str | None, hit: str) -> None:
    """Nothing is lost: the checkpoints are whole, and training goes on from them to the same numbers."""
    operation = EVERY[name]
    job.everyone(None)
    if operation.makes is not None:
        assert job.version(job.target) in versions_after(operation, error), hit
        if operation.start != NEW:
            assert (job.target / "runs" / "notes.txt").read_text() == "mine", hit
        job.load(job.place / "new")
        job.save(job.target)
        assert job.version(job.target) == "new", hit
        job.everyone(None)
        assert not job.left_overs(), hit
    for template in ("old", "new"):
        zero.verify(job.place / template)
    assert job.version(job.place / "new") == "new", hit
    if operation.trains:
        assert [job.step(step) for step in TAIL] == job.tail, hit
    job.everyone(None)


def versions_after(operation: Operation, error: str | None) -> set[str | None]:
    """Return what may be at the target: after an error the old checkpoint, or one that loads reject."""
    before = "old" if operation.start == "old" else None
    if error is None:
        return {operation.makes}
    if error == KILLED:
        return {before, operation.makes, *(() if operation.start == NEW else ("rejected",))}
    if "files of the old and of the new save" in error:
        return {None, "rejected"}
    if "new files are complete" in error:
        return {operation.makes}
    return {before, *((operation.makes,) if operation.start == NEW else ())}


KILLED = "killed"
NEW = "nothing"
"""What is at the target before a save that appears by one rename."""
LIKE_OTHERS = {
    0: ("save", "save beside", "save behind", "save apart", "verify", "export", "step", "step, stage 1"),
    1: ("save", "save beside"),
}
"""By rank: it meets the same calls as in another operation."""


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        pytest.param(name, victim, marks=[pytest.mark.wide] if name in LIKE_OTHERS[victim] else [])
        for name in OPERATIONS
        for victim in (0, 1)
    ],
)
def test_a_call_that_fails_is_an_error_on_every_rank(name: str, victim: int, two: RankPool, fast: Path) -> None:
    trials = two.run(failing, fast, name, victim, timeout_s=250)
    assert trials[0] == trials[1] >= 1


# A rank is killed or stopped --------------------------------------------------------------------------------------------


def killed_alone(rank: int, world: int, place: Path, name: str, tier: str, stride: int) -> None:
    """A fork is killed at every `stride`th call of any class."""
    job = Job(rank, world, place, Setting(1, 3, tier))
    job.make_templates()
    operation = OPERATIONS[name]
    before = "old" if operation.start == "old" else None
    order = [before, "rejected", "new"]
    seen: list[str | None] = []
    for at in range(0, 10_000, stride):
        job.load(place / "new")
        job.restore_target(operation.start)

        def act(at: int = at) -> None:
            with faults(place, ANY, at, "kill"):
                operation.act(job)

        status, _ = Forked(act).wait()
        assert status in (0, -signal.SIGKILL), (name, at)
        seen.append(job.version(job.target) if operation.makes else "new")
        check_after(job, name, None if seen[-1] == "new" else KILLED, f"{name}: killed at call {at}")
        if status == 0:
            break
    else:
        raise AssertionError("it never ended")
    assert len(seen) > 8
    assert set(seen) - {"rejected"} == ({before, "new"} if operation.makes else {"new"})
    assert "rejected" not in seen or operation.start != NEW, "a new folder appears by one rename"
    assert seen == sorted(seen, key=order.index), "the old checkpoint, files of both, the new one"


@pytest.mark.parametrize(
    ("name", "tier", "stride"),
    [
        pytest.param("save over", "none", 1, marks=pytest.mark.wide),
        ("save", "none", 2),
        pytest.param("save beside", "none", 2, marks=pytest.mark.wide),
        pytest.param("save behind", "disk", 3, marks=pytest.mark.wide),
        ("export", "none", 3),
        ("load", "disk/disk", 5),
    ],
)
def test_killed_at_any_call(name: str, tier: str, stride: int, small: RankPool, fast: Path) -> None:
    small.run(killed_alone, fast, name, tier, stride, timeout_s=250)


def member(
    rank: int, place: Path, store: Path, known: Job, name: str, at: dict[int, int], kind: str
) -> tuple[str, int]:
    """One of two ranks that acts, meets its fault, and tells its error."""
    signal.alarm(90)  # a rank that waits for ever is a failure
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    operation = EVERY[name]
    job = Job(rank, 2, place, operation.setting, stall_s=0.2 if kind == "stop" else 20.0)
    job.know(known)
    job.load(place / "new")
    if name in IN_MEMORY and rank in at:  # it makes no call on a file

        def end(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL) if kind == "kill" else os._exit(9)

        job.model[2].register_forward_pre_hook(end) if at[rank] == 0 else job.optimizer.register_step_pre_hook(end)
    error = ""
    with faults(place, ANY, at.get(rank, -1), kind) as log:
        try:
            operation.act(job)
            job.engine.exchange(None)
        except (zero.ZeroError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, len(log)


def ended(rank: int, world: int, place: Path, name: str, kind: str, victims: tuple[tuple[int, ...], ...]) -> None:
    """One of two ranks, or both, are gone at some of their calls. One rank takes over from what they left."""
    known = Job(0, 1, place, Setting(1, 3))
    known.make_templates()
    operation, trials = EVERY[name], 0

    def crowd(at: dict[int, int], how: str) -> list[tuple[int, Any]]:
        nonlocal trials
        trials += 1
        known.restore_target(operation.start)
        ranks = [Forked(member, each, place, place / f"store{trials}", known, name, at, how) for each in range(2)]
        gone = [ranks[each] for each in at]
        left = {each: fork.wait() for each, fork in enumerate(ranks) if each not in at}
        for fork in gone if how == "stop" else ():
            os.kill(fork.pid, signal.SIGKILL)
        return [left[each] if each in left else ranks[each].wait() for each in range(2)]

    counts = [answer[1] for _, answer in crowd({}, "")]
    for who in victims:
        for part in (
            (0.0, 0.5, 0.9) if kind == "kill" and name in OPERATIONS else (0.0, 0.5) if kind == "kill" else (0.5,)
        ):
            at = {each: int((counts[each] - 1) * part) if name in OPERATIONS else int(part > 0) for each in who}
            what = f"{name}: rank(s) {who} {kind} at call(s) {at}"
            for each, (status, answer) in enumerate(crowd(at, kind)):
                if each in who:
                    assert status == (9 if kind == "exit" else -signal.SIGKILL) or len(who) > 1, what
                else:
                    assert status == 0, f"{what}: rank {each} ended with {status}"
                    broken = "StallError: rank \\d, in .*: the connection to another rank has broken"
                    named = broken if name in IN_MEMORY else "(StallError|CheckpointError|TierError): "
                    assert re.match(named, answer[0]), (what, answer)
            if (place / "tier").exists():
                assert os.listdir(place / "tier") == [], what
                assert holders(place / "tier") == 0, what
            check_after(known, name, KILLED, what)


@pytest.mark.parametrize(
    ("name", "kind", "victims"),
    [
        ("save over", "kill", ((0,), (1,), (0, 1))),
        ("save behind", "kill", ((1,),)),
        ("load", "kill", ((0,), (1,))),
        ("state dict", "kill", ((1,),)),
        ("step", "kill", ((0,), (0, 1))),
        *[(name, "kill", ((1,),)) for name in IN_MEMORY],
        ("step at stage 3", "exit", ((1,),)),
        ("step", "stop", ((1,),)),
        pytest.param("save over", "stop", ((1,), (0,)), marks=pytest.mark.wide),
        pytest.param("load", "stop", ((1,),), marks=pytest.mark.wide),
    ],
)
def test_ranks_that_end(
    name: str, kind: str, victims: tuple[tuple[int, ...], ...], small: RankPool, fast: Path
) -> None:
    small.run(ended, fast, name, kind, victims, timeout_s=280)
