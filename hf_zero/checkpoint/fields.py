"""Values of JSON files, checked where they are taken out: what is refused is named by its file and its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

T = TypeVar("T")
_MOST_SHOWN = 60


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
        if not _is_number(self.value) or not math.isfinite(self.value):
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
        elif _is_number(example):
            if math.isfinite(example) or not _is_number(found):
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
