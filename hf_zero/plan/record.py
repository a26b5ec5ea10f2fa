"""Record peak memory, traffic and waits of every step, into a file for `hf-zero report` and into logs.

A `Recorder` reads `Counters` only; `diagnostics/usage.py` fills them from the engine.

The file has one JSON object per line, with a `kind`. `facts` begins a start of training; then come `step`, `log` (values that
a Trainer logged) and, after training, `end`. Readers skip other kinds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from ..errors import ConfigError
from .costs import TIERS
from .work import COLLECTIVES, WAITS

FORMAT = 1
"""Version of the format."""
RECENT = 64
"""Number of steps whose medians a report shows."""

Table = dict[str, dict[str, int]]
"""Tier -> kind -> bytes."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of an engine.

    Attributes:
        peak: highest bytes by tier and kind since the last `Counters`; `all` of a tier: its sum at one moment.
        sent: bytes by channel, since the start.
        wait_s: seconds that training waited, by cause, since the start.
        process: bytes of the whole process, as the system counts them.
    """

    peak: Table
    sent: Mapping[str, int]
    wait_s: Mapping[str, float]
    process: Mapping[str, int]


class Source(Protocol):
    """The engine's counters and predictions."""

    rank: int

    def counters(self) -> Counters:
        """Return the counters and restart the peaks."""

    def facts(self, backward_per_step: int) -> dict[str, Any]:
        """Return the facts of the run as plain values: the first line of its file."""


def batch_of(inputs: tuple[Any, ...], keywords: Mapping[str, Any], main_input: str) -> tuple[int, int]:
    """Return the samples and tokens of a forward: rows of its main input, and elements of a matrix of token ids.

    Padding counts, as in the Trainer's `num_input_tokens_seen`. 0 if there are none (images have no tokens).
    """
    value = keywords.get(main_input)
    if not isinstance(value, torch.Tensor):
        tensors = (each for each in (*inputs, *keywords.values()) if isinstance(each, torch.Tensor) and each.dim())
        value = next(tensors, None)
    if value is None or not value.dim():
        return 0, 0
    is_ids = value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
    return value.shape[0], value.numel() if is_ids else 0


def rates(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return samples and tokens per second: medians over the steps."""
    seconds, samples, tokens = (
        statistics.median([step.get(name, 0) for step in steps] or [0]) for name in ("seconds", "samples", "tokens")
    )
    return (samples / seconds, tokens / seconds) if seconds else (0.0, 0.0)


class Recorder:
    """Measures every optimizer step of an engine until `close`. `Engine.record` creates it.

    A step lasts from the end of the one before (the first: from its first forward) to the end of `optimizer.step()`. Updates
    that the step leaves to its thread are counted when they happen, in the next step.

    Attributes:
        steps: the number of the last step, counted on from the one given.
        recorded: number of recorded steps.
        last: values of the last one, as in the file.
        path: the file, if one is written.
        peak: bytes by tier and kind, the highest of all steps.

    Args:
        about: further facts of the run (model, number of steps), as plain values.
        on_close: called once, by the first `close`.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        source: Source,
        folder: str | os.PathLike[str] | None,
        first_step: int = 0,
        about: Mapping[str, Any] | None = None,
        on_close: Callable[[Recorder], None] = lambda recorder: None,
    ) -> None:
        self.steps = first_step
        self.recorded = 0
        self.last: dict[str, Any] = {}
        self.path: Path | None = None
        self.peak: Table = {tier.value: {} for tier in TIERS}
        self._source, self._on_close, self._about = source, on_close, dict(about or {})
        self._waiting: list[dict[str, Any]] = []
        """Logs from before the first step; facts come first in the file."""
        self._is_open = True
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._open(Path(folder))
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._unlogged = 0
        """Steps since the last call of `logs`."""
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._began: float | None = None
        self._forwards = self._evaluations = self._samples = self._tokens = 0
        self._before = source.counters()

    def close(self) -> None:
        """Stop measuring. Measurements stay; calling again does nothing."""
        if self._is_open:
            self._is_open = False
            if self.recorded:
                self._append({"kind": "end", "at_s": time.perf_counter() - self._started, "steps": self.steps})
            self._on_close(self)
        if self._file is not None:
            self._file.close()
            self._file = None

    # What the engine calls --------------------------------------------------------------------------------------------

    def forward(self, samples: int = 0, tokens: int = 0) -> None:
        """Count the samples and tokens of a forward of the whole model that begins; not of a recomputation."""
        if not torch.is_grad_enabled():
            self._evaluations += 1
            return
        self._forwards += 1
        self._samples += samples
        self._tokens += tokens
        if self._began is None:
            self._began = time.perf_counter()
            if self._ended is None:
                self._before = self._source.counters()

    def step(self) -> None:
        """Record a step after `optimizer.step()`."""
        now = time.perf_counter()
        began = self._began if self._began is not None else now
        ended, self._ended, self._began = self._ended, now, None
        self.steps += 1
        self.recorded += 1
        before, counted = self._before, self._source.counters()
        self._before = counted
        self.last = {
            "step": self.steps,
            "at_s": round(now - self._started, 6),
            "seconds": round(now - (began if ended is None else ended), 6),
            "between_s": 0.0 if ended is None else round(began - ended, 6),
            "forwards": self._forwards,
            "evaluations": self._evaluations,
            "samples": self._samples,
            "tokens": self._tokens,
            "bytes": {channel: counted.sent[channel] - before.sent[channel] for channel in counted.sent},
            "wait_s": {what: round(counted.wait_s[what] - before.wait_s[what], 6) for what in WAITS},
            "peak": {tier: {k: value for k, value in kinds.items() if value} for tier, kinds in counted.peak.items()},
            "process": dict(counted.process),
        }
        for tier, kinds in counted.peak.items():
            for kind, value in kinds.items():
                self.peak[tier][kind] = max(self.peak[tier].get(kind, 0), value)
        self._recent.append(self.last)
        self._unlogged += 1
        self._write()
        self._forwards = self._evaluations = self._samples = self._tokens = 0

    # What people ask --------------------------------------------------------------------------------------------------

    def usual(self) -> list[dict[str, Any]]:
        """Return the recent steps without the first and those with an evaluation, unless there are no others."""
        records = [*self._recent][self.recorded <= RECENT :]
        return [record for record in records if not record["evaluations"]] or [*self._recent]

    def median(self, *keys: str) -> float | None:
        """Return the median of `last[keys[0]][keys[1]]…` over the usual steps."""
        records: list[Any] = [*self.usual()]
        values = [reduce(getitem, keys, record) for record in records]
        return statistics.median(values) if values else None

    def throughput(self) -> tuple[float, float]:
        """Return this rank's samples and tokens per second, over the usual steps."""
        return rates(self.usual())

    @property
    def forwards_per_step(self) -> int:
        return int(self.median("forwards") or 1)

    def logs(self) -> dict[str, float]:
        """Return metrics of the steps since the last call, for a logger: peak GiB, seconds and GiB sent per step."""
        records, self._unlogged = [*self._recent][-self._unlogged :] if self._unlogged else [], 0
        if not records:
            return {}
        gib = 1 << 30
        out = {
            f"{tier.value}_gib": max(record["peak"][tier.value].get("all", 0) for record in records) / gib
            for tier in TIERS
        }
        process = records[-1]["process"]
        out |= {f"{name.replace(' ', '_')}_gib": value / gib for name, value in process.items()}

        def mean(of: Callable[[dict[str, Any]], float]) -> float:
            return sum(map(of, records)) / len(records)

        out["step_s"] = mean(lambda record: record["seconds"])
        out["wait_s"] = mean(lambda record: sum(record["wait_s"].values()))
        out["wait_collectives_s"] = mean(lambda record: sum(record["wait_s"][name] for name in COLLECTIVES))
        out["sent_gib"] = mean(lambda record: sum(record["bytes"][name] for name in COLLECTIVES)) / gib
        return out

    # The file ---------------------------------------------------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        rank = self._source.rank
        self.path = folder / ("zero_steps.jsonl" if rank == 0 else f"zero_steps.rank{rank}.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The folder may come from others: following a link there would append to its target.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self.path, flags, 0o666), "ab+", buffering=0)
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a killed run left half a line
                    self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written on rank {rank}: {error.strerror or error}; record to another folder"
            ) from error

    def log(self, values: Mapping[str, float]) -> None:
        """Record logged values, such as losses, for the last step."""
        line = {"kind": "log", "step": self.steps, "at_s": time.perf_counter() - self._started, "values": dict(values)}
        if self.recorded:
            self._append(line)
        else:
            self._waiting.append(line)

    def _write(self) -> None:
        """Write the last step; before the first one, the facts and the logs that wait for them."""
        lines: list[Mapping[str, Any]] = [{"kind": "step", **self.last}]
        if self.recorded == 1:
            facts = {"kind": "facts", "format": FORMAT, **self._source.facts(self._forwards), "about": self._about}
            lines = [facts, *self._waiting, *lines]
        self._append(*lines)

    def _append(self, *lines: Mapping[str, Any]) -> None:
        """Write lines at once: readers of a running job find full lines."""
        if self._file is None:
            return
        try:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError as error:  # a full disk must not stop training
            warnings.warn(f"{self.path}: {error.strerror or error}; steps are no longer written", stacklevel=2)
            self._file = None
