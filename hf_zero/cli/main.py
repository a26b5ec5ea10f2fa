"""The command `hf-zero`: its commands, and the functions that run them. Flags are in `options`, statuses in `commands`.

What runs a command is imported when it is called: help, version and completion load no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..version import __version__
from .commands import Options, add, argument, flag, print_json
from .options import DoctorOptions, ExportOptions, MigrateOptions, PlanOptions, ProbeOptions, VerifyOptions


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit()


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _general(version: _Version = False) -> None:
    pass


def _plan(options: PlanOptions) -> int:
    from .plan import run

    return run(options)


def _probe(options: ProbeOptions) -> None:
    from .probe import run

    run(options)


def _verify(options: VerifyOptions) -> None:
    from .checkpoints import verify

    verify(options)


def _export(options: ExportOptions) -> None:
    from .checkpoints import export

    export(options)


def _migrate(options: MigrateOptions) -> int:
    from .migrate import run

    return run(options)


def _doctor(options: DoctorOptions) -> int:
    from .doctor import run

    return run(options)


# report -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Predicted against measured, of a run's zero_steps.jsonl.

    Memory by tier, traffic and waiting of a run that was recorded (ZeroCallback, or engine.record), against what was predicted;
    its slowest steps; what to change.

    \b
    Examples:
      hf-zero report out
      hf-zero report out --html report.html
    """

    folder: str = argument("folder with zero_steps.jsonl, or that file", metavar="RUN")
    png: str | None = flag("memory by tier and parts of the step, over time, as a picture", metavar="FILE")
    html: str | None = flag("everything on one page that needs no other file", metavar="FILE")


def _report(options: ReportOptions) -> None:
    from . import show
    from .files import writable
    from .report import read_all, summary

    for path in (options.png, options.html):
        writable(path)
    runs = read_all(Path(options.folder))
    out = summary(runs)
    png = show.picture(runs) if options.png or options.html else b""
    if options.json:
        print_json(out)
    else:
        show.report(out)
    if options.png:
        Path(options.png).write_bytes(png)
    if options.html:
        Path(options.html).write_text(show.page(out, png), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    app = typer.Typer(
        help="Plan what each rank will hold, check and export checkpoints, report what a run took. Exit status: 0 all is well; "
        "1 something is wrong, or the work failed; 2 what was typed cannot be.",
        callback=_general,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    add(app, "plan", PlanOptions, _plan)
    add(app, "probe", ProbeOptions, _probe)
    add(app, "verify", VerifyOptions, _verify)
    add(app, "export", ExportOptions, _export)
    add(app, "report", ReportOptions, _report)
    add(app, "migrate", MigrateOptions, _migrate)
    add(app, "doctor", DoctorOptions, _doctor)
    try:
        app(None if arguments is None else list(arguments), prog_name="hf-zero")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
