"""hf-zero plan: what each rank will hold. probe: how fast this machine is. verify: is every byte of a checkpoint there.
export: a clean model of it. report: what a run took, against what was predicted."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from ..checkpoint.export import DTYPES, export, verified
from ..checkpoint.export import Progress as Note
from ..errors import ZeroError
from ..version import __version__
from .plan import add_commands
from .report import add_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-zero", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_commands(commands, _cache_folder())
    _add_verify(commands)
    _add_export(commands)
    add_command(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ZeroError, OSError, ValueError) as error:
        print(f"hf-zero: {error}", file=sys.stderr)
        return 2 if options.command in ("plan", "probe") else 1


def _cache_folder() -> Path:
    """Where programs keep what they can make again (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_zero"


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "verify",
        help="check every byte of a checkpoint against its manifest",
        description="Check every byte of a checkpoint against its manifest. Exit status 0: it is whole; 1: stderr names the "
        "file that is missing, short or altered.",
    )
    check.add_argument("folder", metavar="DIR", help="checkpoint folder, with zero_manifest.json")
    check.set_defaults(run=_verify)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    out = commands.add_parser(
        "export",
        help="make a clean model folder of a checkpoint, here or on the Hub",
        description="Make a clean model folder of a checkpoint, here or on the Hub: weights, configuration, tokenizer, code "
        "and model card, without optimizer and training state. The checkpoint is verified first.",
    )
    out.add_argument("folder", metavar="DIR", help="checkpoint folder, or any folder that from_pretrained loads")
    out.add_argument("--output", metavar="DIR", help="where to; one that an earlier export made is replaced")
    out.add_argument("--push-to-hub", metavar="USER/REPO", help="upload; made where it is not there")
    out.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as they are)")
    out.add_argument(
        "--max-shard-size", default="50GB", metavar="SIZE", help="most bytes per weight file (default 50GB)"
    )
    out.add_argument("--private", action="store_true", default=None, help="a repository that is made is private")
    out.add_argument("--revision", metavar="BRANCH", help="branch to upload to; made where it is not there")
    out.add_argument("--commit-message", metavar="TEXT")
    out.add_argument("--overwrite", action="store_true", help="replace whatever is at --output")
    out.set_defaults(run=_export)


def _verify(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    with _progress() as note:
        manifest = verified(options.folder, note)
    rate = manifest.total_bytes / 1e9 / max(time.perf_counter() - started, 1e-9)
    print(f"{options.folder}: whole; {len(manifest.files)} files, {manifest.total_bytes:,} bytes, {rate:.2f} GB/s")
    return 0


def _export(options: argparse.Namespace) -> int:
    with _progress() as note, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        target = export(
            options.folder,
            options.output,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            push_to_hub=options.push_to_hub,
            private=options.private,
            revision=options.revision,
            commit_message=options.commit_message,
            overwrite=options.overwrite,
            progress=note,
        )
    for text in dict.fromkeys(str(warning.message) for warning in said if warning.category is UserWarning):
        print(f"hf-zero: {text}", file=sys.stderr)
    if target is not None:
        print(f"{options.folder} exported to {target}")
    if options.push_to_hub is not None:
        branch = f", branch {options.revision}" if options.revision else ""
        print(f"{options.folder} uploaded to {options.push_to_hub}{branch}")
    return 0


@contextmanager
def _progress() -> Iterator[Note]:
    """Bars on stderr while it lasts; none where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def note(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield note


if __name__ == "__main__":
    sys.exit(main())
