"""Put a save in place: stage it in a temporary folder, then rename it or replace files one by one.

A new folder appears by one rename, after all its files were fsynced. In a folder that already
exists, each new file replaces its predecessor by `os.replace`, and the manifest comes last. A job
that dies between two replacements leaves a folder that `verify` and every load reject: the old
manifest does not match the new files. The configuration is removed first and replaced last, so
`from_pretrained` never reads old and new weights together.

One process, rank 0's, does all of this. It holds a lock (flock) on its staging folder: a second job
that saves to the same target is refused, and staging folders of dead jobs are removed. Staging
folders have random names, so no other user can create or link them in advance.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError
from .files import named_os_errors
from .manifest import MANIFEST, Manifest, check_segments, check_sizes, share
from .weight_kinds import stale_weights, weight_kind

SUFFIX = ".zero_saving"
"""Marks staging folders: `.NAME.zero_saving-*` next to a target, `.zero_saving-*` inside one."""
MIXED = "holds files of the old and of the new save"
"""In the error of a save that failed while it replaced files."""
_GATES = ("config.json", "adapter_config.json")
"""`from_pretrained` refuses a folder that has neither."""
_TRIES, _PAUSE_S = 20, 0.025
"""Another process may hold a lock for a moment, only to check whether its owner lives."""


class Staging:
    """One save of `target`, staged in `path`.

    Attributes:
        target: the folder that will be written; links are resolved.
        root: the staging folder, after `open`.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        # Save through a link to a folder: the folder itself is replaced, not the link.
        path = os.path.abspath(target)  # without a trailing slash, which would hide a link
        self.target = Path(os.path.realpath(path) if os.path.islink(path) else path)
        self.root = Path()
        self._lock: _Lock | None = None
        self._state = ""  # of a target that is being replaced, for the error message

    @property
    def path(self) -> Path:
        """Return the folder to write into."""
        return self.root / self.target.name

    def open(self) -> None:
        """Create the staging folder and remove those of dead jobs.

        Raises:
            CheckpointError: another job is saving here, or the target cannot be written.
        """
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(f"{self.target} is a file. Choose a folder to save into")
        parent, prefix = self.target.parent, f".{self.target.name}{SUFFIX}"
        try:
            with named_os_errors(self.target):
                parent.mkdir(parents=True, exist_ok=True)
                # A folder that exists is kept, also an empty one: it may be a mount point or the current folder, and its
                # parent may be read-only.
                exists = self.target.is_dir()
                self._make_root(*((self.target, SUFFIX) if exists else (parent, prefix)))
                self._remove_left_overs(prefix)
                _refuse_linked_folders(self.target, _files_of(self.target))
                self.path.mkdir()
        except BaseException:
            self.discard()
            raise

    def _make_root(self, parent: Path, prefix: str) -> None:
        """Create and lock the staging folder."""
        while True:
            self.root = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
            with contextlib.suppress(FileNotFoundError):  # removed as a left-over before it was locked
                self._lock = _Lock(self.root)
                if self._lock.acquire() is not False and self.root.exists():
                    return

    def _remove_left_overs(self, prefix: str) -> None:
        """Remove what dead jobs staged here or for neighbours. Raise if another process is saving to the same target."""
        target = self.target
        for _ in range(_TRIES):
            live = _remove_dead({*target.parent.glob(f".*{SUFFIX}*"), *target.glob(f"{SUFFIX}*")} - {self.root})
            if not any(root.parent == target or root.name.startswith(prefix) for root in live):
                return
            time.sleep(_PAUSE_S)
        raise CheckpointError(f"another job is saving to {target} right now. Give each job its own output folder")

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, make everything durable and put it in place of the target.

        Raises:
            CheckpointError: a write or rename failed, or a link is in the way. The message says if some files of the
                target were already replaced; otherwise the target is unchanged.
        """
        try:
            with named_os_errors(self.path / MANIFEST), open(self.path / MANIFEST, "wb") as file:
                file.write(manifest.to_bytes())
            with named_os_errors(self.target):
                stale = (_files_of(self.target) | _rivals(self.target, manifest)) - set(manifest.files)
            self.put_in_place(MANIFEST, stale)
        finally:
            self.discard()

    def put_in_place(self, last: str | None, stale: Collection[str]) -> None:
        """Make the staged files durable, then rename the folder or replace the target's files.

        Args:
            last: the staged file that is replaced last, if any.
            stale: files of an existing target to remove.

        Raises:
            CheckpointError: see `publish`.
        """
        names = [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]
        self._state = ""
        try:
            # Must run before the rename, which can reach the disk first: after a power failure the
            # folder would name files without content.
            sync_tree(self.path)
            try:
                os.rename(self.path, self.target)
            except OSError:
                if not self.target.is_dir() or self.target.is_symlink():
                    raise
                self._replace_files(names, stale, last)
            else:
                _sync(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target} could not be put in place: {error}{self._state}") from error

    def _replace_files(self, names: Collection[str], stale: Collection[str], last: str | None) -> None:
        _refuse_linked_folders(self.target, {*names, *stale})
        for folder in _folders(self.target, names):
            folder.mkdir(parents=True, exist_ok=True)
        gates = [name for name in _GATES if name in names and name != last]
        mixed = f". It {MIXED}, and loads reject it. Save again, or remove it"
        for name in gates:
            (self.target / name).unlink(missing_ok=True)
            self._state = mixed
        # Weights last: weights without a manifest would load as a plain model folder.
        for name in sorted(names, key=lambda name: (weight_kind(name) is not None, name)):
            if name != last and name not in gates:
                os.replace(self.path / name, self.target / name)
                self._state = mixed
        for name in stale:
            (self.target / name).unlink(missing_ok=True)
        for name in gates:
            os.replace(self.path / name, self.target / name)
        for folder in _folders(self.target, stale):
            with contextlib.suppress(OSError):  # it still holds files
                folder.rmdir()
        # All other names must be durable before the manifest, which vouches for them.
        for folder in [*_folders(self.target, names), self.target]:
            _sync(folder)
        if last is not None:
            os.replace(self.path / last, self.target / last)
        self._state = ". Its new files are complete, but a power failure may lose them"
        _sync(self.target)

    def discard(self) -> None:
        """Remove the staging folder and release its lock. May be called again, and after `publish`."""
        if self._lock is not None:
            # Must run under the lock: a job that finds the folder unlocked takes it for a dead job's.
            try:
                shutil.rmtree(self.root, ignore_errors=True)
            finally:  # after Ctrl-C, too: this process may save again
                self._lock.release()


Progress = Callable[[str, int, int], None]
"""Called with (action, bytes done, bytes in all), from any thread, one at a time."""


def counting(progress: Progress, action: str, total: int) -> Callable[[int], None]:
    """Return a function that adds up bytes and reports the sum."""
    done, lock = 0, threading.Lock()

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(action, done, total)

    return add


def verify(folder: str | os.PathLike[str], *, progress: Progress | None = None) -> Manifest:
    """Check every byte of a checkpoint against its manifest, in up to 8 threads, each with a buffer of 8 MiB.

    Args:
        folder: the checkpoint.
        progress: called with ("checking", bytes done, bytes in all), from any thread, one at a time.

    Returns:
        The manifest: `files`, `facts` (world size, stage, …), `total_bytes`.

    Raises:
        CheckpointError: a file is missing, too short or altered, or there is no manifest.
    """
    folder = Path(folder)
    manifest = check_sizes(folder)
    checked = counting(progress or (lambda *_: None), "checking", manifest.total_bytes)
    count = min(8, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count) as pool:
        work = [
            pool.submit(check_segments, folder / name, segments, checked)
            for part in range(count)
            for name, segments in share(manifest, part, count).items()
        ]
        try:
            for future in work:
                future.result()
        finally:
            for future in work:
                future.cancel()
    return manifest


def is_being_saved(folder: Path) -> bool:
    """Remove staging folders of dead jobs in `folder`; return whether it holds others."""
    _remove_dead(folder.glob(f"{SUFFIX}*"))
    return any(folder.glob(f"{SUFFIX}*"))  # a live job's, or unknown: without locks, or another user's


def sync_tree(folder: Path) -> None:
    """Fsync `folder`, and every file and folder below it."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


class _Lock:
    """A lock on a folder. `__del__` releases it too, because Ctrl-C may strike before a caller holds the object."""

    _fd = -1

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def acquire(self) -> bool | None:
        """Return whether the lock was free; None: the file system has no locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = release


def _remove_dead(roots: Iterable[Path]) -> list[Path]:
    """Remove staging folders that no process holds a lock on. Returns those of live jobs."""
    live = []
    for root in roots:
        with contextlib.suppress(OSError):  # gone, a link, or another user's
            lock = _Lock(root)
            try:
                free = lock.acquire()
                if free:
                    shutil.rmtree(root, ignore_errors=True)
                elif free is False:  # without locks, live and dead jobs look the same
                    live.append(root)
            finally:
                lock.release()
    return live


def _files_of(target: Path) -> set[str]:
    """Return the files that the target's manifest lists; none if it is missing or damaged.

    Raises:
        CheckpointError: the disk fails, and stale files could not be found.
    """
    try:
        files = Manifest.read(target).files
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return set()
    return {name for name in files if not PurePosixPath(name).parts[0].startswith(SUFFIX)}


def _rivals(target: Path, manifest: Manifest) -> set[str]:
    """Return older weights that readers would confuse with this save's; warn about other kinds."""
    if not target.is_dir():
        return set()
    folders = {PurePosixPath(name).parent for name in manifest.files if weight_kind(name) is not None}
    present = [
        (folder / path.name).as_posix()
        for folder in folders
        if (target / folder).is_dir()
        for path in (target / folder).iterdir()
    ]
    same, other = stale_weights(present, manifest.files)
    written = {weight_kind(name) for name in manifest.files}
    pickles = [name for name, kind in other.items() if kind.removeprefix("pickled ") in written]
    adapter = [name for name, kind in other.items() if kind == "adapter" and name not in _files_of(target)]
    if adapter:
        warnings.warn(
            f"{target} also holds an adapter from elsewhere ({', '.join(adapter)}): `from_pretrained` adds it to the model "
            "that was saved. Remove these files, or save to another folder",
            stacklevel=2,
        )
    return {*same, *pickles}


def _folders(target: Path, names: Iterable[str]) -> list[Path]:
    """Return the folders below `target` that hold these files, the deepest first."""
    found = {target / parent for name in names for parent in PurePosixPath(name).parents if parent.name}
    return sorted(found, key=lambda folder: -len(folder.parts))


def _refuse_linked_folders(target: Path, names: Iterable[str]) -> None:
    """Raise a CheckpointError if a folder between `target` and one of these files is a link."""
    for folder in _folders(target, names):
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder} is a symbolic link (to {os.readlink(folder)!r}). A checkpoint writes only inside its own folder. "
                "Remove the link, or choose another folder"
            )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
