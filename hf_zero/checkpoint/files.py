"""Files that a stranger may have made: plain ones, inside their folder, read within limits, never waited for; values checked.

Whatever reads a file of a checkpoint opens it with `open_plain`, finds it with `inside`, reads JSON with `read_json`,
and takes values out of it by `Field`: what is refused is named by its file and its key.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

T = TypeVar("T")
_MOST_SHOWN = 60
MAX_JSON_BYTES = 128 << 20
MAX_JSON_VALUES = 8 << 20
"""Commas, colons and opening brackets. Each may stand for an object of Python's, of up to 64 bytes: half a GiB at most."""
_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}


def open_plain(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from. What is no plain file is not opened: a pipe without a writer would wait for ever.

    Raises:
        CheckpointError: a folder, a pipe, a device.
        OSError: it cannot be opened.
    """
    _refuse_odd(path, os.stat(path).st_mode)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # O_NONBLOCK: the open itself does not wait, should it be a pipe by now.
        _refuse_odd(path, os.fstat(fd).st_mode)  # it may have been replaced meanwhile
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def _refuse_odd(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise CheckpointError(f"{os.fspath(path)} cannot be read: it is a {kind}, expected a plain file")


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """`folder/name`, which need not be there.

    Links may lead to where they like inside of the folder, and from a snapshot in the Hub's cache to that cache's blobs.

    Raises:
        CheckpointError: it leads out of the folder.
    """
    path, home = Path(folder) / name, Path(os.path.realpath(folder))
    found = Path(os.path.realpath(path))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(each == found or each in found.parents for each in homes):
        raise CheckpointError(
            f"{path} leads out of {folder}, to {found}: a link in a folder of weights or a checkpoint must stay inside of it. "
            "Put the file itself there"
        )
    return path


def read_bounded(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """A whole small file.

    Raises:
        CheckpointError: it has more than `limit_bytes`, or is no plain file.
        OSError: it cannot be opened or read.
    """
    with open(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise CheckpointError(
                f"{os.fspath(path)} has {size} bytes, more than the {limit_bytes} that such a file may have"
            )
        return file.read(size)  # not to its end: it may have grown since


def replace_file(path: Path, data: bytes) -> None:
    """The file is there whole, or as it was. A link in its place is replaced, not followed.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(fresh, "xb") as file:
        file.write(data)
    os.replace(fresh, path)


def parse_json(text: bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text whose maker may wish us to run out of memory.

    Args:
        unique: refuse objects that have a key twice: readers differ in which one they take.

    Raises:
        ValueError: no JSON, too many values, nested too deeply.
    """
    # Before parsing, and without it: an object of Python takes many times the bytes that stand for it.
    count = sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))
    if count > MAX_JSON_VALUES:
        raise ValueError(f"{count} values, more than the {MAX_JSON_VALUES} that such a file may have")
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return made


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        CheckpointError: missing, no plain file, too large, no JSON object, or an object with a key twice.
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


# Values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a file.

    Every method below raises a CheckpointError that names the file, the key, what was expected and what was found.
    """

    path: Path
    value: Any
    key: str = ""
    """Where in the file: `groups[0].lr`. Empty: the whole."""

    def refused(self, expected: str) -> CheckpointError:
        found = repr(self.value)
        if len(found) > _MOST_SHOWN:
            found = f"{found[:_MOST_SHOWN]}… ({type(self.value).__name__})"
        return CheckpointError(f"{self.path}: {self.key or 'the file'} is {found}, expected {expected}")

    def __getitem__(self, name: str) -> Field:
        """An entry of an object, which must be there."""
        entries = self._is(dict, "an object")
        if name not in entries:
            raise CheckpointError(f"{self.path}: {self.key or 'the file'} has no entry {name!r}")
        return self._entry(name)

    def _entry(self, name: str) -> Field:
        return Field(self.path, self.value[name], f"{self.key}.{name}" if self.key else name)

    def entries(self) -> Iterator[tuple[str, Field]]:
        """Of an object."""
        for name in self._is(dict, "an object"):
            yield name, self._entry(name)

    def items(self) -> list[Field]:
        """Of a list."""
        found = self.value
        if not isinstance(found, (list, tuple)):
            raise self.refused("a list")
        return [Field(self.path, item, f"{self.key}[{place}]") for place, item in enumerate(found)]

    def text(self) -> str:
        return self._is(str, "text")

    def texts(self) -> list[str]:
        return [item.text() for item in self.items()]

    def integer(self, most: int = 2**63 - 1) -> int:
        """From 0 to `most`."""
        if type(self.value) is not int or not 0 <= self.value <= most:
            raise self.refused(f"a whole number from 0 to {most}")
        return self.value

    def shape(self) -> tuple[int, ...]:
        return tuple(item.integer() for item in self.items())

    def finite(self) -> Field:
        """A number that is not NaN, nor infinite, nor a truth value."""
        if not is_number(self.value) or not math.isfinite(self.value):
            raise self.refused("a finite number")
        return self

    def like(self, example: Any) -> Field:
        """A value of the kind that `example` is: a number for a number, as many for several, a truth value for one.

        None may stand for a truth value or the other way round: options of torch's optimizers have three states.
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
        """What `reader` makes of the value; where it fails, the value is refused."""
        try:
            return reader(self.value)
        except CheckpointError:
            raise
        except Exception as error:  # a stranger's value in code that trusts it: whatever that raises
            raise self.refused(f"{expected} ({type(error).__name__}: {error})") from error

    def _is(self, kind: type[T], expected: str) -> T:
        if not isinstance(self.value, kind):
            raise self.refused(expected)
        return self.value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
