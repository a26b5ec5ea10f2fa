"""The command `hf-zero`: its commands, and the functions that run them. Flags and statuses are in `commands`.

What runs a command is imported when it is called: help, version and completion load no torch.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from ..version import __version__
from . import commands
from .commands import Options, add

_COMMANDS: dict[str, tuple[type[Options], str]] = {
    "plan": (commands.PlanOptions, "plan:run"),
    "probe": (commands.ProbeOptions, "doctor:probe"),
    "simulate": (commands.SimulateOptions, "simulate:run"),
    "verify": (commands.VerifyOptions, "checkpoints:verify"),
    "export": (commands.ExportOptions, "checkpoints:export"),
    "report": (commands.ReportOptions, "report_page:run"),
    "migrate": (commands.MigrateOptions, "migrate:run"),
    "doctor": (commands.DoctorOptions, "doctor:run"),
}
"""By name: its options, and the function that is given them."""


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit()


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _general(version: _Version = False) -> None:
    pass


def _run(place: str, given: Options) -> int | None:
    status: int | None = pkgutil.resolve_name(f"{__package__}.{place}")(given)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    app = typer.Typer(
        help="Plan what each rank will hold, check and export checkpoints, report what a run took. Exit status: 0 all is well; "
        "1 something is wrong, or the work failed; 2 what was typed cannot be.",
        callback=_general,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, (kind, place) in _COMMANDS.items():
        add(app, name, kind, partial(_run, place))
    try:
        app(None if arguments is None else list(arguments), prog_name="hf-zero")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
