"""`hf-zero plan MODEL`: what each rank will hold, before anything is started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .config import STAGES, ZeroConfig
from .errors import ZeroError
from .plan import sketch
from .report import Report
from .version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-zero", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="bytes per rank for every stage, from the model's configuration alone")
    plan.add_argument("model", help="Hub id or local folder; only its config.json is read")
    plan.add_argument("--world-size", type=int, default=8, help="number of ranks (default 8)")
    plan.add_argument("--zero-stage", type=int, choices=sorted(STAGES), help="show the units of this stage too")
    plan.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default="no")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    try:
        return _plan(options)
    except (ZeroError, OSError, ValueError) as error:
        print(f"hf-zero: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from .integrations.transformers import empty_model

    model = empty_model(options.model)
    stages = [options.zero_stage] if options.zero_stage is not None else sorted(STAGES)
    reports = [sketch(model, ZeroConfig(stage=s), options.world_size, options.mixed_precision) for s in stages]
    if options.json:
        print(json.dumps([report.to_dict() for report in reports], indent=1))
    elif options.zero_stage is not None:
        print(reports[0])
    else:
        Console().print(_table(reports))
    return 0


def _table(reports: Sequence[Report]) -> Table:
    first = reports[0]
    table = Table(title=f"{first.parameters:,} parameters on {first.world_size} ranks, AdamW, GiB per rank")
    for column in ("stage", "parameters", "gradients", "optimizer", "sum", "gathered in passing"):
        table.add_column(column, justify="right")
    for report in reports:
        states = report.predicted
        sizes = (states.parameters, states.gradients, states.optimizer, states.total, states.gathered)
        table.add_row(str(report.stage), *(f"{size / (1 << 30):.3f}" for size in sizes))
    return table


if __name__ == "__main__":
    sys.exit(main())
