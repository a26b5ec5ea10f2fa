"""How a script begins and ends: one clear line on every rank for what goes wrong, and the numbers at the end."""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table

import hf_zero as zero
from hf_zero.config import size_text
from hf_zero.errors import needs

GRACE = 2.0  # seconds
SETTLE = 0.1  # seconds
MESSAGE_LIMIT = 400  # characters; some libraries put a page into an exception


class UserError(ValueError):
    """Something the person who typed the command can put right. The message is shown alone, without its type."""


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it stands, the flags with their defaults."""


@contextmanager
def examples() -> Iterator[None]:
    """Around imports of what only the scripts need: where a package is missing, the script ends with what to install."""
    try:
        with needs("examples"):
            yield
    except zero.ConfigError as error:
        sys.exit(f"error: {error}")


def run(main: Callable[[], object]) -> None:
    """Call `main`; a failure becomes one line on this rank's stderr and exit status 1."""
    try:
        _check_environment()
        main()
        if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
            # gloo's threads drop the tensors of the last exchange a moment after it, for which they need the
            # interpreter: one that asks while Python is being taken down aborts the process.
            time.sleep(SETTLE)
    except KeyboardInterrupt:
        _stop("interrupted", 130)
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise
    except Exception as error:
        if os.environ.get("HF_ZERO_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        _stop(one_line(error), 1)


def one_line(error: BaseException) -> str:
    """The error as a single line; one that was not foreseen also says its type and how to see more."""
    text = " ".join(str(error).split())
    if len(text) > MESSAGE_LIMIT:
        text = text[:MESSAGE_LIMIT].rsplit(" ", 1)[0] + " …"
    if isinstance(error, (UserError, zero.ZeroError)):
        return text
    if "gloo" in text or "ncclRemoteError" in text or "Connection closed by peer" in text:
        return f"stopped because another rank did; its own line says why ({type(error).__name__})"
    return f"{type(error).__name__}: {text} (HF_ZERO_DEBUG=1 shows where)"


def _stop(message: str, status: int) -> None:
    # One write, so that the lines of several ranks do not run into each other.
    sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] error: {message}\n")
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        time.sleep(GRACE)  # launchers end all ranks with the first: let the others say their line too
    # Not sys.exit: a rank that waits in a library's exit handler for peers that are gone would hang.
    sys.stdout.flush()
    os._exit(status)


def _check_environment() -> None:
    """Refuse launcher settings that would otherwise be taken for a single process, or hang at the first meeting."""
    raw = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in os.environ}
    try:
        numbers = {name: int(value) for name, value in raw.items()}
    except ValueError as error:
        raise UserError(f"expected whole numbers from the launcher, found {raw}; use torchrun or accelerate") from error
    world, rank = numbers.get("WORLD_SIZE", 1), numbers.get("RANK", 0)
    if world < 1 or not 0 <= rank < world:
        raise UserError(
            f"expected WORLD_SIZE >= 1 and 0 <= RANK < WORLD_SIZE, found WORLD_SIZE={world} RANK={rank}; "
            f"give the launcher at least one process"
        )


def everywhere(action: Callable[[], object], what: str) -> None:
    """Run `action` on every rank; where it fails on some, all ranks raise, naming the first. Collective."""
    problem: str | None = None
    cause: Exception | None = None
    try:
        action()
    except Exception as error:
        # The library's own errors say what failed and where.
        place = "" if isinstance(error, zero.ZeroError) else f"{what} failed on rank {os.environ.get('RANK', '0')}: "
        problem, cause = place + one_line(error), error
    problems = [found for found in gather_object([problem]) if found]
    if problems:
        raise UserError(problems[0]) from cause


def check_output(folder: str | Path) -> None:
    """Raise unless `folder` can be made and written to."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(
            f"the output folder {str(path)!r} is not writable ({error.strerror}); give another one with --output-dir"
        ) from error


def check_space(folder: str | Path, model: torch.nn.Module) -> None:
    """Raise when the weights alone would not fit on the disk of `folder`: better before the training than after it."""
    need = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"the trained model takes {size_text(need, up=True)} and {str(folder)!r} has {size_text(free)} free; "
            f"make room or give another folder with --output-dir"
        )


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held: allocated on a CUDA device, resident on CPU (Python and libraries too)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def highest(value: int) -> int:
    """The largest `value` of all ranks. Collective."""
    return max(gather_object([value]))


def number(value: float) -> str:
    """A measured value for people: no more digits than mean something."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_summary(title: str, rows: dict[str, str]) -> None:
    """A two-column table on stdout. Call it on the main process only."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    with suppress(BrokenPipeError):
        console.print(table)
