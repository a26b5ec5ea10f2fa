"""Read untrusted files: regular files inside their folder, of bounded size, with checked values.

Readers of a checkpoint open files with `open_regular`, resolve names with `inside`, read JSON with
`read_json` and take values out of it with `Field`. Each error names the file and the key.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

T = TypeVar("T")
_MOST_SHOWN = 60
MAX_JSON_BYTES = 128 << 20
MAX_JSON_VALUES = 8 << 20
"""Commas, colons and opening brackets. Each may become a Python object of up to 64 bytes: half a GiB at most."""


@contextmanager
def named_os_errors(path: str | os.PathLike[str], done: str = "written") -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file; its own message often lacks it.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be {done}: {error}") from error


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading. Refuse any other: opening a pipe without a writer would hang.

    Raises:
        CheckpointError: a folder, a pipe or a device.
        OSError: the file cannot be opened.
    """
    _refuse_special(path, os.stat(path).st_mode)
    # O_NONBLOCK: if a pipe has replaced the file since, opening it must not wait.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(path, os.fstat(fd).st_mode)
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def _refuse_special(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}.get(stat.S_IFMT(mode), "device")
        raise CheckpointError(f"{os.fspath(path)} cannot be read: it is a {kind}, expected a plain file")


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Return `folder/name`, which may be missing.

    Links may lead anywhere inside the folder, and from a snapshot in the Hub's cache to that cache's blobs.

    Raises:
        CheckpointError: the path leads out of the folder.
    """
    path, home = Path(folder) / name, Path(os.path.realpath(folder))
    found = Path(os.path.realpath(path))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(each == found or each in found.parents for each in homes):
        raise CheckpointError(
            f"{path} leads out of {folder}, to {found}. Links must stay inside a checkpoint: copy the file there"
        )
    return path


def read_bounded(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Read a small file completely.

    Raises:
        CheckpointError: it has more than `limit_bytes`, or is not a regular file.
        OSError: it cannot be opened or read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise CheckpointError(f"{os.fspath(path)} has {size} bytes, more than the {limit_bytes} that are allowed")
        return file.read(size)  # a bound: the file may have grown since


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. A link is replaced, not followed.

    Raises:
        OSError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(fresh, "xb") as file:
        file.write(data)
    os.replace(fresh, path)


def parse_json(text: bytes, *, unique: bool = False) -> Any:
    """Parse untrusted JSON, which may be built to exhaust memory.

    Args:
        text: the JSON text.
        unique: refuse objects with duplicate keys, which readers resolve differently.

    Raises:
        ValueError: invalid JSON, too many values, or too deep nesting.
    """
    # Must be counted before parsing: Python's objects take many times the bytes of their text.
    count = sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))
    if count > MAX_JSON_VALUES:
        raise ValueError(f"{count} values, more than the {MAX_JSON_VALUES} that are allowed")
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in made if names.count(name) > 1)!r}")
    return made


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object from a file of bounded size.

    Raises:
        CheckpointError: the file is missing, not regular, too large, no JSON object, or has duplicate keys.
    """
    try:
        value = parse_json(read_bounded(path, MAX_JSON_BYTES), unique=True)
    except FileNotFoundError:
        raise CheckpointError(f"{os.fspath(path)} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{os.fspath(path)}: expected a JSON object, found a {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a file. Methods raise a CheckpointError with the file, the key and the value found.

    Attributes:
        path: the file.
        value: the value.
        key: its place in the file, such as `groups[0].lr`; empty for the whole file.
    """

    path: Path
    value: Any
    key: str = ""

    def refused(self, expected: str) -> CheckpointError:
        """Return the error for a value that is not as expected."""
        found = repr(self.value)
        if len(found) > _MOST_SHOWN:
            found = f"{found[:_MOST_SHOWN]}… ({type(self.value).__name__})"
        return CheckpointError(f"{self.path}: {self.key or 'the file'} is {found}, expected {expected}")

    def __getitem__(self, name: str) -> Field:
        """Return an entry of an object, which must exist."""
        entries = self._checked(dict, "an object")
        if name not in entries:
            raise CheckpointError(f"{self.path}: {self.key or 'the file'} has no entry {name!r}")
        return self._entry(name)

    def _entry(self, name: str) -> Field:
        return Field(self.path, self.value[name], f"{self.key}.{name}" if self.key else name)

    def entries(self) -> Iterator[tuple[str, Field]]:
        """Yield the entries of an object."""
        for name in self._checked(dict, "an object"):
            yield name, self._entry(name)

    def items(self) -> list[Field]:
        """Return the items of a list."""
        if not isinstance(self.value, (list, tuple)):
            raise self.refused("a list")
        return [Field(self.path, item, f"{self.key}[{index}]") for index, item in enumerate(self.value)]

    def text(self) -> str:
        """Return a string."""
        return self._checked(str, "text")

    def texts(self) -> list[str]:
        """Return a list of strings."""
        return [item.text() for item in self.items()]

    def integer(self, most: int = 2**63 - 1) -> int:
        """Return an integer from 0 to `most`."""
        if type(self.value) is not int or not 0 <= self.value <= most:
            raise self.refused(f"a whole number from 0 to {most}")
        return self.value

    def shape(self) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(item.integer() for item in self.items())

    def finite(self) -> Field:
        """Check for a number that is neither NaN nor infinite nor a boolean."""
        if not is_number(self.value) or not math.isfinite(self.value):
            raise self.refused("a finite number")
        return self

    def like(self, example: Any) -> Field:
        """Check that the value has the type of `example`: a number, a list of the same length, a boolean, a string.

        None and booleans may replace each other: options of torch's optimizers have three states.
        """
        found = self.value
        if getattr(found, "ndim", None) == 0:  # a tensor of one element
            return Field(self.path, found.item(), self.key).like(example)
        if isinstance(example, bool) or (example is None and isinstance(found, bool)):
            if found is not None and not isinstance(found, bool):
                raise self.refused("true, false or null")
        elif is_number(example):
            if math.isfinite(example) or not is_number(found):
                self.finite()
        elif isinstance(example, str):
            self.text()
        elif isinstance(example, (list, tuple)):
            items = self.items()
            if len(items) != len(example):
                raise self.refused(f"a list of {len(example)}")
            for item, each in zip(items, example):
                item.like(each)
        elif example is None and found is not None and not isinstance(found, list):
            self.finite()
        return self

    def read_by(self, reader: Callable[[Any], T], expected: str) -> T:
        """Return `reader(value)`. Reports any exception as a refused value."""
        try:
            return reader(self.value)
        except CheckpointError:
            raise
        except Exception as error:  # code that trusts its input can raise anything
            raise self.refused(f"{expected} ({type(error).__name__}: {error})") from error

    def _checked(self, kind: type[T], expected: str) -> T:
        if not isinstance(self.value, kind):
            raise self.refused(expected)
        return self.value


def is_of_torch(value: Any) -> bool:
    """Return whether the class is torch's own. Attributes of a user's class may change their types and lengths."""
    return type(value).__module__.startswith("torch.")


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, but not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
