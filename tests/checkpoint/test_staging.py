"""Put a folder in place: other jobs, links, mounts, the order of calls. Calls that fail or never end: tests/faults."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hf_zero as zero
from hf_zero import CheckpointError, verify
from hf_zero.checkpoint.folder import Staging
from hf_zero.checkpoint.manifest import MANIFEST, Manifest, digest_file
from tests.faults.faults import CHANGES, faults
from tests.kit.injection import Forked
from tests.kit.pool import on_ranks

OLD = [
    "config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors", "model.safetensors.index.json", "optimizer/exp_avg.safetensors",
    "optimizer/optimizer.json", "old/er/state.json",
]  # fmt: skip
NEW = ["config.json", "model.safetensors", "optimizer/optimizer.json", "new/er/still/state.json"]
NAMES = {"old": OLD, "new": NEW}
KEPT = {"notes.txt": "mine", "runs/log.txt": "mine too"}


def fill(folder: Path, names: list[str], version: str) -> Manifest:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{version} {name}")
    return Manifest({name: digest_file(folder / name) for name in names}, {"made": version})


def save(target: Path | str, names: list[str], version: str) -> None:
    staging = Staging(target)
    staging.open()
    try:
        staging.publish(fill(staging.path, names, version))
    except BaseException:
        staging.discard()
        raise


def content(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file() and ".zero_saving" not in str(path)]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


def version_of(target: Path, kept: dict[str, str]) -> str | None:
    """Return the version that the folder holds completely; None if it has no files of a save, "rejected" if a mix."""
    found = content(target) if target.exists() else {}
    assert {name: text for name, text in found.items() if name in kept} == (kept if target.exists() else {})
    if not found.keys() - kept.keys():
        return None
    try:
        version = verify(target).facts["made"]
    except CheckpointError:
        return "rejected"
    found.pop(MANIFEST)
    assert found == {name: f"{version} {name}" for name in NAMES[version]} | kept
    return version


def left_overs(parent: Path) -> list[str]:
    return [path.name for path in parent.rglob(".*")]


def prepare(parent: Path, start: str) -> tuple[Path, dict[str, str]]:
    shutil.rmtree(parent, ignore_errors=True)
    target = parent / "checkpoint"
    parent.mkdir()
    kept = KEPT if start in ("old and files of others", "files of others") else {}
    if start.startswith("old"):
        save(target, OLD, "old")
    for name, text in kept.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return target, kept


@pytest.mark.parametrize("start", ["nothing", "old"])
def test_files_are_durable_before_the_rename_and_before_the_manifest(start, tmp_path):
    target, _ = prepare(tmp_path / "out", start)
    with faults(tmp_path, CHANGES) as log:
        save(target, NEW, "new")
    commit = max(index for index, (kind, _) in enumerate(log) if kind == "rename")
    staged = {path for kind, path in log[:commit] if kind == "fsync"}
    for name in [*NEW, MANIFEST, "optimizer", "new/er/still", "new/er", "new"]:
        assert any(path.endswith(f"/checkpoint/{name}") and ".zero_saving-" in path for path in staged), name
    if start == "nothing":
        assert ("fsync", str(target.parent)) in log[commit:]
        return
    moved = [index for index, (kind, _) in enumerate(log) if kind == "replace"]
    assert log[moved[-1]][1] == str(target / MANIFEST)
    order = [log[index][1] for index in moved]
    assert order.index(str(target / "model.safetensors")) > order.index(str(target / "optimizer/optimizer.json"))
    between = {path for kind, path in log[moved[-2] : moved[-1]] if kind == "fsync"}
    assert between >= {str(target / name) for name in ["", "optimizer", "new/er/still", "new/er", "new"]}
    assert ("fsync", str(target)) in log[moved[-1] :]


@on_ranks()
def test_each_rank_makes_its_own_bytes_durable(rank: int, world: int, tmp_path: Path) -> None:
    engine = zero.shard(nn.Linear(64, 64), config=zero.ZeroConfig(stage=3))
    with faults(tmp_path, CHANGES) as log:
        engine.save(tmp_path / "out")
    written = {path for kind, path in log if kind.startswith("pwrite")}
    assert written
    assert written <= {path for kind, path in log if kind == "fsync"}
    engine.detach()


def hold(target: Path, ready: int, go: int) -> None:
    staging = Staging(target)
    staging.open()
    os.write(ready, b"x")
    os.read(go, 1)
    staging.publish(fill(staging.path, NEW, "new"))


@pytest.mark.parametrize("start", ["nothing", "old"])
def test_a_second_job_is_refused(start, tmp_path):
    target, _ = prepare(tmp_path / "out", start)
    ready, go = os.pipe(), os.pipe()
    job = Forked(hold, target, ready[1], go[0])
    os.read(ready[0], 1)
    if start == "nothing":
        target.mkdir()
        (target / "notes.txt").write_text("the target got files meanwhile")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"another job is saving to {target}"):
            save(target, OLD, "old")
    save(target.with_name("another"), NEW, "new")
    os.write(go[1], b"x")
    assert job.wait()[0] == 0
    assert verify(target).facts["made"] == "new"
    assert left_overs(tmp_path) == []


def test_a_job_that_opened_before_the_target_had_files(tmp_path):
    target = tmp_path / "out"
    late = Staging(target)
    save(target, OLD, "old")
    late.open()
    assert late.root.parent == target
    late.publish(fill(late.path, NEW, "new"))
    assert version_of(target, {}) == "new"


def test_staging_folders_of_dead_jobs_are_removed_and_live_ones_kept(tmp_path):
    def end(name: str) -> None:
        with faults(tmp_path, CHANGES, 12, "kill"):
            save(tmp_path / name, NEW, "new")

    for name in ("a", "b[1]"):
        assert Forked(end, name).wait()[0] == -signal.SIGKILL
    assert len(left_overs(tmp_path)) == 2
    ready, go = os.pipe(), os.pipe()
    job = Forked(hold, tmp_path / "c", ready[1], go[0])
    os.read(ready[0], 1)
    save(tmp_path / "d", NEW, "new")
    (live,) = left_overs(tmp_path)
    assert live.startswith(".c.zero_saving-")
    os.write(go[1], b"x")
    assert job.wait()[0] == 0
    assert verify(tmp_path / "c").facts["made"] == "new"
    assert left_overs(tmp_path) == []


def test_a_process_saves_again_after_an_interrupt_before_any_line(tmp_path):
    """Its own lock on the staging folder was left behind, or released twice."""
    errors = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("hf_zero/checkpoint/folder.py") or frame.f_code.co_name == "release":
            return None  # Python drops what is raised while an object goes
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return trace

    for number in itertools.count(random.randrange(1, 5), 4):
        target, left = prepare(tmp_path / "out", "nothing")[0], number
        sys.settrace(trace)
        try:
            save(target, NEW, "new")
        except KeyboardInterrupt as error:
            errors.append(error)  # a notebook keeps the traceback of the last one, and all that its frames hold
        finally:
            sys.settrace(None)
        if left > 0:
            return
        save(target, NEW, "new")
        assert version_of(target, {}) == "new"
        assert left_overs(tmp_path) == []


def test_two_saves_that_remove_left_overs_do_not_refuse_one_another(tmp_path):
    def run(name: str) -> None:
        for number in range(30):
            save(tmp_path / f"{name}{number}", NEW[:1], "new")

    jobs = [Forked(run, name) for name in "ab"]
    assert [job.wait()[0] for job in jobs] == [0, 0]
    assert left_overs(tmp_path) == []


@pytest.mark.parametrize("what", ["tmpfs", "folder"])
def test_what_is_mounted_at_the_target(what, tmp_path):
    target, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    target.mkdir(), elsewhere.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs"] if what == "tmpfs" else ["mount", "--bind", elsewhere]
    if subprocess.run([*mount, target], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        for files, name in ((OLD, "old"), (NEW, "new")):  # it is empty at first
            save(target, files, name)
            verify(target)
        assert left_overs(tmp_path) == []
    finally:
        subprocess.run(["umount", target], check=True)


def test_an_empty_folder_stays_the_same_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("old", "new"):
        save(Path(), NAMES[name], name)
        assert version_of(Path(), {}) == name, "of the current folder"
    assert left_overs(tmp_path) == []


def test_a_manifest_that_lists_staged_files(tmp_path):
    target = tmp_path / "checkpoint"
    save(target, OLD, "old")
    manifest = Manifest.read(target)
    manifest.files[f".zero_saving-x/checkpoint/{MANIFEST}"] = next(iter(manifest.files.values()))
    (target / MANIFEST).write_bytes(manifest.to_bytes())
    save(target, NEW, "new")
    assert version_of(target, {}) == "new"
    assert left_overs(tmp_path) == []


def test_older_pickles_of_the_same_weights_go(tmp_path):
    target, others = tmp_path / "out", {"adapter_model.bin": "another kind", "pytorch_model.fp16.bin": "a variant"}
    save(target, OLD, "old")
    for name, text in {"pytorch_model.bin": "older weights", **others}.items():
        (target / name).write_text(text)
    save(target, NEW, "new")
    assert version_of(target, others) == "new"


def test_a_linked_folder_stays_linked(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for version, name in (("old", "link"), ("new", "link/")):
        save(f"{tmp_path}/{name}", NAMES[version], version)
        assert (tmp_path / "link").is_symlink()
        assert version_of(tmp_path / "real", {}) == version
    (tmp_path / "dangling").symlink_to("nowhere")
    save(tmp_path / "dangling", NEW, "new")
    assert version_of(tmp_path / "nowhere", {}) == "new"
    assert left_overs(tmp_path) == []


def test_targets_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("a file")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="file"):
            save(target, NEW, "new")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="loop"):
        save(tmp_path / "loop", NEW, "new")
    assert (tmp_path / "file").read_text() == "a file"
    assert left_overs(tmp_path) == []


# Links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["optimizer", "new", "new/er"])
@pytest.mark.parametrize("start", ["old", "files of others"])
def test_a_linked_folder_inside_the_target_is_refused(where, start, tmp_path):
    target, kept = prepare(tmp_path / "out", start)
    save(tmp_path / "victim", NEW, "new")
    theirs = content(tmp_path / "victim")
    link = target / where
    if link.is_dir():
        shutil.rmtree(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "victim")
    before = content(target)
    with pytest.raises(CheckpointError, match=f"{link} is a symbolic link"):
        save(target, NEW, "new")
    assert content(target) == before
    assert content(tmp_path / "victim") == theirs
    link.unlink()
    save(target, NEW, "new")
    assert version_of(target, kept) == "new"


def test_a_link_named_like_a_staging_folder_is_not_followed(tmp_path):
    target, kept = prepare(tmp_path / "out", "old")
    save(tmp_path / "victim", NEW, "new")
    links = [target / ".zero_saving-x", target.parent / ".checkpoint.zero_saving-x"]
    for link in links:
        link.symlink_to(tmp_path / "victim")
    save(target, NEW, "new")
    assert all(link.is_symlink() for link in links)
    assert version_of(tmp_path / "victim", {}) == "new"


def test_links_as_files_are_replaced_not_written_through(tmp_path):
    target, victim = tmp_path / "out", tmp_path / "file"
    save(target, OLD, "old")
    victim.write_text("theirs")
    for name in ("config.json", "model.safetensors", MANIFEST):
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to(victim)
    save(target, NEW, "new")
    assert victim.read_text() == "theirs"
    assert verify(target).facts["made"] == "new"
    assert not any(path.is_symlink() for path in target.rglob("*"))
