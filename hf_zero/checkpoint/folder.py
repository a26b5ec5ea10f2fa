"""A folder's new content that appears as a whole: staged beside it, then one rename.

    staging       `.NAME.zero_saving/NAME/` beside the target, or `.zero_saving/NAME/` inside one that exists
    commit point  the staged folder is renamed to the target; where the target has content of its own, to `.zero_commit`
                  inside it, from where its files are then moved into place (`recover` goes on where that was interrupted)

The staging folder is locked (flock) while its owner lives, so that a second job is refused and what a killed one left, here
or beside other targets in the same parent, is recognised and removed. All of this is done by one process, rank 0's.

Nothing outside of the target and its staging folders is written, moved or removed: a target that is itself a link is followed
once, to the folder that it names; a symbolic link in the way of anything else is refused by name (`refuse_link`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError
from .kinds import kind_of, stale_weights
from .manifest import MANIFEST, Manifest, check_segments, check_sizes, share

SUFFIX = ".zero_saving"
OCCUPIED = "_zero_lock"
"""Begins with an underscore: what the Trainer pushes to the Hub leaves such files out."""
_COMMIT = ".zero_commit"
_EXPORT_SUFFIX = ".zero_export"
_PATIENCE_S = 0.5
"""How long a lock may be held by who only looks whether a folder was left behind."""
_GATES = ("config.json", "adapter_config.json")


class Staging:
    """One save of `target`."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        # A link to a folder: the folder itself is what is replaced.
        self.target = Path(os.path.realpath(target) if os.path.islink(target) else os.path.abspath(target))
        self._beside = self.target.parent / f".{self.target.name}{SUFFIX}"
        self.root = self._beside
        self._lock = -1

    @property
    def path(self) -> Path:
        """Where to write, once open."""
        return self.root / self.target.name

    def open(self) -> None:
        """Make the folder and lock it; finish or remove what a killed job left.

        Raises:
            CheckpointError: another job is saving here; the target cannot be written.
        """
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(f"{self.target} is a file, expected a folder to save into")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._enter()
            if self.target.is_dir():
                recover(self.target, locked=True)
                _refuse_linked_folders(self.target, _files_of(self.target))  # before anything is written
            remove_left_overs(self.target.parent, but=self.root)
            _empty(self._lock)
            self.path.mkdir()
        except OSError as error:
            self.discard()
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error
        except CheckpointError:
            self.discard()
            raise

    def _enter(self) -> None:
        """Take the lock of the place that fits the target as it is then: another job may have made it meanwhile."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self.root = self._place()
            self.root.mkdir(exist_ok=True)
            held = _lock(self.root)
            if held is not None:
                self._lock = held[0]
                # Asked again under the lock: two jobs, one before and one after the target got content, lock two folders.
                if self._place() == self.root:
                    return
                self.discard()
            elif time.monotonic() > deadline:
                raise _taken(self.root)
            else:
                time.sleep(_PATIENCE_S / 20)

    def _place(self) -> Path:
        # A rename does not lead from one file system to another: where one is mounted, its parent is of another.
        inside = self.target.is_dir() and (os.path.ismount(self.target) or any(self.target.iterdir()))
        return self.target / SUFFIX if inside else self._beside

    def publish(self, manifest: Manifest) -> None:
        """The staged files become the target, all or none. They and the manifest are on disk before.

        Raises:
            CheckpointError: a write or rename failed, or a link is in the way; the target is as it was, or, from the commit
                point on, as it will be once it is loaded from or saved to again.
        """
        try:
            if self.target.is_dir():
                refuse_link(self.target / _COMMIT)
                _refuse_linked_folders(self.target, {*manifest.files, *_files_of(self.target)})
            with naming(self.path / MANIFEST), open(self.path / MANIFEST, "wb") as file:
                file.write(manifest.to_bytes())
            # Before the rename: it may reach the disk first, and after a power failure name files that have no content.
            sync_tree(self.path)
            self.target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(self.path, self.target)
            except OSError:
                if not self.target.is_dir() or self.target.is_symlink():
                    raise
                os.rename(self.path, self.target / _COMMIT)
                # The commit point is durable before a single old file is touched: from there on only the new ones are whole.
                _sync(self.target)
                _roll_forward(self.target)
            else:
                _sync(self.target.parent)
        except OSError as error:
            is_committed = (self.target / _COMMIT).is_dir()
            rest = "; its new files are complete, the next load or save moves them" if is_committed else ""
            raise CheckpointError(f"{self.target} could not be put in place: {error}{rest}") from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what is staged and let go of the lock. Safe to call again, and after `publish`."""
        if self._lock >= 0:
            # While it is locked: the next owner may have staged its files there as soon as the lock is gone.
            shutil.rmtree(self.root, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def recover(target: str | os.PathLike[str], locked: bool = False) -> None:
    """Finish a save into an existing folder that was interrupted after its commit point; else nothing.

    Raises:
        CheckpointError: it is still going on, the folder cannot be written, or a link is in the way.
    """
    target = Path(target)
    commit = target / _COMMIT
    refuse_link(commit)
    if not commit.is_dir():
        return
    held = -1
    try:
        if not locked:
            root = target / SUFFIX
            root.mkdir(exist_ok=True)
            taken = _lock(root)
            if taken is None:
                raise _taken(root)
            held = taken[0]
            if not commit.is_dir():  # who had the lock before has finished it
                return
        _roll_forward(target)
        if not locked:
            shutil.rmtree(target / SUFFIX, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{target} was being replaced when its job was killed; the new files are in {commit} and could not be moved into "
            f"place: {error}"
        ) from error
    finally:
        if held >= 0:
            os.close(held)


def verify(
    folder: str | os.PathLike[str], *, threads: int | None = None, progress: Callable[[int], None] | None = None
) -> Manifest:
    """Check every byte of a checkpoint against its manifest; first finish a replacement that was interrupted.

    Args:
        threads: default: the processors this process may use, at most 8. One buffer of 8 MiB each.
        progress: called with the bytes checked since the last call, from any thread.

    Returns:
        The manifest: `files` by name, `facts` (world size, stage, …), `total_bytes`.

    Raises:
        CheckpointError: names the file that is missing, short, or altered, or says that there is no manifest.
    """
    recover(folder)
    folder = Path(folder)
    manifest = check_sizes(folder)
    count = max(1, threads if threads is not None else min(8, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(count) as pool:
        work = [
            pool.submit(check_segments, folder / name, segments, progress or (lambda _: None))
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


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A folder of other makers' files: an empty one, beside `target`, that becomes it when the block ends well.

    Of what `target` held, only what the block puts into the new folder is left.
    Killed between the two renames, the older content comes back with the next call.

    Raises:
        CheckpointError: another job replaces it, it cannot be written, or a link is in the way.
    """
    root = target.parent / f".{target.name}{_EXPORT_SUFFIX}"
    older, staged = root / "older", root / "staged"
    with naming(target):
        refuse_link(root)
        root.mkdir(parents=True, exist_ok=True)
        held = _lock(root)
    if held is None:
        raise CheckpointError(f"another export to {target} is going on")
    try:
        for path in (older, staged):
            refuse_link(path)
        with naming(target):
            if older.is_dir() and not target.exists():
                os.rename(older, target)
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
            yield staged
            if target.exists():
                shutil.rmtree(older, ignore_errors=True)
                os.rename(target, older)
            os.rename(staged, target)
        shutil.rmtree(older, ignore_errors=True)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        with contextlib.suppress(OSError):  # `older` is still there where a rename failed
            root.rmdir()
        os.close(held[0])


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Hard links in `target`, or copies where the file system has no links."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name, follow_symlinks=False)
        except OSError:
            shutil.copy2(source / name, target / name, follow_symlinks=False)


class Occupancy:
    """A folder that one job at a time works in. A file in it is locked while the job lives; forked children do not hold it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Take it.

        Raises:
            CheckpointError: another job has it.
        """
        self._path = Path(folder) / OCCUPIED
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # lockf: a forked child (a worker of a data loader) that outlives the job does not hold the lock.
            while (held := _lock(self._path, os.O_RDWR | os.O_CREAT, fcntl.lockf)) is None:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"another job is training into {self._path.parent} right now: the two would drop each other's "
                        "checkpoints. Give each an output folder of its own, or wait for the other to end"
                    )
                time.sleep(_PATIENCE_S / 20)  # or its last owner has just removed the file
        except OSError as error:
            raise CheckpointError(f"{self._path.parent} cannot be written: {error}") from error
        self._fd = held[0]

    def leave(self) -> None:
        """Give it up. Safe to call again."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()  # while it is locked, or it would be the file of who comes next
            os.close(self._fd)
            self._fd = -1


def remove_left_overs(folder: str | os.PathLike[str], but: Path | None = None) -> None:
    """Staging folders directly inside `folder` whose job is dead; not `but`."""
    with contextlib.suppress(OSError):  # a parent that may not be listed
        for root in Path(folder).glob(f".*{SUFFIX}"):
            with contextlib.suppress(CheckpointError, OSError):
                held = None if root == but else _lock(root)
                if held is not None:
                    # Locked, so nobody's; who has just made it, and not locked it yet, makes it again.
                    if held[1]:  # else there is no telling whether its job lives
                        shutil.rmtree(root, ignore_errors=True)
                    os.close(held[0])


def refuse_link(path: Path) -> None:
    """Raises:
    CheckpointError: `path` is a symbolic link.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link (to {os.readlink(path)!r}), where a folder or file of its own is expected: what it "
            "leads to is nothing that a checkpoint may write, move or remove. Remove the link, or choose another folder"
        )


def _refuse_linked_folders(target: Path, names: Iterable[str]) -> None:
    """No folder on the way from `target` to these files is a link."""
    for folder in _folders(target, names):
        refuse_link(folder)


def _files_of(target: Path) -> set[str]:
    """What the checkpoint in `target` says it consists of; nothing where there is none, or a damaged one.

    Without what lies in our own folder inside of it: a stranger's manifest may name what is about to be moved out of there.

    Raises:
        OSError: the disk fails: its files would stay beside those of the next one.
    """
    try:
        files = Manifest.read(target).files
        return {name for name in files if PurePosixPath(name).parts[0] != _COMMIT}
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return set()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A disk that fails in here is told of with the file: the system's own message often lacks it.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _lock(
    path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY, take: Callable[[int, int], object] = fcntl.flock
) -> tuple[int, bool] | None:
    """A folder (or file), open and locked, and whether its file system has locks; None where another job has it, or it is gone.

    `filelock` would not do: it locks a file beside, which stays or can be removed by others, where here the folder itself is
    what must still be the same one afterwards.

    Raises:
        CheckpointError: it is a link, or somebody else's.
        OSError: it cannot be opened.
    """
    refuse_link(path)
    fd = -1
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o644)
        _refuse_others(path, fd)
        take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have removed it between the opening and the lock: then the lock is on a folder that nobody finds.
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            return fd, True
    except (FileNotFoundError, BlockingIOError):
        pass
    except CheckpointError:
        os.close(fd)
        raise
    except OSError:
        if fd < 0:
            refuse_link(path)  # it has become one
            raise
        return fd, False  # better unguarded than not at all
    if fd >= 0:
        os.close(fd)
    return None


def _refuse_others(path: Path, fd: int) -> None:
    """In a folder that all users share (`/tmp`), somebody else may have made it, and could change what is put into it.

    Anywhere else only those can have made it who may move whatever lies there.
    """
    shared, found = os.stat(path.parent), os.fstat(fd)
    if shared.st_mode & stat.S_ISVTX and shared.st_mode & stat.S_IWOTH and found.st_uid != os.geteuid():
        raise CheckpointError(
            f"{path} belongs to another user (number {found.st_uid}), who could change what is put there, in a folder that all "
            "users share: take a folder of your own"
        )


def _taken(root: Path) -> CheckpointError:
    return CheckpointError(
        f"another job is saving to {root.parent if root.name == SUFFIX else root.parent / root.name[1 : -len(SUFFIX)]} right "
        "now: give each job an output folder of its own"
    )


def _roll_forward(target: Path) -> None:
    """Move the committed files into place. May be repeated from any point."""
    commit = target / _COMMIT
    if not (commit / MANIFEST).exists():  # it is the last to be moved: only the empty shell is left
        shutil.rmtree(commit, ignore_errors=True)
        return
    # The target's manifest is the old one until the end: what of the old files may go is known on every repetition.
    manifest, older = Manifest.read(commit), _files_of(target)
    moved = []
    for path in commit.rglob("*"):
        refuse_link(path)
        if path.is_file():
            moved.append(path.relative_to(commit).as_posix())
    _refuse_linked_folders(target, {*moved, *manifest.files, *older})
    # Without its configuration nobody takes the folder for a model: a reader that comes between fails, and gets no mix.
    gates = [name for name in _GATES if name in moved]
    for name in gates:
        (target / name).unlink(missing_ok=True)
    for name in moved:
        if name != MANIFEST and name not in gates:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(commit / name, target / name)
    stale = (older | _rivals(target, manifest)) - set(manifest.files)
    for name in stale:
        (target / name).unlink(missing_ok=True)
    for name in gates:
        os.replace(commit / name, target / name)
    for folder in _folders(target, stale):
        with contextlib.suppress(OSError):  # others have files there
            folder.rmdir()
    # All names before the manifest's: it says that all of them are there, and ends every repetition.
    for folder in [*_folders(target, manifest.files), target]:
        _sync(folder)
    os.replace(commit / MANIFEST, target / MANIFEST)
    _sync(target)
    shutil.rmtree(commit, ignore_errors=True)


def _folders(target: Path, names: Iterable[str]) -> list[Path]:
    """The folders below `target` that hold these files, the deepest first."""
    found = {target / parent for name in names for parent in PurePosixPath(name).parents if parent.name}
    return sorted(found, key=lambda folder: -len(folder.parts))


def _rivals(target: Path, manifest: Manifest) -> set[str]:
    """Older weights that a reader of the folder would take for those of this save. Other kinds stay, with a warning."""
    folders = {PurePosixPath(name).parent for name in manifest.files if kind_of(name) is not None}
    present = [(folder / path.name).as_posix() for folder in folders for path in (target / folder).iterdir()]
    same, other = stale_weights(present, manifest.files)
    written = {kind_of(name) for name in manifest.files}
    pickles = [name for name, kind in other.items() if kind.removeprefix("pickled ") in written]
    adapter = [name for name, kind in other.items() if kind == "adapter" and name not in _files_of(target)]
    if adapter:
        warnings.warn(
            f"{target} also holds an adapter from elsewhere ({', '.join(adapter)}): `from_pretrained` adds it to the model "
            "that was saved. Remove these files, or save to another folder",
            stacklevel=2,
        )
    return {*same, *pickles}


def _empty(fd: int) -> None:
    """The folder that is open as `fd`, whatever its name has come to mean since."""
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=fd)
        else:
            shutil.rmtree(name, dir_fd=fd)


def sync_tree(folder: Path) -> None:
    """Every file and folder below, and `folder` itself, is on disk afterwards."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
