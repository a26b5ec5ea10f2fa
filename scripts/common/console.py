"""Start and end of a script: one clear error message, and the numbers at the end."""

from __future__ import annotations

import json
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
from typing import TYPE_CHECKING

from hf_zero.config import size_text
from hf_zero.errors import ConfigError, ZeroError, needs

if TYPE_CHECKING:
    import torch

os.environ.setdefault("TQDM_DELAY", "3")  # seconds: bars of short preparations would stand before the start screen

GRACE_S = 2.0
"""Seconds a rank waits before it ends: launchers end all ranks with the first."""
SETTLE_S = 0.1
MESSAGE_LIMIT = 400
"""Characters; some libraries put a page into an exception."""


class UserError(ValueError):
    """An error that the user can fix. The message is shown alone, without its type."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; the message says how to continue."""


@contextmanager
def examples() -> Iterator[None]:
    """Surround imports of packages that only the scripts need; exit with what to install."""
    try:
        with needs("examples"):
            yield
    except ConfigError as error:
        sys.exit(f"error: {error}")


def run(main: Callable[[], object]) -> None:
    """Call `main`; a failure becomes one message and exit status 1."""
    try:
        _check_environment()
        main()
        if _world_size() > 1:
            # gloo's threads release the tensors of the last exchange a moment later, for which
            # they need the interpreter: asking while Python shuts down aborts the process.
            time.sleep(SETTLE_S)
    except KeyboardInterrupt as interrupt:
        _stop(str(interrupt) or "interrupted", 130)
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise
    except Exception as error:
        if os.environ.get("HF_ZERO_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        _stop(f"error: {one_line(error)}", 1)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def one_line(error: BaseException) -> str:
    """Return the error as one line; an unexpected error has its type and how to see more."""
    text = " ".join(str(error).split())
    if len(text) > MESSAGE_LIMIT:
        text = text[:MESSAGE_LIMIT].rsplit(" ", 1)[0] + " …"
    if isinstance(error, (UserError, ZeroError)):
        return text
    if "gloo" in text or "ncclRemoteError" in text or "Connection closed by peer" in text:
        return f"stopped because another rank did; its line has the reason ({type(error).__name__})"
    return f"{type(error).__name__}: {text} (HF_ZERO_DEBUG=1 shows where)"


def _stop(message: str, status: int) -> None:
    rank = int(os.environ.get("RANK", "0") or 0)
    reply = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if reply:
        # torchrun prints this message last, and ends the other ranks. Rank 0 speaks first, so
        # that an error of all ranks is shown once.
        time.sleep(GRACE_S if rank else 0)
        with suppress(OSError), open(reply, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)
        if status == 130 and rank == 0:  # torchrun reports no failure when it is interrupted itself
            sys.stderr.write(f"\n{message}\n")
    else:
        # One write: lines of several ranks must not mix.
        sys.stderr.write(f"[rank {rank}] {message}\n")
    sys.stderr.flush()
    if not reply and _world_size() > 1:
        time.sleep(GRACE_S)
    # Not sys.exit: a rank waiting in a library's exit handler for ended peers would hang.
    sys.stdout.flush()
    os._exit(status)


def _check_environment() -> None:
    """Refuse launcher settings that would be taken for a single process, or hang at the first collective."""
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
    """Run `action` on every rank; if it fails on one, all ranks raise its error. Collective."""
    from accelerate.utils import gather_object

    problem: str | None = None
    cause: Exception | None = None
    try:
        action()
    except Exception as error:
        # The library's own errors say what failed and where.
        place = "" if isinstance(error, ZeroError) else f"{what} failed on rank {os.environ.get('RANK', '0')}: "
        problem, cause = place + one_line(error), error
    problems = [found for found in gather_object([problem]) if found]
    if problems:
        raise UserError(problems[0]) from cause


def check_output(folder: str | Path) -> None:
    """Raise unless `folder` can be created and written to."""
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
    """Raise if the disk of `folder` has no room for the weights."""
    need = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"the trained model takes {size_text(need, up=True)} and {str(folder)!r} has {size_text(free)} free; "
            f"make room or give another folder with --output-dir"
        )


def peak_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: allocated on a CUDA device, resident on CPU (with Python and libraries)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def highest(value: int) -> int:
    """Return the largest `value` of all ranks. Collective."""
    from accelerate.utils import gather_object

    return max(gather_object([value]))


def number(value: float) -> str:
    """Format a measured value with its significant digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_summary(title: str, rows: dict[str, str]) -> None:
    """Print a two-column table. Call it on the main process only."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    with suppress(BrokenPipeError):
        console.print(table)
