"""Records of every step, and the report of an engine: what `engine.record()` and `engine.report()` do.

A record's file has one JSON object per line, with a `kind`. `facts` begins a start of training; then come `step`, `log` (values
that a Trainer logged) and, after training, `end`. Readers skip other kinds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..errors import ConfigError
from ..optimizers.step_probe import state_tensors
from ..plan.costs import STATES, TIERS
from ..plan.report import ChannelRow, Report, data_parallel, tier_rows
from ..plan.traffic import COLLECTIVES, WAITS
from .usage import Table, counters, facts, measure, predicted, process_bytes

FORMAT = 1
"""Version of the format."""
GIB = 1 << 30
RECENT = 64
"""Number of steps whose medians a report shows."""
MAX_UNLOGGED = 1000
"""Number of steps whose means `Recorder.logs` returns at most."""


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


def value_at(step: Any, *keys: str) -> float:
    """Return `step[keys[0]][keys[1]]…` of a recorded step; 0 where it is missing."""
    for key in keys:
        step = step.get(key, {})
    return step or 0.0


def rates(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return samples and tokens per second: medians over the steps."""
    names = ("seconds", "samples", "tokens")
    seconds, samples, tokens = (statistics.median([value_at(step, name) for step in steps] or [0]) for name in names)
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
        is_open: it still measures.
        peak: bytes by tier and kind, the highest of all steps.

    Args:
        about: further facts of the run (model, number of steps), as plain values.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str | os.PathLike[str] | None,
        first_step: int,
        about: Mapping[str, Any],
    ) -> None:
        self.steps = first_step
        self.recorded = 0
        self.last: dict[str, Any] = {}
        self.path: Path | None = None
        self.peak: Table = {tier.value: {} for tier in TIERS}
        self.is_open = True
        self._engine, self._about = engine, dict(about)
        self._waiting: list[dict[str, Any]] = []
        """Logs from before the first step; facts come first in the file."""
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._open(Path(folder))
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._unlogged: deque[dict[str, Any]] = deque(maxlen=MAX_UNLOGGED)
        """Steps since the last call of `logs`."""
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._began: float | None = None
        self._forwards = self._evaluations = self._tokens = 0
        self._samples = 0.0
        self._before = counters(engine)

    def close(self) -> None:
        """Stop measuring. Measurements stay; calling again does nothing."""
        if self.is_open and self.recorded:
            self._append({"kind": "end", "at_s": time.perf_counter() - self._started, "steps": self.steps})
        self.is_open = False
        if self._file is not None:
            self._file.close()
            self._file = None

    # Called by the engine ---------------------------------------------------------------------------------------------

    def forward(self, samples: float = 0, tokens: int = 0) -> None:
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
                self._before = counters(self._engine)

    def step(self) -> None:
        """Record a step after `optimizer.step()`."""
        time_s = time.perf_counter()
        began = self._began if self._began is not None else time_s
        ended, self._ended, self._began = self._ended, time_s, None
        self.steps += 1
        self.recorded += 1
        before, self._before = self._before, counters(self._engine)
        now = self._before
        self.last = {
            "step": self.steps,
            "at_s": round(time_s - self._started, 6),
            "seconds": round(time_s - (began if ended is None else ended), 6),
            "between_s": 0.0 if ended is None else round(began - ended, 6),
            "forwards": self._forwards,
            "evaluations": self._evaluations,
            "samples": self._samples,
            "tokens": self._tokens,
            "bytes": {channel: count - before["bytes"][channel] for channel, count in now["bytes"].items()},
            "wait_s": {what: round(now["wait_s"][what] - before["wait_s"][what], 6) for what in WAITS},
            "peak": {tier: {k: value for k, value in kinds.items() if value} for tier, kinds in now["peak"].items()},
            "process": now["process"],
        }
        for tier, kinds in now["peak"].items():
            for kind, value in kinds.items():
                self.peak[tier][kind] = max(self.peak[tier].get(kind, 0), value)
        self._recent.append(self.last)
        self._unlogged.append(self.last)
        if self.recorded == 1:
            known = facts(self._engine, self._forwards)
            self._append({"kind": "facts", "format": FORMAT, **known, "about": self._about})
            for line in self._waiting:
                self._append(line)
        self._append({"kind": "step", **self.last})
        self._forwards = self._evaluations = self._samples = self._tokens = 0

    # Queries ----------------------------------------------------------------------------------------------------------

    def usual(self) -> list[dict[str, Any]]:
        """Return the recent steps without the first and those with an evaluation, unless there are no others."""
        records = [*self._recent][self.recorded <= RECENT :]
        return [record for record in records if not record["evaluations"]] or [*self._recent]

    def median(self, *keys: str) -> float | None:
        """Return the median of `last[keys[0]][keys[1]]…` over the usual steps."""
        values = [value_at(step, *keys) for step in self.usual()]
        return statistics.median(values) if values else None

    def throughput(self) -> tuple[float, float]:
        """Return this rank's samples and tokens per second, over the usual steps."""
        return rates(self.usual())

    def logs(self) -> dict[str, float]:
        """Return metrics of the steps since the last call, for a logger: peak GiB, seconds and GiB sent per step."""
        if not self._unlogged:
            return {}
        steps = [*self._unlogged]
        self._unlogged.clear()
        out = {
            f"{tier.value}_gib": max(value_at(step, "peak", tier.value, "all") for step in steps) / GIB
            for tier in TIERS
        }
        out |= {f"{name.replace(' ', '_')}_gib": value / GIB for name, value in self.last["process"].items()}
        means = {
            "step_s": [step["seconds"] for step in steps],
            "wait_s": [sum(step["wait_s"].values()) for step in steps],
            "wait_collectives_s": [sum(step["wait_s"][name] for name in COLLECTIVES) for step in steps],
            "sent_gib": [sum(step["bytes"][name] for name in COLLECTIVES) / GIB for step in steps],
        }
        return out | {name: statistics.mean(values) for name, values in means.items()}

    # The file ---------------------------------------------------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        rank = self._engine.rank
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

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line at once: readers of a running job find full lines."""
        if self._file is None:
            return
        try:
            self._file.write((json.dumps(line) + "\n").encode())
        except OSError as error:  # a full disk must not stop training
            warnings.warn(f"{self.path}: {error.strerror or error}; steps are no longer written", stacklevel=2)
            self._file = None


# The report -----------------------------------------------------------------------------------------------------------


def _channel_rows(traffic: Mapping[str, int], recorder: Recorder) -> tuple[ChannelRow, ...]:
    rows = []
    for channel in WAITS:
        told = traffic.get(channel)
        moved = recorder.median("bytes", channel) if channel != "optimizer" and recorder.recorded else None
        waited = recorder.median("wait_s", channel)
        if told or moved or waited:
            rows.append(ChannelRow(channel, told, moved, waited))
    return tuple(rows)


# The observer ---------------------------------------------------------------------------------------------------------


class RecorderObserver(Observer):
    """Feeds the open `Recorder`, if there is one."""

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._last: Recorder | None = None
        self._stepped: set[torch.optim.Optimizer] = set()
        """Optimizers that stepped since the last backward: a step of the model counts once."""

    @property
    def recorder(self) -> Recorder | None:
        """Return the recorder that measures every step; None if none is open."""
        return self._last if self._last is not None and self._last.is_open else None

    def detach(self) -> None:
        if self._last is not None:
            self._last.close()

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.recorder is not None:
            main_input = getattr(self._engine.model, "main_input_name", "input_ids")
            samples, tokens = batch_of(args, kwargs, main_input)
            # Ranks of a group have parts of the same samples.
            self.recorder.forward(samples / self._engine.config.sp_size, tokens)

    def after_backward(self) -> None:
        self._stepped.clear()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._stepped:
            self._stepped.clear()
        if not self._stepped and self.recorder is not None:
            self.recorder.step()
        self._stepped.add(optimizer)

    def report(self) -> Report:
        """Return this rank's current and predicted bytes, and what the open recorder has measured."""
        engine, recorder = self._engine, self.recorder
        context, now = engine.context, measure(engine)
        planned = predicted(engine, 1 if recorder is None else int(recorder.median("forwards") or 1))
        measured = {kind: sum(kinds[kind] for kinds in now.values()) for kind in STATES}
        measured["parameters"] += sum(kinds["gathered"] for kinds in now.values())
        return Report(
            stage=context.config.stage,
            world_size=context.wire.size,
            precision=str(context.precision),
            parameters=context.layout.numel,
            trainable=context.layout.trainable_numel,
            predicted={kind: sum(planned.memory.stored[tier][kind] for tier in TIERS) for kind in STATES},
            data_parallel=data_parallel(context.layout, state_tensors(engine.optimizers)),
            measured=measured,
            traffic=context.wire.traffic.to_dict(),
            units=len(context.layout.units),
            tiers=tier_rows(planned.memory, now, None if recorder is None or not recorder.recorded else recorder.peak),
            roads=_channel_rows(planned.traffic, recorder) if recorder is not None else (),
            steps=0 if recorder is None else recorder.recorded,
            step_s=None if recorder is None else recorder.median("seconds"),
            predicted_step_s=planned.step.seconds,
            process=process_bytes(engine),
        )

    def record(
        self, folder: str | os.PathLike[str] | None, first_step: int, about: Mapping[str, Any] | None
    ) -> Recorder:
        """Measure every step from now on; see `Engine.record`."""
        self.detach()
        known = {"model": type(self._engine.model).__name__, **(about or {})}
        self._last = Recorder(self._engine, folder, first_step, known)
        return self._last
