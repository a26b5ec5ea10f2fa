"""`hf-zero verify` and `hf-zero export`."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from ..checkpoint import export as exports
from ..checkpoint.manifest import MANIFEST
from ..errors import CheckpointError, ConfigError
from .commands import ExportOptions, Options, VerifyOptions, print_json


def verify(options: VerifyOptions) -> None:
    folder = Path(options.folder)
    _check_folder(folder)
    started = time.perf_counter()
    with _progress() as note:
        is_model = (folder / "config.json").is_file() and not (folder / "optimizer").exists()
        if is_model and not (folder / MANIFEST).exists():
            raise CheckpointError(
                f"{folder} is a model folder without {MANIFEST}: nothing vouches for its bytes, so there is nothing to verify"
            )
        manifest = exports.verified(folder, note)
    taken_s = max(time.perf_counter() - started, 1e-9)
    if options.json:
        found = {"folder": str(folder), "whole": True, "files": len(manifest.files), "bytes": manifest.total_bytes}
        print_json({**found, "seconds": taken_s, "facts": dict(manifest.facts)})
        return
    rate = manifest.total_bytes / 1e9 / taken_s
    print(f"{folder}: whole; {len(manifest.files)} files, {manifest.total_bytes:,} bytes, {rate:.2f} GB/s")


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(f"{folder} is a file: expected a checkpoint's folder")
    if not folder.is_dir():
        raise ConfigError(f"no such folder: {folder}")


def export(options: ExportOptions) -> None:
    _check_folder(Path(options.folder))
    with _progress() as note, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given = {item.name: getattr(options, item.name) for item in fields(options)}
        given = {name: value for name, value in given.items() if name not in ("folder", *Options.__dataclass_fields__)}
        target = exports.export(options.folder, **{**given, "private": options.private or None}, progress=note)
    notes = list(dict.fromkeys(str(warning.message) for warning in said if warning.category is UserWarning))
    for text in notes:
        print(f"hf-zero: {text}", file=sys.stderr)
    if options.json:
        output, uploaded = None if target is None else str(target), options.push_to_hub
        print_json({"folder": options.folder, "output": output, "push_to_hub": uploaded, "notes": notes})
        return
    if target is not None:
        print(f"{options.folder} exported to {target}")
    if options.push_to_hub is not None:
        branch = f", branch {options.revision}" if options.revision else ""
        print(f"{options.folder} uploaded to {options.push_to_hub}{branch}")


@contextmanager
def _progress() -> Iterator[exports.Progress]:
    """Bars on stderr while it lasts; none where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def note(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield note
