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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..errors import ConfigError
from ..optimizers.facts import state_tensors
from ..plan.costs import KINDS, STATES, TIERS, Memory
from ..plan.report import Report, RoadRow, TierRow, data_parallel
from ..plan.work import COLLECTIVES, WAITS
from ..tiers.tier import Tier
from .usage import Table, counters, facts, measure, predicted, process_bytes

FORMAT = 1
"""Version of the format."""
GIB = 1 << 30
RECENT = 64
"""Number of steps whose medians a report shows."""
MOST_UNLOGGED = 1000
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
        peak: bytes by tier and kind, the highest of all steps.

    Args:
        about: further facts of the run (model, number of steps), as plain values.
        on_close: called once, by the first `close`.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str | os.PathLike[str] | None,
        first_step: int,
        about: Mapping[str, Any],
        on_close: Callable[[Recorder], None],
    ) -> None:
        self.steps = first_step
        self.recorded = 0
        self.last: dict[str, Any] = {}
        self.path: Path | None = None
        self.peak: Table = {tier.value: {} for tier in TIERS}
        self._engine, self._on_close, self._about = engine, on_close, dict(about)
        self._waiting: list[dict[str, Any]] = []
        """Logs from before the first step; facts come first in the file."""
        self._is_open = True
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._open(Path(folder))
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._unlogged: deque[dict[str, Any]] = deque(maxlen=MOST_UNLOGGED)
        """Steps since the last call of `logs`."""
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._began: float | None = None
        self._forwards = self._evaluations = self._tokens = 0
        self._samples = 0.0
        self._before = counters(engine)

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
        now = time.perf_counter()
        began = self._began if self._began is not None else now
        ended, self._ended, self._began = self._ended, now, None
        self.steps += 1
        self.recorded += 1
        before, counted = self._before, counters(self._engine)
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
        for name, kinds in counted.peak.items():
            for kind, value in kinds.items():
                self.peak[name][kind] = max(self.peak[name].get(kind, 0), value)
        self._recent.append(self.last)
        self._unlogged.append(self.last)
        self._write()
        self._forwards = self._evaluations = self._samples = self._tokens = 0

    # What people ask --------------------------------------------------------------------------------------------------

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

    @property
    def forwards_per_step(self) -> int:
        return int(self.median("forwards") or 1)

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
            self._file = self.path.open("ab+", buffering=0)
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
            known = facts(self._engine, self._forwards)
            lines = [{"kind": "facts", "format": FORMAT, **known, "about": self._about}, *self._waiting, *lines]
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


# The report -----------------------------------------------------------------------------------------------------------


def report(engine: Engine, recorder: Recorder | None = None) -> Report:
    """Return what this rank takes now, and what was predicted.

    Args:
        recorder: adds peaks, traffic and waits of the steps that it measured.
    """
    context = engine.context
    planned = predicted(engine, 1 if recorder is None else recorder.forwards_per_step)
    now = measure(engine)
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
        tiers=_tier_rows(planned.memory, now, None if recorder is None or not recorder.recorded else recorder.peak),
        roads=_road_rows(planned.traffic, recorder) if recorder is not None else (),
        steps=0 if recorder is None else recorder.recorded,
        step_s=None if recorder is None else recorder.median("seconds"),
        predicted_step_s=planned.step.seconds,
        process=process_bytes(engine),
    )


def _tier_rows(memory: Memory, now: Table, peak: Table | None) -> tuple[TierRow, ...]:
    rows = []
    for tier in TIERS:
        name = tier.value
        found = {} if peak is None else peak[name]
        kinds = [
            TierRow(
                name,
                kind,
                memory.stored[tier][kind],
                now[name][kind],
                memory.peak[tier][kind],
                None if peak is None or (kind == "activations" and tier is not Tier.HOST) else found.get(kind, 0),
            )
            for kind in KINDS
            if memory.peak[tier][kind] or now[name][kind] or found.get(kind)
        ]
        if kinds:
            total = sum(now[name].values())
            highest = None if peak is None else found["all"]
            rows += [*kinds, TierRow(name, "all", memory.stored_bytes(tier), total, memory.at_peak(tier), highest)]
    return tuple(rows)


def _road_rows(traffic: Mapping[str, int], recorder: Recorder) -> tuple[RoadRow, ...]:
    rows = []
    for road in WAITS:
        told = traffic.get(road)
        moved = recorder.median("bytes", road) if road != "optimizer" and recorder.recorded else None
        waited = recorder.median("wait_s", road)
        if told or moved or waited:
            rows.append(RoadRow(road, told, moved, waited))
    return tuple(rows)


# The observer ---------------------------------------------------------------------------------------------------------


class Records(Observer):
    """Feeds a `Recorder`, where one measures.

    Attributes:
        recorder: measures every step; None: nothing is recorded.
    """

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self.recorder: Recorder | None = None
        self._stepped: set[torch.optim.Optimizer] = set()
        """Optimizers that stepped since the last backward: a step of the model counts once."""

    def detach(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

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
        """Return what is stored where, predicted and measured."""
        return report(self._engine, self.recorder)

    def record(
        self, folder: str | os.PathLike[str] | None, first_step: int, about: Mapping[str, Any] | None
    ) -> Recorder:
        """Measure every step from now on; see `Engine.record`."""
        if self.recorder is not None:
            self.recorder.close()
        known = {"model": type(self._engine.model).__name__, **(about or {})}
        made = self.recorder = Recorder(self._engine, folder, first_step, known, self._closed)
        return made

    def _closed(self, recorder: Recorder) -> None:
        if self.recorder is recorder:
            self.recorder = None
