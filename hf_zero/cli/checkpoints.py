"""`hf-zero verify` and `hf-zero export`."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint import export as exports
from ..checkpoint.folder import Progress as Report
from ..checkpoint.folder import verify as verify_folder
from ..checkpoint.manifest import MANIFEST
from ..errors import CheckpointError, ConfigError
from .show import print_json


def verify(folder: Path, as_json: bool) -> None:
    started = time.perf_counter()
    with _progress() as note:
        is_model = (folder / "config.json").is_file() and not (folder / "optimizer").exists()
        if is_model and not (folder / MANIFEST).exists():
            raise CheckpointError(
                f"{folder} is a model folder without {MANIFEST}: there are no digests to verify its bytes against."
            )
        manifest = verify_folder(folder, progress=note)
    taken_s = max(time.perf_counter() - started, 1e-9)
    if as_json:
        found = {"folder": str(folder), "whole": True, "files": len(manifest.files), "bytes": manifest.total_bytes}
        print_json({**found, "seconds": taken_s, "facts": dict(manifest.facts)})
        return
    rate = manifest.total_bytes / 1e9 / taken_s
    print(f"{folder}: complete; {len(manifest.files)} files, {manifest.total_bytes:,} bytes, {rate:.2f} GB/s")


def export(folder: Path, values: Mapping[str, Any], as_json: bool) -> None:
    """Export with the arguments of `zero.export`."""
    uploaded = values["push_to_hub"]
    if values["output"] is None and uploaded is None:
        raise ConfigError("Choose where to export: --output DIR, --push-to-hub USER/REPO, or both.")
    with _progress() as note, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            target = exports.export(folder, **{**values, "private": values["private"] or None}, progress=note)
        except ConfigError as error:
            raise ConfigError(str(error).replace("overwrite=True", "--overwrite")) from error
    notes = list(dict.fromkeys(str(each.message) for each in caught if each.category is UserWarning))
    for line in notes:
        print(f"hf-zero: {line}", file=sys.stderr)
    if as_json:
        output = None if target is None else str(target)
        print_json({"folder": str(folder), "output": output, "push_to_hub": uploaded, "notes": notes})
        return
    if target is not None:
        print(f"{folder} exported to {target}")
    if uploaded is not None:
        branch = f", branch {values['revision']}" if values["revision"] else ""
        print(f"{folder} uploaded to {uploaded}{branch}")


@contextmanager
def _progress() -> Iterator[Report]:
    """Show progress bars on stderr if it is a terminal."""
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
