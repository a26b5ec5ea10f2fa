"""Step by step: what a run took at its highest, moved and waited for; into a file, for `hf-zero report`, and into logs.

A `Recorder` sees `Counters` alone, which are values: who counts (`runtime/usage.py`) knows the engine.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from ..errors import ConfigError
from .costs import TIERS
from .work import COLLECTIVES, WAITS

FORMAT = 1
"""Of the files."""
RECENT = 64
"""Steps whose medians a report shows."""

Table = dict[str, dict[str, int]]
"""Tier -> kind -> bytes."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has counted until now.

    Attributes:
        peak: bytes by tier and kind, the highest since the `Counters` before; `all` of a tier: of its kinds at one moment.
        sent: bytes by channel, since ever.
        wait_s: seconds that training stood still, by what it waited for, since ever.
        moves: what the monitor of `auto` has moved between tiers, since ever.
        process: bytes of the whole process, as the system counts them.
    """

    peak: Table
    sent: Mapping[str, int]
    wait_s: Mapping[str, float]
    moves: tuple[str, ...]
    process: Mapping[str, int]


class Source(Protocol):
    """Who counts, and who knows what was predicted."""

    rank: int

    def counters(self) -> Counters:
        """As they are now; peaks are counted anew from here on."""

    def facts(self, backward_per_step: int) -> dict[str, Any]:
        """Of the run, as plain values: the first line of its file."""


class Recorder:
    """Measures every optimizer step of an engine, from now until `close`. Made by `Engine.record`.

    A step lasts from the end of the one before (the first: from its first forward) to the end of `optimizer.step()`. Updates
    that the step leaves to its thread are counted when they happen, in the next step.

    Attributes:
        steps: the number of the last step, counted on from the one given.
        recorded: how many were recorded.
        last: what is known of the last one, as it is written to the file.
        path: the file, if one is written.
        peak: bytes by tier and kind, the highest of all steps.

    Args:
        on_close: called once, by the first `close`.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        source: Source,
        folder: str | os.PathLike[str] | None,
        first_step: int = 0,
        on_close: Callable[[Recorder], None] = lambda recorder: None,
    ) -> None:
        self.steps = first_step
        self.recorded = 0
        self.last: dict[str, Any] = {}
        self.path: Path | None = None
        self.peak: Table = {tier.value: {} for tier in TIERS}
        self._source, self._on_close = source, on_close
        self._is_open = True
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._open(Path(folder))
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._since_log: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._first: dict[str, Any] | None = None
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._began: float | None = None
        self._forwards = self._evaluations = 0
        self._before = source.counters()

    def close(self) -> None:
        """Stop measuring. What was measured stays; safe to call again."""
        if self._is_open:
            self._is_open = False
            self._on_close(self)
        if self._file is not None:
            self._file.close()
            self._file = None

    # What the engine calls --------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """A forward of the whole model begins, not a recomputation."""
        if not torch.is_grad_enabled():
            self._evaluations += 1
            return
        self._forwards += 1
        if self._began is None:
            self._began = time.perf_counter()
            if self._ended is None:
                self._before = self._source.counters()

    def step(self) -> None:
        """`optimizer.step()` is over."""
        now = time.perf_counter()
        began = self._began if self._began is not None else now
        ended, self._ended, self._began = self._ended, now, None
        self.steps += 1
        self.recorded += 1
        before, counted = self._before, self._source.counters()
        self._before = counted
        self.last = {
            "step": self.steps,
            "at_s": now - self._started,
            "seconds": now - (began if ended is None else ended),
            "between_s": 0.0 if ended is None else began - ended,
            "forwards": self._forwards,
            "evaluations": self._evaluations,
            "bytes": {channel: counted.sent[channel] - before.sent[channel] for channel in counted.sent},
            "wait_s": {what: counted.wait_s[what] - before.wait_s[what] for what in WAITS},
            "peak": {tier: {k: value for k, value in kinds.items() if value} for tier, kinds in counted.peak.items()},
            "process": dict(counted.process),
        }
        for tier, kinds in counted.peak.items():
            for kind, value in kinds.items():
                self.peak[tier][kind] = max(self.peak[tier].get(kind, 0), value)
        if moves := counted.moves[len(before.moves) :]:
            self.last["moves"] = list(moves)
        if self.recorded == 1:
            self._first = self.last
        self._recent.append(self.last)
        self._since_log.append(self.last)
        self._write()
        self._forwards = self._evaluations = 0

    # What people ask --------------------------------------------------------------------------------------------------

    def median(self, *keys: str) -> float | None:
        """Of the recent steps: of `last[keys[0]][keys[1]]…`. Steps beside an evaluation and the first do not count, as long as
        there are others.
        """
        if not self._recent:
            return None
        usual = [record for record in self._recent if not record["evaluations"] and record is not self._first]
        values: list[float] = []
        for record in usual or self._recent:
            value: Any = record
            for key in keys:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    @property
    def forwards_per_step(self) -> int:
        return int(self.median("forwards") or 1)

    def logs(self) -> dict[str, float]:
        """Of the steps since the last call, for a logger: GiB at the highest, seconds and GiB sent per step."""
        records = list(self._since_log)
        self._since_log.clear()
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
            self._file = self.path.open("ab+", buffering=0)
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a killed run left half a line
                    self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written on rank {rank}: {error.strerror or error}; record to another folder"
            ) from error

    def _write(self) -> None:
        if self._file is None:
            return
        lines = [{"kind": "step", **_rounded(self.last)}]
        if self.recorded == 1:
            lines.insert(0, {"kind": "facts", "format": FORMAT, **self._source.facts(self._forwards)})
        try:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError as error:  # a full disk is no reason to stop training
            warnings.warn(f"{self.path}: {error.strerror or error}; steps are no longer written", stacklevel=2)
            self._file = None


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds are enough."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out[key] = _rounded(value)
        else:
            out[key] = round(value, 6) if isinstance(value, float) else value
    return out
