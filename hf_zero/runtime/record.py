"""Step by step: what an engine took at its highest, moved and waited for; into a file, for `hf-zero report`, and into logs.

`highs` listens to the units; a `Recorder` adds what rests and what moved, writes it and answers questions about it. Words are
those of `usage`.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import ConfigError
from ..plan.costs import TIERS
from ..plan.work import ROADS
from ..tiers.tier import Tier
from ..version import __version__
from .highs import Highs
from .usage import COLLECTIVES, LINKS, WAITS, Measurable, Table, measure, predicted, process_bytes, staging_bytes

FORMAT = 1
"""Of the files."""
_RECENT = 64
"""Steps whose medians a report shows."""
_STEP_THREAD = "hf_zero step"
_DEVICE, _HOST, _DISK = (tier.value for tier in TIERS)


class Recorder:
    """Measures every optimizer step of an engine, from now until `close`. Made by `Engine.record`.

    A step lasts from the end of the one before (the first: from its first forward) to the end of `optimizer.step()`. Updates
    that the step leaves to its thread are counted when they happen, in the next step.

    Attributes:
        steps: the number of the last step, counted on from the one given.
        recorded: how many were recorded.
        last: what is known of the last one, as it is written to the file.
        path: the file, if one is written.

    Args:
        on_close: called once, by the first `close`.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        engine: Measurable,
        folder: str | os.PathLike[str] | None,
        first_step: int = 0,
        on_close: Callable[[Recorder], None] = lambda recorder: None,
    ) -> None:
        self.steps = first_step
        self.recorded = 0
        self.last: dict[str, Any] = {}
        self.path: Path | None = None
        self._engine, self._on_close = engine, on_close
        self._is_open = True
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._open(Path(folder))
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._first: dict[str, Any] | None = None
        self._since_log: list[dict[str, Any]] = []
        self._highs = Highs(engine)
        self._resting: Table = {}
        self._states = self._moves = 0
        self._blocks = self._scratch = self._scratch_peak = 0  # of the host
        self._transient = engine.config.step_in_backward
        self.peak: Table = {tier.value: {} for tier in TIERS}
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._began: float | None = None
        self._forwards = self._evaluations = 0
        self._waited = dict.fromkeys(LINKS, 0.0)
        meter = engine.offload.storage.meter
        self._meter_waited = meter.waited
        meter.__dict__["waited"] = self._hear
        self._counts = self._count()
        self._watch()
        host, storage = measure(engine)[_HOST], engine.offload.storage
        self._blocks = host["staging"] - storage.scratch_bytes
        self._behind = host["optimizer"], self._blocks
        storage.scratch_peak_bytes = storage.scratch_bytes

    def close(self) -> None:
        """Stop measuring. What was measured stays; safe to call again."""
        if self._is_open:
            self._is_open = False
            self._on_close(self)
            self._highs.unwatch()
            self._engine.offload.storage.meter.__dict__.pop("waited", None)
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
        self._highs.begin()
        if self._began is None:
            self._began = time.perf_counter()
            if self._ended is None:
                self._counts = self._count()
            self._watch()

    def step(self) -> None:
        """`optimizer.step()` is over, gradients are still there."""
        now = time.perf_counter()
        began = self._began if self._began is not None else now
        ended, self._ended, self._began = self._ended, now, None
        self.steps += 1
        self.recorded += 1
        self._look_at_rest()
        before, self._counts = self._counts, self._count()
        counts = {key: value - before[key] for key, value in self._counts.items()}
        kinds = self._now()
        self.last = {
            "step": self.steps,
            "at_s": now - self._started,
            "seconds": now - (began if ended is None else ended),
            "between_s": 0.0 if ended is None else began - ended,
            "forwards": self._forwards,
            "evaluations": self._evaluations,
            "bytes": {road: int(counts["bytes", road]) for road in (*COLLECTIVES, *LINKS)},
            "wait_s": {road: counts["wait", road] for road in WAITS},
            "thread_wait_s": {road: counts["thread", road] for road in LINKS},
            "memory": {tier: sum(values.values()) for tier, values in kinds.items()},
            "peak": self._peaks(kinds),
            "process": process_bytes(self._engine),
        }
        if moves := self._new_moves():
            self.last["moves"] = moves
        if self.recorded == 1:
            self._first = self.last
        self._recent.append(self.last)
        self._since_log.append(self.last)
        del self._since_log[:-_RECENT]
        if self._file is not None:
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
        records, self._since_log = self._since_log, []
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
        out["wait_collectives_s"] = mean(lambda record: sum(record["wait_s"][road] for road in COLLECTIVES))
        out["sent_gib"] = mean(lambda record: sum(record["bytes"][road] for road in COLLECTIVES)) / gib
        return out

    # Memory -----------------------------------------------------------------------------------------------------------

    def _new_moves(self) -> list[str]:
        """What the monitor of `auto` has moved since the last step."""
        monitor = self._engine.offload.monitor
        moves = [] if monitor is None else monitor.moves[self._moves :]
        self._moves += len(moves)
        return moves

    def _watch(self) -> None:
        if self._highs.watch():
            self._resting = {}

    def _look_at_rest(self) -> None:
        """Parameters and optimizer state change seldom: when something was moved, or the optimizer has made its state."""
        engine = self._engine
        states = 0 if engine.optimizer is None else len(engine.optimizer.state)
        if not self._resting or states != self._states or self.recorded < 3:
            self._states = states
            self._resting = measure(engine)
        storage = engine.offload.storage
        self._blocks = max(self._blocks, staging_bytes(engine) - storage.scratch_bytes)
        self._scratch, self._scratch_peak = storage.scratch_bytes, storage.scratch_peak_bytes
        storage.scratch_peak_bytes = storage.scratch_bytes

    def _now(self) -> Table:
        """By tier and kind, at the end of a step."""
        table = {
            tier: {kind: self._resting[tier][kind] for kind in ("parameters", "optimizer")}
            for tier in (_DEVICE, _HOST, _DISK)
        }
        highs = self._highs
        table[_DEVICE]["gradients"] = highs.on_device + highs.held
        table[_DEVICE]["gathered"] = highs.gathered
        table[_DEVICE]["communication"] = highs.moving
        table[_HOST]["gradients"] = 0 if self._transient else highs.on_host
        table[_HOST]["staging"] = self._blocks + self._scratch
        return table

    def _peaks(self, kinds: Table) -> Table:
        """The highest of each kind in this step and, as `all`, of their sum in each tier. Then the next step begins."""
        highs = self._highs
        high = highs.take()
        sums = {tier: sum(values.values()) for tier, values in kinds.items()}
        sums[_DEVICE] += high["total"] - highs.gathered - highs.moving - highs.on_device - highs.held
        grown = 0 if self._transient else high["host gradients"] - highs.on_host
        # The passes of the first step come before the state and the blocks that it makes.
        made = kinds[_HOST]["optimizer"] + self._blocks - self._behind[0] - self._behind[1] if self.recorded == 1 else 0
        passing = kinds[_HOST]["staging"] + self._scratch_peak - self._scratch
        passing -= self._blocks - self._behind[1] if self.recorded == 1 else 0
        sums[_HOST] = max(sums[_HOST], sums[_HOST] + grown + self._scratch_peak - self._scratch - made)
        table = {tier: {**values, "all": sums[tier]} for tier, values in kinds.items()}
        table[_DEVICE] |= {kind: high[kind] for kind in ("gathered", "communication", "gradients")}
        table[_HOST]["gradients"] += grown
        table[_HOST]["staging"] = max(table[_HOST]["staging"], passing)
        for tier, values in table.items():
            for kind, value in values.items():
                self.peak[tier][kind] = max(self.peak[tier].get(kind, 0), value)
        return {tier: {kind: value for kind, value in values.items() if value} for tier, values in table.items()}

    # Roads ------------------------------------------------------------------------------------------------------------

    def _hear(self, kind: str, wait_s: float) -> None:
        """In place of `Meter.waited`: the thread that steps waits beside training, not in its way."""
        self._meter_waited(kind, wait_s)
        if not threading.current_thread().name.startswith(_STEP_THREAD):
            self._waited[kind] += wait_s

    def _count(self) -> dict[tuple[str, str], float]:
        """All counters as they stand."""
        engine = self._engine
        out: dict[tuple[str, str], float] = {}
        for kind in COLLECTIVES:
            count = engine.traffic[kind]
            out["bytes", kind], out["wait", kind] = count.bytes, count.wait_s
        for kind in LINKS:
            moved = engine.offload.storage.meter[kind]
            out["bytes", kind], out["wait", kind] = moved.bytes, self._waited[kind]
            out["thread", kind] = moved.wait_s - self._waited[kind]
        out["wait", "optimizer"] = 0.0 if engine.offload.stepper is None else engine.offload.stepper.wait_s
        return out

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

    def _write(self) -> None:
        if self._file is None:
            return
        lines = [{"kind": "step", **_rounded(self.last)}]
        if self.recorded == 1:
            lines.insert(0, facts(self._engine, self._forwards))
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


def facts(engine: Measurable, backward_per_step: int) -> dict[str, Any]:
    """The first line of a run's file: what ran where, and what was predicted."""
    memory, traffic = predicted(engine, backward_per_step)

    def table(by_tier: Mapping[Tier, Mapping[str, int]]) -> Table:
        return {tier.value: dict(kinds) for tier, kinds in by_tier.items()}

    return {
        "kind": "facts",
        "format": FORMAT,
        "version": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "rank": engine.rank,
        "world_size": engine.world_size,
        "stage": engine.config.stage,
        "precision": str(engine.precision),
        "parameters": engine.layout.numel,
        "trainable": engine.layout.trainable_numel,
        # A run's folder may be shared: no names of hosts or folders.
        "config": {name: value for name, value in engine.config.to_dict().items() if name != "offload_dir"},
        "machine": {
            "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
            "cores": os.cpu_count() or 1,
            "torch": torch.__version__,
        },
        "predicted": {
            "backward_per_step": backward_per_step,
            "rest": table(memory.rest),
            "peak": table(memory.peak),
            "peak_bytes": {tier.value: memory.at_peak(tier) for tier in TIERS},
            "traffic": {road: getattr(traffic, road) for road in ROADS},
            "step_s": engine.plan.step_s,
            "parts_s": dict(engine.plan.parts),
            "reasons": list(engine.plan.reasons),
        },
    }
