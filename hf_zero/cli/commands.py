"""A command made of a dataclass: its fields are flags, its docstring is the help, a refusal is one line and a status.

Nothing here or in `options` imports torch: help, version and completion answer at once.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from ..config import ZeroConfig
from ..errors import ConfigError, ZeroError

OK, WRONG, USAGE = 0, 1, 2
"""Exit statuses of every command. 1: looked, and something is wrong (a damaged file, a plan that does not fit), or the work
failed. 2: what was typed cannot be."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of every command."""

    json: bool = field(default=False, metadata={"help": "print JSON instead of text"})
    debug: bool = field(default=False, metadata={"help": "with an error, its traceback"})


T = TypeVar("T", bound=Options)


def flag(help: str | None = None, default: Any = None, **said: Any) -> Any:
    """A field that is a flag; `said`: `choices`, and keywords of `typer.Option`."""
    return field(default=default, metadata={"help": help, **said})


def setting(name: str, **said: Any) -> Any:
    """The flag of one field of `ZeroConfig`, with its default, help and choices, but for what is `said` here."""
    origin = ZeroConfig.__dataclass_fields__[name]
    default = said.pop("default", origin.default)
    return field(default=default, metadata={**origin.metadata, **said})


def argument(help: str, default: Any = MISSING, **said: Any) -> Any:
    """A field that is typed without a flag."""
    return field(default=default, metadata={"help": help, "is_argument": True, **said})


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def as_flags(values: Mapping[str, Any]) -> str:
    """As they are typed; what is False is left out."""
    given = ((flag_of(name), value) for name, value in values.items() if value is not False)
    return " ".join(name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in given)


def as_plugin(settings: Mapping[str, Any]) -> str:
    """As they are written in a program."""
    return f"zero.ZeroPlugin({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _parameter(item: Field[Any], hint: Any) -> inspect.Parameter:
    """Of a command, from a field of its options."""
    said = {key: value for key, value in item.metadata.items() if key not in ("choices", "is_argument")}
    if choices := item.metadata.get("choices"):
        hint = Literal[tuple(choices)] if item.default is not None else Literal[tuple(choices)] | None
    if item.metadata.get("is_argument"):
        info = typer.Argument(**said)
    else:
        shown = item.default not in (None, False, "")
        info = typer.Option(flag_of(item.name), show_default=shown, **said)
    default = inspect.Parameter.empty if item.default is MISSING else item.default
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )


def add(app: typer.Typer, name: str, options: type[T], run: Callable[[T], int | None]) -> None:
    """A command whose flags are the fields of `options`. `run` returns the exit status; None is 0."""

    def called(**given: Any) -> None:
        try:
            status = run(options(**given))
        except Exception as error:
            if given["debug"]:
                traceback.print_exc()
            print(f"hf-zero: {typed(_line(error), options)}", file=sys.stderr)
            status = USAGE if isinstance(error, ConfigError) else WRONG
        raise typer.Exit(status or OK)

    hints = get_type_hints(options)
    items = sorted(fields(options), key=lambda item: item.name in Options.__dataclass_fields__)  # the common ones last
    made = [_parameter(item, hints[item.name]) for item in items]
    called.__dict__["__signature__"] = inspect.Signature(made)  # what typer reads, and the annotations again
    called.__annotations__.update({each.name: each.annotation for each in made})
    app.command(name, help=inspect.getdoc(options))(called)


def _line(error: Exception) -> str:
    """One line for people. What a file's maker has put into names cannot move the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in _words(error))


def _words(error: Exception) -> str:
    if isinstance(error, ZeroError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error} (not expected; the same with --debug shows where)"


_VALUE = r"""=(?:(True)|'([^']*)'|"([^"]*)"|([\w.]+))"""


def typed(text: str, options: type[Options]) -> str:
    """`text` with settings as the command line has them: `overwrite=True` as `--overwrite`, `stage=3` as `--zero-stage 3`.

    A name by itself becomes a flag only where it cannot be an ordinary word, and never within a path.
    """
    for item in fields(options):
        name = item.name.removeprefix("zero_")
        if item.metadata.get("is_argument") or item.name in Options.__dataclass_fields__:
            continue
        found = re.compile(rf"(?<![\w/.\-]){name}(?:{_VALUE}|{'' if '_' in name else '(?!)'}(?![\w/=]))")

        def as_flag(match: re.Match[str], wanted: str = flag_of(item.name)) -> str:
            value = next((part for part in match.groups()[1:] if part is not None), None)
            return wanted if value is None else f"{wanted} {value}"

        text = found.sub(as_flag, text)
    return text


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))
