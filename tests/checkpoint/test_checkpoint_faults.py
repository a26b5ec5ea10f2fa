"""Killed, out of space, cut off, damaged: a checkpoint is the old one or the new one, whole, or an error on every rank."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hf_zero as zero
from hf_zero.checkpoint.folder import verify
from hf_zero.checkpoint.manifest import MANIFEST
from hf_zero.checkpoint.ranges import Held
from hf_zero.checkpoint.save import Saving
from hf_zero.checkpoint.weights import format_of
from hf_zero.runtime.checkpoints import put_weights
from hf_zero.runtime.values.pieces import ParameterPieces
from hf_zero.tiers.array import FileSource, OnDisk
from hf_zero.tiers.tier import Meter
from tests.kit.injection import Call, Forked, calls, fail_at, instead, kill_at

pytestmark = pytest.mark.gloo


class Note:
    """A state beside the weights."""

    def __init__(self) -> None:
        self.version = 0

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


class Job:
    """A model whose every value, and its optimizer's, is the version of its checkpoint."""

    def __init__(self, stage: int = 3) -> None:
        self.model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
        self.model.register_buffer("buffer", torch.zeros(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=stage))
        self.note = Note()
        self.masters = [flat.shards[0].master for unit in self.engine.units for flat in unit.trained]

    def paint(self, version: int) -> None:
        with torch.no_grad():
            for master in self.masters:
                master.fill_(version)
                self.optimizer.state[master] = {
                    "step": torch.tensor(float(version)),
                    "exp_avg": torch.full_like(master, version),
                    "exp_avg_sq": torch.full_like(master, version),
                }
            self.model.buffer.fill_(version)
        self.note.version = version

    def save(self, folder: Path, version: int, **options: Any) -> None:
        """Version 1 is the largest: more files than any later one."""
        self.paint(version)
        self.engine.save(
            folder, objects={"note": self.note}, max_shard_size="100B" if version == 1 else "1MB", **options
        )

    def version(self, folder: Path) -> int | None:
        """Of the checkpoint there, which is whole and of one piece; None where there is none."""
        self.paint(0)
        try:
            self.engine.load(folder, objects={"note": self.note})
        except zero.CheckpointError as error:
            if "is no folder" not in str(error) and "holds no weights" not in str(error):
                raise
            return None
        # Where a rank holds nothing of a span, its padding is not read.
        found = {self.note.version, *self.model.buffer.tolist()}
        for unit in self.engine.units:
            for flat in unit.trained:
                state = self.optimizer.state[flat.shards[0].master]
                for part in flat.span.overlaps(flat.rank):
                    where = part.here
                    for values in (flat.shards[0].master, state["exp_avg"], state["exp_avg_sq"]):
                        found.update(values.detach()[where].tolist())
                found.add(state["step"].item())
        (version,) = found
        return int(version)


def left_overs(folder: Path) -> list[str]:
    """Of saves, in the folder and beside it."""
    return [path.name for path in folder.parent.rglob(".*")]


def restore(template: Path, folder: Path) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir()
    if template.exists():
        shutil.copytree(template, folder)


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: sweeps are thousands of fsyncs."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path))
    yield place
    shutil.rmtree(place)


# Killed ---------------------------------------------------------------------------------------------------------------


def killed_alone(rank: int, world: int, place: Path, old: bool, behind: bool, stride: int) -> None:
    """Every `stride`th call of a save over version 1 (or over nothing) by one rank, in a fork that is killed there."""
    job, template, folder = Job(), place / "template", place / "out" / "checkpoint"
    if old:
        job.save(template, 1)

    def save(k: int) -> None:
        with calls(kill_at(k)):
            job.save(folder, 2, async_save=behind)
            job.engine.wait_for_save()

    seen, k = [], 0
    while True:
        restore(template, folder)
        status, _ = Forked(save, k).wait()
        seen.append(job.version(folder))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        job.save(folder, 3)
        assert job.version(folder) == 3
        assert not left_overs(folder)
        k += stride
    assert k > 30
    assert set(seen) == {1 if old else None, 2}
    assert seen == sorted(seen, key=lambda version: version == 2)
    assert not left_overs(folder)


@pytest.mark.parametrize(("old", "behind", "stride"), [(True, False, 1), (False, False, 1), (True, True, 2)])
def test_one_rank_killed_at_any_call(small, fast, old, behind, stride):
    small.run(killed_alone, fast, old, behind, stride)


def member(rank: int, store: Path, folder: Path, victims: list[int], k: int, behind: bool) -> list[Call] | str:
    """One of two ranks; `victims` kill themselves at their call `k`."""
    signal.alarm(60)  # a rank that waits for a dead one for ever is a failure
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    job = Job()
    try:
        with calls(kill_at(k if rank in victims else -1)) as log:
            job.save(folder, 2, async_save=behind)
            job.engine.wait_for_save()
    except (RuntimeError, zero.CheckpointError) as error:
        return str(error)
    return log


def killed_together(rank: int, world: int, place: Path) -> None:
    job, template, folder = Job(), place / "template", place / "out" / "checkpoint"
    job.save(template, 1)

    def crowd(number: int, victims: list[int], k: int, behind: bool) -> list[tuple[int, Any]]:
        ranks = [Forked(member, rank, place / f"store{number}", folder, victims, k, behind) for rank in range(2)]
        return [fork.wait() for fork in ranks]

    restore(template, folder)
    (_, first), (_, second) = crowd(0, [], -1, False)
    assert job.version(folder) == 2
    commit = next(i for i, (kind, path) in enumerate(first) if kind == "rename" and path.endswith(".zero_commit"))
    points: list[tuple[list[int], int]] = [([0], k) for k in (3, commit // 2, commit, commit + 1, commit + 5)]
    points += [([1], k) for k in range(0, len(second), 3)]
    points += [([0, 1], k) for k in (4, 9)]
    seen = set()
    for number, (victims, k) in enumerate(points, 1):
        restore(template, folder)
        answers = crowd(number, victims, k, number % 2 == 0)
        for member_rank, (status, answer) in enumerate(answers):
            # Of two that are to die the first may take the other with it, before its turn.
            assert (
                status == -signal.SIGKILL if victims == [member_rank] else isinstance(answer, str) or len(victims) > 1
            )
        version = job.version(folder)
        assert version == (2 if victims == [0] and k > commit else 1), (victims, k)
        seen.add(version)
        job.save(folder, 3)
        assert job.version(folder) == 3
        assert not left_overs(folder)
    assert seen == {1, 2}


def test_ranks_killed_while_others_save(small, fast):
    small.run(killed_together, fast)


# Errors ---------------------------------------------------------------------------------------------------------------


def attempt(job: Job, folder: Path, **options: Any) -> str | None:
    try:
        job.save(folder, 2, **options)
        job.engine.wait_for_save()
    except zero.CheckpointError as error:
        return str(error)
    return None


def hidden(rank: int) -> AbstractContextManager[None]:
    """Rank 1 does not see the folder of rank 0, as on another node without a shared file system."""
    if rank != 1:
        return nullcontext()
    return instead(os.path, exists=lambda exists, path: ".nonce-" not in str(path) and exists(path))


def failing(rank: int, world: int, place: Path, where: int, behind: bool, blind: bool, stride: int) -> None:
    """Every `stride`th call of rank `where` fails once."""
    job, template, folder = Job(), place / "template", place / "out" / "checkpoint"
    job.save(template, 1)
    with hidden(rank) if blind else nullcontext():
        seen, k = set(), 0
        while True:
            if rank == 0:
                restore(template, folder)
            job.engine.exchange(None)
            with calls(fail_at(k, (errno.ENOSPC, errno.EIO)[k % 2]) if rank == where else lambda *_: None) as log:
                error = attempt(job, folder, async_save=behind)
            errors = job.engine.exchange(error)
            log = job.engine.exchange(log)[where]
            if k >= len(log):
                assert errors == [None] * world
                break
            kind, path = log[k]
            committed = any(kind == "rename" and path.endswith(".zero_commit") for kind, path in log[:k])
            assert len({e is None for e in errors}) == 1, (kind, path, errors)
            clearing = kind in ("unlink", "rmdir") or committed
            other_way = (kind == "rename" and path.endswith("checkpoint")) or kind == "mkdir"
            if error is None:
                assert clearing or other_way or path.endswith(".checkpoint.zero_saving"), (kind, path)
            else:
                assert folder.name in error
                if where == 1:
                    assert Path(path).name in error, (path, error)
                    assert rank == 1 or "rank 1" in error, error
            found = [name for name in left_overs(folder) if name != ".zero_commit"]
            job.engine.exchange(None)
            if error is not None and not (
                kind in ("unlink", "rmdir") or (kind == "open" and path.endswith("zero_saving"))
            ):
                assert not found, (kind, path, found)
            version = job.version(folder)
            assert version == (2 if error is None or committed else 1), (kind, path, error)
            seen.add(version)
            k += stride
        assert k > (10 if where else 30)
        assert 1 in seen
        job.save(folder, 3)
        assert job.version(folder) == 3
        job.engine.exchange(None)
        assert not left_overs(folder)


@pytest.mark.parametrize(
    ("where", "behind", "blind", "stride"),
    [(0, False, False, 1), (1, False, False, 1), (1, True, False, 1), (0, True, False, 3), (0, False, True, 2)],
)
def test_a_call_that_fails_is_an_error_on_every_rank(two, fast, where, behind, blind, stride):
    two.run(failing, fast, where, behind, blind, stride)


def piecemeal(rank: int, world: int, folder: Path) -> None:
    job = Job()
    pwrite = os.pwrite

    def short(index: int, call: Call, args: Any) -> int | None:
        return pwrite(args[0], args[1][:5], args[2]) if call[0] == "pwrite" else None

    with calls(short):
        job.save(folder, 2)
    assert job.version(folder) == 2


def test_short_writes_go_on(two, tmp_path):
    two.run(piecemeal, tmp_path / "out")


def limited(rank: int, world: int, folder: Path) -> None:
    """The kernel itself refuses to let a file grow."""
    job = Job()
    job.save(folder, 1)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
        with pytest.raises(zero.CheckpointError, match=r"File too large"):
            job.save(folder, 2)

    assert Forked(save).wait()[0] == 0
    assert job.version(folder) == 1
    assert not left_overs(folder)


def test_a_file_size_limit(pools, tmp_path):
    pools[1].run(limited, tmp_path / "out" / "checkpoint")


def fill_disk(rank: int, world: int, folder: Path) -> None:
    for kind, fits in ((torch.optim.SGD, True), (torch.optim.Adam, False)):
        model = nn.Linear(600, 1000)
        optimizer = kind(model.parameters())
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
        model(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        for behind in (False, True):
            error = None
            try:
                engine.save(folder, async_save=behind)
                engine.wait_for_save()
            except zero.CheckpointError as raised:
                error = str(raised)
            assert (error is None) == fits, error
            assert fits or "No space left" in str(error) or "the disk has" in str(error), error
            engine.exchange(None)
            assert "optimizer/exp_avg.safetensors" not in verify(folder).files
            assert not left_overs(folder)
            engine.exchange(None)


def test_a_full_disk(two, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        two.run(fill_disk, disk / "out" / "checkpoint")
    finally:
        subprocess.run(["umount", disk], check=True)


# Damaged --------------------------------------------------------------------------------------------------------------


def damaged(rank: int, world: int, folder: Path) -> int:
    job = Job()
    job.paint(1)
    for master in job.masters:
        job.optimizer.state[master]["exp_avg_sq"].fill_(2)
    job.engine.save(folder, objects={"note": job.note}, max_shard_size="100B")
    names = [*verify(folder).files, MANIFEST]
    job.engine.exchange(None)  # no rank damages what another still verifies
    numbers = random.Random(0)
    count = 0

    def check(name: str, change: Callable[[Path], None]) -> None:
        nonlocal count
        path = folder / name
        if rank == 0:
            shutil.copy(path, folder.parent / "kept")
            change(path)
        job.engine.exchange(None)
        for attempt in (lambda: job.engine.load(folder), lambda: verify(folder)):
            with pytest.raises(zero.CheckpointError, match=path.name.replace(".", r"\.")):
                attempt()
        job.engine.exchange(None)
        if rank == 0:
            shutil.copy(folder.parent / "kept", path)
        job.engine.exchange(None)
        count += 1

    def flip(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[numbers.randrange(len(raw))] ^= 1 << numbers.randrange(8)
        path.write_bytes(raw)

    for name in names:
        check(name, Path.unlink)
        check(name, lambda path: path.write_bytes(path.read_bytes()[:-1]))
        check(name, lambda path: path.write_bytes(path.read_bytes() + b"\0"))
        check(name, lambda path: path.write_bytes(b""))
        for _ in range(4):
            check(name, flip)
    job.engine.load(folder)
    # Two files of the same size, names and shapes, in each other's place.
    one, other = (next((folder / "optimizer").glob(f"{state}-00001-of-*")) for state in ("exp_avg", "exp_avg_sq"))
    assert one.stat().st_size == other.stat().st_size
    job.engine.exchange(None)
    if rank == 0:
        one.rename(folder / "aside")
        other.rename(one)
        (folder / "aside").rename(other)
    job.engine.exchange(None)
    with pytest.raises(zero.CheckpointError, match=r"exp_avg(_sq)?-00001-of-0000\d\.safetensors is damaged"):
        job.engine.load(folder)
    return count


def test_damage_to_any_file_is_named_on_every_rank(two, tmp_path):
    first, second = two.run(damaged, tmp_path / "out" / "checkpoint")
    assert first == second > 100


def stale(rank: int, world: int, folder: Path) -> list[str]:
    job = Job()
    job.save(folder, 1)
    many = len(verify(folder).files)
    job.engine.exchange(None)
    if rank == 0:
        for name in ("pytorch_model.bin", "model-00001-of-00099.safetensors", "notes.txt"):
            (folder / name).write_text("of an older save, or of a person")
    job.engine.exchange(None)
    job.save(folder, 2, save_optimizer=False)
    assert len(verify(folder).files) < many
    assert not job.engine.exchange(None)[0]
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_nothing_of_an_older_larger_save_stays(two, tmp_path):
    found, _ = two.run(stale, tmp_path / "out")
    assert found == sorted(
        ["model.safetensors", "notes.txt", "zero_manifest.json", "zero_state.json", "zero_state.safetensors"]
    )


# Two at once, behind training, apart ----------------------------------------------------------------------------------


def rivals(rank: int, world: int, folder: Path, old: bool) -> None:
    job = Job()
    if old:
        job.save(folder, 1)
    ready, go = os.pipe(), os.pipe()

    def slow() -> None:
        waited: list[Call] = []

        def before(index: int, call: Call, args: Any) -> None:
            if call[0] == "fsync" and not waited:
                waited.append(call)
                os.write(ready[1], b"x")
                os.read(go[0], 1)

        with calls(before):
            job.save(folder, 2)

    first = Forked(slow)
    os.read(ready[0], 1)
    error = attempt(job, folder)
    assert error is not None
    assert f"another job is saving to {folder} right now" in error
    os.write(go[1], b"x")
    assert first.wait()[0] == 0
    assert job.version(folder) == 2
    job.save(folder, 3)
    assert job.version(folder) == 3


@pytest.mark.parametrize("old", [True, False])
def test_of_two_jobs_that_save_to_one_folder_one_is_refused(pools, tmp_path, old):
    pools[1].run(rivals, tmp_path / "out" / "checkpoint", old)


def behind(rank: int, world: int, place: Path) -> None:
    job = Job()
    changed = threading.Event()

    def wait(index: int, call: Call, args: Any) -> None:
        if call[0] == "pwrite":
            changed.wait(30)

    with calls(wait):
        job.save(place / "a", 2, async_save=True)
        job.paint(7)
        assert not (place / "a").exists()
        threading.Timer(0.3, changed.set).start()
        job.save(place / "b", 3, async_save=True)  # waits for the first
        verify(place / "a")
        job.paint(8)
        job.engine.wait_for_save()
    assert job.version(place / "a") == 2
    assert job.version(place / "b") == 3

    for nexts in (job.engine.wait_for_save, lambda: job.save(place / "c", 4), lambda: job.engine.load(place / "a")):
        with calls(fail_at(2, errno.EIO) if rank == 1 else lambda *_: None):
            job.save(place / "b", 5, async_save=True)
            while any(thread.name.startswith("hf_zero save") for thread in threading.enumerate()):  # `wait` would tell
                time.sleep(0.01)
        with pytest.raises(zero.CheckpointError, match=r"exp_avg_sq|model\.safetensors|Input/output"):
            nexts()
        job.engine.wait_for_save()  # said once
        assert job.version(place / "b") == 3
    assert not (place / "c").exists()
    job.save(place / "b", 6, async_save=True)
    assert job.version(place / "b") == 6


def behind_another(rank: int, world: int, place: Path) -> None:
    """Whoever starts a save behind training: the one before is not overwritten while it is being written."""
    job = Job()
    second = threading.Event()

    def wait(index: int, call: Call, args: Any) -> None:
        if call[0] == "pwrite":
            second.wait(0.5)

    with calls(wait):
        for version in (2, 3):
            job.paint(version)
            saving = Saving(job.engine.wire, place / str(version))
            put_weights(saving, job.engine.sharded, job.engine.outline, "50GB")
            job.engine.saves.write_behind(saving)
        second.set()
        job.engine.wait_for_save()
    for version in (2, 3):
        verify(place / str(version))
        saved = load_file(place / str(version) / "model.safetensors")
        assert len(saved) == 5
        assert all((value == version).all() for value in saved.values())


def test_one_behind_another(two, tmp_path):
    two.run(behind_another, tmp_path)


def test_behind_training(two, tmp_path):
    two.run(behind, tmp_path)


EXIT = """
import os, sys
import torch, hf_zero as zero
model = torch.nn.Linear(4, 4)
engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
def fail(*_):
    raise OSError(28, "No space left on device")
if sys.argv[2] == "fails":
    os.pwrite = fail
engine.save(sys.argv[1], async_save=True)
print("the end")
"""


@pytest.mark.parametrize("how", ["fails", "works"])
def test_a_process_does_not_end_as_if_its_last_save_had_worked(how, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, tmp_path / "out", how], capture_output=True, text=True, timeout=100, cwd=Path.cwd()
    )
    assert "the end" in done.stdout
    if how == "works":
        assert done.returncode == 0, done.stderr
        verify(tmp_path / "out")
    else:
        assert done.returncode == 1
        assert "model.safetensors" in done.stderr
        assert "No space left" in done.stderr
        assert not list(tmp_path.iterdir())


def apart(rank: int, world: int, place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1500, 3000), nn.Linear(7, 3), nn.Linear(4, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    for parameter in model.parameters():
        parameter.grad = None
    (model[0].weight.sum() + model[1].weight.sum() + model[2].weight.float().sum()).backward()
    optimizer.step()
    engine.save(place / "seen")
    with hidden(rank):
        engine.save(place / "unseen")
        with pytest.raises(zero.CheckpointError, match=r"ranks \[1\] do not see .*shared file system"):
            engine.save(place / "behind", async_save=True)
    engine.exchange(None)
    assert not list(place.glob(".*"))
    engine.load(place / "unseen")


class OnCutFile(ParameterPieces):
    """What rank 1 writes rests in a file that something has cut short."""

    path: Path

    def written(self, rank: int, size: int) -> Iterator[Held]:
        for name, piece in super().written(rank, size):
            if rank == 1:
                piece = replace(piece, source=OnDisk(FileSource(self.path, 0, torch.float32, piece.numel, Meter())))
            yield name, piece


def apart_and_unreadable(rank: int, world: int, place: Path) -> None:
    """What rank 1 sends rests in a file that something has cut short: rank 0 does not wait for it for ever."""
    job = Job()
    job.paint(2)
    parameters = OnCutFile(job.engine.units)
    parameters.path = place / f"rest{rank}"
    with open(parameters.path, "wb") as file:
        file.truncate(4)
    with hidden(rank):
        saving = Saving(job.engine.wire, place / "out")
        form, outline = format_of(job.engine.model), job.engine.outline
        saving.weights(parameters, lambda: form.draw(outline(), saving.folder, "50GB"))
    with pytest.raises(zero.ZeroError, match="rest1"):
        saving.commit()
    job.engine.exchange(None)
    assert sorted(path.name for path in place.iterdir()) == ["rest0", "rest1"]


def test_a_rank_that_cannot_send_its_bytes_ends_the_save_everywhere(two, tmp_path):
    two.run(apart_and_unreadable, tmp_path)


def test_ranks_that_do_not_see_the_folder_send_their_bytes(two, tmp_path):
    two.run(apart, tmp_path)
    seen, unseen = verify(tmp_path / "seen"), verify(tmp_path / "unseen")
    assert set(seen.files) == set(unseen.files)
    for name in seen.files:
        if not name.startswith("zero_state"):
            assert (tmp_path / "seen" / name).read_bytes() == (tmp_path / "unseen" / name).read_bytes(), name
    assert not (tmp_path / "behind").exists()
