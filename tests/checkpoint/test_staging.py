"""A folder is replaced as a whole: killed at any call, and killed again while recovering, it is the old one or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from hf_zero.checkpoint.folder import OCCUPIED, Occupancy, Staging, recover, remove_left_overs, verify
from hf_zero.checkpoint.manifest import MANIFEST, Manifest, digest_file
from hf_zero.errors import CheckpointError
from tests.kit.injection import Forked, calls, kill_at

OLD = [
    "config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors", "model.safetensors.index.json", "optimizer/exp_avg.safetensors",
    "optimizer/optimizer.json", "old/er/state.json",
]  # fmt: skip
NEW = ["config.json", "model.safetensors", "optimizer/optimizer.json", "new/er/still/state.json"]
KEPT = {"notes.txt": "mine", "runs/log.txt": "mine too"}


def fill(folder: Path, names: list[str], version: str) -> Manifest:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{version} {name}")
    return Manifest({name: digest_file(folder / name) for name in names}, {"made": version})


def save(target: Path, names: list[str], version: str) -> None:
    staging = Staging(target)
    staging.open()
    try:
        staging.publish(fill(staging.path, names, version))
    except BaseException:
        staging.discard()
        raise


def content(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def version_of(target: Path, names: dict[str, list[str]], kept: dict[str, str]) -> str | None:
    """Which version the folder is, whole and alone; None where there is none."""
    if not target.exists() or not (target / MANIFEST).exists():
        assert not target.exists() or not [name for name in content(target) if name not in kept]
        return None
    version = verify(target).facts["made"]
    found = content(target)
    found.pop(MANIFEST)
    assert found == {name: f"{version} {name}" for name in names[version]} | kept
    return version


def left_overs(parent: Path) -> list[str]:
    return [p.name for p in parent.rglob(".*")]


def prepare(parent: Path, start: str) -> tuple[Path, dict[str, str]]:
    shutil.rmtree(parent, ignore_errors=True)
    target = parent / "checkpoint"
    parent.mkdir()
    if start == "empty":
        target.mkdir()
    kept = KEPT if start in ("old and files of others", "files of others") else {}
    if start.startswith("old"):
        save(target, OLD, "old")
    for name, text in kept.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return target, kept


def killed(k: int, function, *args) -> bool:
    def run() -> None:
        with calls(kill_at(k)):
            function(*args)

    status, _ = Forked(run).wait()
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.fixture
def fast(tmp_path):
    """A folder in memory where there is one: a sweep is thousands of fsyncs."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path))
    yield place
    shutil.rmtree(place)


STARTS = ["nothing", "empty", "files of others", "old", "old and files of others"]
NAMES = {"old": OLD, "new": NEW, "newer": NEW}


@pytest.mark.parametrize("start", ["nothing", "old"])
def test_everything_is_on_disk_before_the_commit_point_and_the_commit_point_too(start, tmp_path):
    target, _ = prepare(tmp_path / "out", start)
    with calls() as log:
        save(target, NEW, "new")
    staged = (target / ".zero_saving" if start == "old" else target.parent / ".checkpoint.zero_saving") / "checkpoint"
    renames = [index for index, (kind, _) in enumerate(log) if kind == "rename"]
    commit = renames[-1]
    before = {path for kind, path in log[:commit] if kind == "fsync"}
    assert before >= {str(staged / name) for name in [*NEW, MANIFEST, "", "optimizer", "new/er/still", "new/er", "new"]}
    after = [path for kind, path in log[commit:] if kind == "fsync"]
    assert after[0] == str(target if start == "old" else target.parent)
    if start == "old":
        moved = [index for index, (kind, path) in enumerate(log) if kind == "replace"]
        assert log[moved[-1]][1] == str(target / MANIFEST)  # last, after all that it speaks of
        between = {path for kind, path in log[moved[-2] : moved[-1]] if kind == "fsync"}
        assert between >= {str(target / name) for name in ["", "optimizer", "new/er/still", "new/er", "new"]}
        assert str(target) in {path for kind, path in log[moved[-1] :] if kind == "fsync"}


def test_stale_files_of_an_older_kind_of_save_are_gone(tmp_path):
    target = tmp_path / "out"
    stale = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model-00009-of-00009.safetensors"]
    target.mkdir()
    for name in [*stale, "model.txt", "model-card.md", "other-00001-of-00002.safetensors"]:
        (target / name).write_text("not of a save of ours: there is no manifest")
    save(target, NEW, "new")
    assert sorted(set(content(target)) - set(NEW)) == sorted(
        [MANIFEST, "model.txt", "model-card.md", "other-00001-of-00002.safetensors"]
    )
    save(target, OLD, "old")
    assert not (target / "model.safetensors").exists()
    assert not (target / "new").exists()
    save(target, ["adapter_model.safetensors"], "adapter")
    (target / "model.safetensors").write_text("the base model beside an adapter is no rival")
    save(target, ["adapter_model.safetensors"], "adapter")
    assert sorted(content(target)) == sorted(
        [MANIFEST, "adapter_model.safetensors", "model.safetensors", "model.txt", "model-card.md",
         "other-00001-of-00002.safetensors"]
    )  # fmt: skip


def test_a_reader_meets_a_save_that_is_being_put_in_place(tmp_path):
    """Between the commit point and the end only the job itself may move files."""
    target, _ = prepare(tmp_path / "out", "old")
    ready, wait = os.pipe(), os.pipe()

    def hold() -> None:
        def before(index, call, args) -> None:
            if call[0] == "replace":
                os.write(ready[1], b"x")
                os.read(wait[0], 1)

        with calls(before):
            save(target, NEW, "new")

    job = Forked(hold)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointError, match="another job is saving"):
        recover(target)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    recover(target)
    assert version_of(target, NAMES, {}) == "new"


def test_a_job_that_came_late_takes_the_lock_of_the_new_place(tmp_path):
    """Decided on a place beside the target, which another job then made: it must not write beside that job's lock."""
    target = tmp_path / "out"
    late = Staging(target)
    save(target, OLD, "old")
    late.open()
    assert late.root.parent == target
    late.publish(fill(late.path, NEW, "new"))
    assert version_of(target, NAMES, {}) == "new"


def test_left_overs_of_dead_jobs_are_removed(tmp_path):
    for name in ("a", "b"):
        assert killed(12, save, tmp_path / name, NEW, "new")
    assert sorted(left_overs(tmp_path)) == [".a.zero_saving", ".b.zero_saving"]
    remove_left_overs(tmp_path)
    assert left_overs(tmp_path) == []


def test_a_file_system_that_is_mounted_at_the_target(tmp_path):
    target = tmp_path / "volume"
    target.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", target], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        for files, name in ((OLD, "old"), (NEW, "new")):  # it is empty at first
            save(target, files, name)
            verify(target)
        assert left_overs(tmp_path) == []
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_strangers_manifest_that_lists_files_of_a_save(tmp_path):
    target = tmp_path / "checkpoint"
    save(target, OLD, "old")
    manifest = Manifest.read(target)
    manifest.files[f".zero_commit/{MANIFEST}"] = next(iter(manifest.files.values()))
    (target / MANIFEST).write_bytes(manifest.to_bytes())
    save(target, NEW, "new")
    verify(target)
    assert left_overs(tmp_path) == []


def test_a_linked_folder_stays_linked(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for version in ("old", "new"):
        save(tmp_path / "link", NAMES[version], version)
        assert (tmp_path / "link").is_symlink()
        assert version_of(tmp_path / "real", NAMES, {}) == version
    (tmp_path / "dangling").symlink_to("nowhere")
    save(tmp_path / "dangling", NEW, "new")
    assert version_of(tmp_path / "nowhere", NAMES, {}) == "new"
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


def test_discarded_is_as_if_never_begun(tmp_path):
    for start in STARTS:
        target, _ = prepare(tmp_path / "out", start)
        before = content(target) if target.exists() else None
        staging = Staging(target)
        staging.open()
        fill(staging.path, NEW, "new")
        staging.discard()
        staging.discard()
        assert (content(target) if target.exists() else None) == before
        assert left_overs(tmp_path / "out") == []


@pytest.mark.slow
def test_a_reader_in_between_finds_no_mix(fast):
    """Whoever goes by config.json sees the old files, no model, or the new ones; never some of each."""
    parent, k, seen = fast / "out", 0, set()
    while True:
        target, _ = prepare(parent, "old and files of others")
        done = not killed(k, save, target, NEW, "new")
        found = content(target)
        if "config.json" in found:
            version = found["config.json"].split()[0]
            names = {"old": OLD, "new": NEW}[version]
            assert {name: found.get(name) for name in names} == {name: f"{version} {name}" for name in names}
            assert "model.safetensors" not in found or version == "new"
            seen.add(version)
        else:
            seen.add("none")
        if done:
            break
        k += 1
    assert seen == {"old", "none", "new"}


def test_one_job_at_a_time(tmp_path):
    """Refused while another process has the folder; free once that is gone, killed or not; a forked child does not hold it."""
    first = Occupancy(tmp_path / "out")

    def second() -> str:
        try:
            Occupancy(tmp_path / "out").leave()
        except CheckpointError as error:
            return str(error)
        return "free"

    assert "another job is training into" in Forked(second).wait()[1]
    first.leave()
    first.leave()
    assert Forked(second).wait()[1] == "free"
    assert not (tmp_path / "out" / OCCUPIED).exists()

    def killed_holder() -> None:
        Occupancy(tmp_path / "out")
        os.kill(os.getpid(), signal.SIGKILL)

    Forked(killed_holder).wait()
    assert (tmp_path / "out" / OCCUPIED).exists()
    assert second() == "free"


# Links ---------------------------------------------------------------------------------------------------------------


def victim_in(folder: Path) -> Path:
    """Someone's folder, that looks like a checkpoint to whoever gets to it by a link."""
    victim = folder / "victim"
    victim.mkdir()
    save(victim / "inner", NEW, "theirs")
    (victim / "precious.txt").write_text("precious")
    (victim / MANIFEST).write_bytes((victim / "inner" / MANIFEST).read_bytes())
    for name in NEW:
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text(f"theirs {name}")
    return victim


LINKS = {
    "staging inside": "out/.zero_saving",
    "staging beside": ".out.zero_saving",
    "commit": "out/.zero_commit",
    "a folder of the older checkpoint": "out/optimizer",
    "a folder of the new one": "out/new",
    "a folder below": "out/new/er",
}


@pytest.mark.parametrize("where", LINKS)
@pytest.mark.parametrize("start", ["nothing", "old", "files of others"])
def test_a_link_in_the_way_is_named_and_not_followed(where, start, tmp_path):
    target = tmp_path / "out"
    if start == "old":
        save(target, OLD, "old")
    elif start == "files of others":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    elif where != "staging beside":
        pytest.skip("there is nothing to hold the link")
    victim = victim_in(tmp_path)
    link = tmp_path / LINKS[where]
    if link.is_dir():
        shutil.rmtree(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim)
    theirs, before = content(victim), content(tmp_path / "out") if start != "nothing" else {}
    if where == "staging beside" and start != "nothing":  # not in the way, and nobody's left-over
        save(target, NEW, "new")
    else:
        with pytest.raises(CheckpointError, match=f"{link} is a symbolic link"):
            save(target, NEW, "new")
        assert (content(target) if target.exists() else {}) == before
    assert content(victim) == theirs
    assert link.is_symlink()
    if where == "commit":
        for function in (recover, verify):
            with pytest.raises(CheckpointError, match=f"{link} is a symbolic link"):
                function(target)
        assert content(victim) == theirs
    link.unlink()
    save(target, NEW, "newer")
    assert verify(target).facts["made"] == "newer"


def test_links_of_a_replacement_that_was_interrupted(tmp_path):
    """Planted between the kill and the next load."""
    target = tmp_path / "out"
    k = 0
    while not (target / ".zero_commit").is_dir() or not (target / ".zero_commit" / MANIFEST).exists():
        shutil.rmtree(target, ignore_errors=True)
        save(target, OLD, "old")
        killed(k, save, target, NEW, "new")
        k += 1
    victim = victim_in(tmp_path)
    theirs = content(victim)
    for link in (target / "new", target / ".zero_commit" / "more"):
        link.symlink_to(victim)
        with pytest.raises(CheckpointError, match=f"{link} is a symbolic link"):
            recover(target)
        link.unlink()
    assert content(victim) == theirs
    recover(target)
    assert verify(target).facts["made"] == "new"


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
    (target / OCCUPIED).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        Occupancy(target)
    assert not (tmp_path / "elsewhere").exists()


def test_a_save_removes_what_killed_saves_to_other_names_left(tmp_path):
    for name in ("step1", "step2"):
        assert killed(12, save, tmp_path / name, NEW, "new")
    ready, wait = os.pipe(), os.pipe()

    def hold() -> None:
        staging = Staging(tmp_path / "step3")
        staging.open()
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        staging.publish(fill(staging.path, NEW, "slow"))

    job = Forked(hold)
    os.read(ready[0], 1)
    save(tmp_path / "step4", NEW, "new")
    assert left_overs(tmp_path) == [".step3.zero_saving"]  # its job lives
    os.write(wait[1], b"x")
    assert job.wait()[0] == 0
    assert verify(tmp_path / "step3").facts["made"] == "slow"
    assert left_overs(tmp_path) == []


def test_two_saves_that_look_for_left_overs_do_not_refuse_one_another(tmp_path):
    def run(name: str) -> None:
        for number in range(30):
            save(tmp_path / f"{name}{number}", NEW[:1], "new")

    jobs = [Forked(run, name) for name in "ab"]
    assert [job.wait()[0] for job in jobs] == [0, 0]
    assert left_overs(tmp_path) == []
