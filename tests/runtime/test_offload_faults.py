"""A disk that fails, is full, slow, short or gone: an error on every rank, no step by halves, the last checkpoint goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_zero as zero
from tests.kit.common import holders, loss_of, nameless_files
from tests.kit.injection import Answer, fails, instead
from tests.kit.offloading import Run
from tests.kit.pool import RankFailure, RankPool

pytestmark = pytest.mark.gloo


@contextlib.contextmanager
def disk(kind: str, at: int | None = None, answer: Answer | None = None) -> Iterator[list[int]]:
    """The disk tier's calls of a kind (`preadv`, `pwritev`) are counted; number `at` (None: every one) gets this answer."""
    count, lock = [0], threading.Lock()

    def call(real: Any, fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_nlink:  # the disk tier's file is the one without a name
            return real(fd, buffers, offset)
        with lock:
            number, count[0] = count[0], count[0] + 1
        if answer is None or at not in (None, number):
            return real(fd, buffers, offset)
        return int(answer(real, fd, buffers, offset))

    with instead(os, **{kind: call}):
        yield count


def ends(*_: Any) -> int:
    return 0


def short(real: Any, fd: int, buffers: Any, offset: int) -> int:
    """By half, in whole blocks of the disk."""
    [buffer] = buffers
    half = max(4096, len(buffer) // 2 // 4096 * 4096)
    return real(fd, [buffer[:half]], offset)


def slow(real: Any, *args: Any) -> int:
    time.sleep(0.003)
    return real(*args)


def attempt(run: Run, step: int) -> tuple[str, str, str] | None:
    """One step. (where it broke, error, message)."""
    where = "forward"
    try:
        loss = loss_of(run.model, run.rank, step)
        where = "backward"
        loss.backward()
        where = "clip"
        run.engine.clip_grad_norm_(0.5)
        where = "step"
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
        where = "behind the step"
        run.engine.finish_step()
    except zero.ZeroError as error:
        run.optimizer.zero_grad()
        return where, type(error).__name__, str(error)
    return None


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


Round = dict[str, Any]


def broken(rank: int, world: int, place: str, folder: Path, victim: int, share: int) -> list[Round]:
    """At some of the victim's disk calls of a step it gets an error; each time training goes on from the checkpoint."""
    run = Run(place, "bf16", rank, str(folder / "tier"), seed=0)
    run.train(0, 1)
    saved = folder / "saved"
    run.save(saved)
    with disk("preadv") as reads, disk("pwritev") as writes:
        expected = run.train(2, 3)
    values = run.values()
    rounds = []
    answers: list[tuple[str, Answer, str]] = [
        ("pwritev", fails(errno.EIO), "the disk failed"),
        ("preadv", fails(errno.EIO), "the disk failed"),
        ("pwritev", fails(errno.ENOSPC), "free space there"),
        ("preadv", ends, "cut the file short"),
    ]
    # Half of the calls are of the first of the two steps.
    counts = run.engine.exchange((reads[0] // 2, writes[0] // 2))[victim]
    for kind, answer, words in answers:
        calls = counts[kind == "pwritev"]
        for at in sorted({calls * part // share for part in range(share)} | {(calls - 1) * 9 // 10}) if calls else ():
            run.load(saved)
            with disk(kind, at, answer) if rank == victim else contextlib.nullcontext():
                found = attempt(run, 2)
            again = attempt(run, 2) if found is not None and found[0] in ("step", "behind the step") else None
            save = refusal(lambda: run.save(folder / "must not be")) if again is not None else ""
            zero.verify(saved)
            run.load(saved)
            losses = run.train(2, 3)
            rounds.append(
                {
                    "what": f"{kind} {at} of {calls}: {words}",
                    "found": found,
                    "words": words,
                    "again": again,
                    "save": save,
                    "goes on": losses == expected,
                }
            )
    assert [bool((a == b).all()) for a, b in zip(run.values(), values) if not a.is_meta].count(False) == 0
    assert not (folder / "must not be").exists()
    run.engine.detach()
    return rounds


@pytest.mark.parametrize("place", ["disk", "split", "parameters on disk"])
def test_a_disk_that_fails_on_one_rank(two, tmp_path, place):
    answers = two.run(broken, place, tmp_path, 1, 3, timeout_s=250)
    assert len(answers[0]) >= 6
    for first, second in zip(*answers):
        what = first["what"], first, second
        for mine in (first, second):
            assert mine["found"] is not None, what
            assert mine["found"][1] in ("TierError", "StateError"), what
            assert mine["goes on"], what
            if mine["found"][0] in ("step", "behind the step"):
                assert mine["again"] is not None, what
                assert mine["save"], what
        assert first["found"][0] == second["found"][0], what
        # The victim names the folder, itself and what to do; the other rank names the victim.
        assert second["words"] in second["found"][2], what
        assert f"disk tier of rank 1 in {tmp_path}/tier" in second["found"][2], what
        assert "rank 1" in first["found"][2], what


def bearable(rank: int, world: int, folder: Path) -> None:
    """Short transfers, a slow disk, a folder that somebody empties: the same numbers."""
    run = Run("disk", "no", rank, str(folder / "tier"), seed=0)
    run.train(0)
    run.save(folder / "saved")
    expected, values = run.train(1, 2), run.values()
    for answer in (short, slow):
        run.load(folder / "saved")
        with disk("preadv", None, answer), disk("pwritev", None, answer):
            assert run.train(1, 2) == expected
        assert all(a.is_meta or bool((a == b).all()) for a, b in zip(run.values(), values))
    run.load(folder / "saved")
    run.engine.exchange(None)
    if rank == 0:
        shutil.rmtree(folder / "tier")
    run.engine.exchange(None)
    assert run.train(1, 2) == expected
    run.engine.detach()


def test_a_disk_that_is_slow_short_or_emptied(two, tmp_path):
    two.run(bearable, tmp_path)


def cut(rank: int, world: int, folder: Path) -> None:
    """Somebody truncates rank 1's file: an error everywhere; a new engine goes on from the checkpoint."""
    run = Run("disk", "no", rank, str(folder / "tier"), seed=0)
    run.train(0)
    run.save(folder / "saved")
    expected = run.train(1, 2)
    if rank == 1:
        os.ftruncate(run.engine.offload.storage.disk.fileno(), 0)
    run.engine.exchange(None)
    found = attempt(run, 3)
    assert found is not None
    assert "something else cut the file short" in found[2] if rank == 1 else "rank 1" in found[2]
    del run
    run = Run("disk", "no", rank, str(folder / "tier"), seed=1)
    run.load(folder / "saved")
    assert run.train(1, 2) == expected
    run.engine.detach()


def test_a_file_that_was_cut_short(two, tmp_path):
    two.run(cut, tmp_path)


def interrupted(rank: int, world: int, folder: Path) -> list[tuple[str, str, list[str]]]:
    """Saves that cannot read this rank's states, and loads that cannot write them: errors everywhere, nothing lost."""
    run = Run("disk", "bf16", rank, str(folder / "tier"), seed=0)
    run.train(0)
    saved = folder / "saved"
    run.save(saved)
    expected, values = run.train(1, 2), run.values()
    run.load(saved)
    out = []

    def save_behind() -> None:
        run.save(folder / "rehearsed", async_save=True)
        run.engine.wait_for_save()

    def stamps() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in saved.rglob("*") if path.is_file()}

    works: tuple[tuple[str, Callable[[], None]], ...] = (
        ("preadv", lambda: run.save(folder / "rehearsed")),
        ("preadv", lambda: run.save(saved)),
        ("preadv", save_behind),
        ("pwritev", lambda: run.load(saved)),
    )
    for kind, work in works:
        with disk(kind) as calls:
            work()
        run.engine.exchange(shutil.rmtree(folder / "rehearsed", ignore_errors=True) if rank == 0 else None)
        count = run.engine.exchange(calls[0])[1]
        before = run.engine.exchange(stamps())
        # Not the very last: how many calls a transfer takes depends on where its buffer lies in memory.
        for at in (0, (count - 1) // 2, (count - 1) * 9 // 10):
            with disk(kind, at, fails(errno.EIO)) if rank == 1 else contextlib.nullcontext():
                message = refusal(work)
            run.engine.exchange(None)  # rank 0 has tidied up
            zero.verify(saved)
            assert run.engine.exchange(stamps()) == before
            out.append((f"{kind} {at}", message, sorted(path.name for path in folder.iterdir())))
    run.load(saved)
    assert run.train(1, 2) == expected
    assert all(a.is_meta or bool((a == b).all()) for a, b in zip(run.values(), values))
    run.save(folder / "after")
    run.engine.detach()
    return out


def test_a_disk_that_fails_in_a_save_or_a_load(two, tmp_path):
    answers = two.run(interrupted, tmp_path)
    for first, second in zip(*answers):
        # The same words everywhere. A load may break off later, where values are carried on to what is made of them.
        assert first[1] == second[1], (first, second)
        kind = "CheckpointError" if first[0].startswith("preadv") else "(Checkpoint|Tier)Error"
        assert re.match(
            rf"{kind}: .* rank 1: TierError: disk tier of rank 1 in {re.escape(str(tmp_path))}/tier: .*the disk failed",
            first[1],
        ), first
        assert first[2] == ["saved", "tier"], first  # nothing of a save that failed stays
    assert len(answers[0]) == 12


# A folder that cannot be used -----------------------------------------------------------------------------------------


def refused(rank: int, world: int, folder: Path) -> list[str]:
    """What zero.shard says where rank 1's folder is of no use, and that nothing stays behind."""
    out = []
    plain = folder / "a file"
    if rank == 0:
        plain.touch()

    def read_only() -> contextlib.AbstractContextManager[None]:
        def refuse(real: Any, path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_RDWR and str(path).startswith(str(folder / "tier")):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return int(real(path, flags, *args, **options))

        return instead(os, open=refuse)

    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        """Files of 64 KiB at most: room to look at, not for the states."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def full() -> contextlib.AbstractContextManager[None]:
        def refuse(real: Any, fd: int, offset: int, nbytes: int) -> None:
            if offset + nbytes > 1 << 16:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, offset, nbytes)

        return instead(os, posix_fallocate=refuse)

    for fault, path in (
        (contextlib.nullcontext, plain),
        (contextlib.nullcontext, plain / "below"),
        (read_only, folder / "tier"),
        (limited, folder / "tier"),
        (full, folder / "tier"),
    ):
        with fault() if rank == 1 else contextlib.nullcontext():
            mine = path if rank == 1 or fault is not contextlib.nullcontext else folder / "tier"
            # The folder is one setting for all ranks, the same path on each one's own machine.
            out.append(refusal(lambda place=str(mine): Run("disk", "no", rank, place, seed=0)))
    run = Run("disk", "no", rank, str(folder / "tier"), seed=0)
    run.train(0)
    run.engine.detach()
    return out


def test_a_folder_that_cannot_be_used(two, tmp_path):
    answers = two.run(refused, tmp_path)
    for number, words in enumerate(
        (
            "is a file, expected a folder",
            "cannot be made",
            "Read-only file system",
            "raise the limit of file sizes",
            "No space left",
        )
    ):
        for rank, lines in enumerate(answers):
            assert lines[number], (number, rank)
        if number > 1:
            assert words in answers[1][number], answers[1][number]
            assert "rank 1" in answers[0][number], answers[0][number]


# Death ----------------------------------------------------------------------------------------------------------------


def killed(rank: int, world: int, folder: Path, at: int, victims: tuple[int, ...]) -> None:
    run = Run("disk", "no", rank, str(folder / "tier"), seed=0)
    run.train(0, 1)
    run.save(folder / "saved")

    def die(*_: Any) -> int:
        (folder / f"held{rank}").write_text(str(nameless_files(folder / "tier")))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with disk("pwritev", at, die) if rank in victims else contextlib.nullcontext():
        run.train(2, 3)


def resumed(rank: int, world: int, folder: Path) -> list[float]:
    """Losses from the checkpoint on."""
    zero.verify(folder / "saved")
    run = Run("disk", "no", rank, str(folder / "tier"), seed=0)
    run.load(folder / "saved")
    losses = run.train(2, 3)
    assert os.listdir(folder / "tier") == []
    run.engine.detach()
    return losses


def undisturbed(rank: int, world: int, folder: Path) -> list[float]:
    run = Run("disk", "no", rank, str(folder / "tier"), seed=0)
    run.train(0, 1)
    losses = run.train(2, 3)
    run.engine.detach()
    return losses


@pytest.mark.parametrize(
    ("at", "victims"),
    [(3, (0, 1)), pytest.param(9, (0, 1), marks=pytest.mark.slow), pytest.param(7, (1,), marks=pytest.mark.slow)],
)
def test_killed_in_mid_step(two, tmp_path, at, victims):
    (tmp_path / "other").mkdir()
    expected = two.run(undisturbed, tmp_path / "other")
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure, match="died with exit code"):
            pool.run(killed, tmp_path, at, victims, timeout_s=60)
        pool.stop()
        assert os.listdir(tmp_path / "tier") == []
        assert [path.read_text() for path in tmp_path.glob("held*")] == ["1"] * len(victims)
        assert holders(tmp_path / "tier") == 0
        assert pool.run(resumed, tmp_path) == expected
    finally:
        pool.stop()


def asked(rank: int, world: int, folder: Path) -> list[tuple[str, str]]:
    """Whole values while rank 1 cannot read its disk; half a step's values afterwards."""
    run = Run("disk", "bf16", rank, str(folder / "tier"), seed=0)
    run.train(0)
    run.save(folder / "saved")
    before = run.values()
    weight = max((p for p in run.model.parameters() if p.requires_grad), key=lambda p: p.numel())

    def gathered() -> None:
        with zero.GatheredParameters([weight]):
            pass

    works: dict[str, Callable[[], object]] = {
        "state_dict": run.model.state_dict,
        "optimizer.state_dict": run.optimizer.state_dict,
        "full_parameter": lambda: zero.full_parameter(weight),
        "full_optimizer_state": lambda: zero.full_optimizer_state(weight, "exp_avg"),
        "GatheredParameters": gathered,
        "detach": run.engine.detach,
    }
    out = []
    for name, work in works.items():
        with disk("preadv", None, fails(errno.EIO)) if rank == 1 else contextlib.nullcontext():
            out.append((name, refusal(work)))
    assert all(a.is_meta or bool((a == b).all()) for a, b in zip(run.values(), before))
    with disk("pwritev") as writes:
        run.train(1)
    run.load(folder / "saved")
    with disk("pwritev", writes[0] * 9 // 10, fails(errno.EIO)) if rank == 1 else contextlib.nullcontext():
        assert attempt(run, 1) is not None
    out.append(("state_dict of half a step", refusal(run.model.state_dict)))
    run.load(folder / "saved")
    assert all(a.is_meta or bool((a == b).all()) for a, b in zip(run.values(), before))
    run.engine.detach()
    return out


def test_whole_values_of_a_disk_that_fails(two, tmp_path):
    for (name, first), (_, second) in zip(*two.run(asked, tmp_path)):
        if name == "state_dict of half a step":
            assert "half done" in first, first
            assert "half done" in second, second
            continue
        assert "the disk failed" in second, (name, second)
        assert "rank 1" in first, (name, first)
