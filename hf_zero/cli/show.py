"""Print tables, text, JSON, and settings to paste, for all commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from ..config import size_text

Row = Sequence[str | Text]


def table(
    console: Console,
    title: str,
    columns: Row,
    *sections: Iterable[Row],
    caption: str = "",
    left: int = 1,
    whole: int = 0,
) -> None:
    """Print a title, sections of rows and a caption.

    Args:
        left: number of columns with text; the others are numbers.
        whole: number of columns whose words are never broken.
    """
    made = Table()
    for place, column in enumerate(columns):
        justify: JustifyMethod = "left" if place < left else "right"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=place < whole)
    for rows in sections:
        for row in rows:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        made.add_section()
    text(console, title, "bold")
    console.print(made)
    if caption:
        text(console, caption, "italic")


def short_size(nbytes: float) -> str:
    """Format a size with three digits: `14.9 GiB`, `120 GiB`."""
    if not nbytes:
        return "0"
    number, unit = size_text(nbytes).split()
    value = float(number)
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def print_to_copy(console: Console, line: str) -> None:
    """Print a line to copy: indented, never folded."""
    console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)


def text(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))


# Settings to paste --------------------------------------------------------------------------------


def as_flags(settings: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """Write settings of `ZeroConfig` and arguments of the Trainer as flags; False values are left out."""
    values = {**{f"zero_{name}": value for name, value in settings.items()}, **trainer}
    words = []
    for name, value in values.items():
        if value is not False:
            given = ",".join(value) if isinstance(value, tuple) else value
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [shlex.quote(str(given))])]
    return " ".join(words)


def as_plugin(settings: Mapping[str, Any]) -> str:
    """Write settings as Python code."""
    return f"zero.ZeroPlugin({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def as_command(
    ranks: int | None, settings: Mapping[str, Any], trainer: Mapping[str, Any], machines: int | None = None
) -> str:
    """Write the command of a script with `zero.ZeroTrainingArguments`. None: not known; machines have 8 ranks at most."""
    if ranks is None:
        machines = 1
    elif machines is None or ranks % machines:
        machines = ranks // 8 if ranks > 8 and ranks % 8 == 0 else 1
    nodes = f"--nnodes {machines} --node-rank NODE --master-addr HOST --master-port 29500 " if machines > 1 else ""
    each = "RANKS" if ranks is None else ranks // machines
    return f"torchrun {nodes}--nproc-per-node {each} train.py --output-dir out {as_flags(settings, trainer)}".strip()


def as_training_arguments(settings: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the same settings as code."""
    yield "TrainingArguments("
    values = {"output_dir": "out", **trainer}
    yield from (f"    {name}={value!r}," for name, value in values.items())
    yield f"    parallelism_config={as_plugin(settings)},"
    yield ")"
