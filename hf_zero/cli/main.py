"""The command `hf-zero`: its commands, and the functions that run them. Flags are in `options`, statuses in `commands`.

What runs a command is imported when it is called: help, version and completion load no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..version import __version__
from .commands import Options, add, argument, flag, print_json
from .options import (
    DoctorOptions,
    ExportOptions,
    MigrateOptions,
    PlanOptions,
    ProbeOptions,
    SimulateOptions,
    VerifyOptions,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit()


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _general(version: _Version = False) -> None:
    pass


def _run(module: str, function: str, options: Options) -> int | None:
    status: int | None = getattr(importlib.import_module(f".{module}", __package__), function)(options)
    return status


# report -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Planned against counted, of a run's zero_steps.jsonl: the verdict, then the figures; also of a run in progress.

    Memory by tier, throughput, traffic and waiting of a run that was recorded (ZeroCallback, or engine.record), of all ranks;
    its slowest steps; what to change. Of two runs also what differs.

    \b
    Examples:
      hf-zero report out
      hf-zero report out --html report.html
      hf-zero report out other --html both.html
    """

    folder: str = argument("folder with zero_steps.jsonl, or that file", metavar="RUN")
    other: str | None = argument("a second run, to compare with", default=None, metavar="RUN2")
    png: str | None = flag("memory by tier and parts of the step, over time, as a picture", metavar="FILE.png")
    html: str | None = flag("everything on one interactive page that needs no other file", metavar="FILE.html")


def _report(options: ReportOptions) -> None:
    from ..errors import ConfigError
    from .files import writable
    from .report import reading

    for path in (options.png, options.html):
        writable(path)
    if options.png and Path(options.png).suffix.lower() != ".png":
        raise ConfigError(f"--png {options.png}: expected a name that ends in .png")
    with reading(filter(None, (options.folder, options.other))):
        _show_report(options)


def _show_report(options: ReportOptions) -> None:
    from . import report_text
    from .report import differences, read_all, summary

    runs = [read_all(Path(folder)) for folder in (options.folder, options.other) if folder]
    outs = [summary(ranks) for ranks in runs]
    drawable = all(out["steps"] for out in outs)
    differ = differences(*outs) if len(outs) == 2 and drawable else []
    if drawable and (options.png or options.html):  # first: what cannot be drawn is refused before tables are shown
        from . import report_page

        if options.png:
            Path(options.png).write_bytes(report_page.picture(runs[0]))
        if options.html:
            Path(options.html).write_text(report_page.page(runs, outs, differ), encoding="utf-8")
    if options.json:
        print_json({"runs": outs, "differences": differ} if options.other else outs[0])
    else:
        report_text.show(outs, differ)
        if not drawable and (options.png or options.html):
            print("hf-zero: nothing to draw yet", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    app = typer.Typer(
        help="Plan what each rank will hold, check and export checkpoints, report what a run took. Exit status: 0 all is well; "
        "1 something is wrong, or the work failed; 2 what was typed cannot be.",
        callback=_general,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    add(app, "plan", PlanOptions, partial(_run, "plan", "run"))
    add(app, "probe", ProbeOptions, partial(_run, "probe", "run"))
    add(app, "simulate", SimulateOptions, partial(_run, "simulate", "run"))
    add(app, "verify", VerifyOptions, partial(_run, "checkpoints", "verify"))
    add(app, "export", ExportOptions, partial(_run, "checkpoints", "export"))
    add(app, "report", ReportOptions, _report)
    add(app, "migrate", MigrateOptions, partial(_run, "migrate", "run"))
    add(app, "doctor", DoctorOptions, partial(_run, "doctor", "run"))
    try:
        app(None if arguments is None else list(arguments), prog_name="hf-zero")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
