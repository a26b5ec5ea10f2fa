"""A run's steps as they were measured, against what was predicted: read from its files, summed up, and what to change.

A run's file (`plan.record.Recorder` writes it) has one JSON object per line: facts, then steps. Every start of training appends
facts of its own; the last start is reported.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import size_text
from ..errors import ConfigError
from ..plan.costs import KINDS, TIERS
from ..plan.record import FORMAT
from ..plan.work import CHANNELS, ROADS, WAITS

OFF = 0.05
"""A prediction that is further off is warned of, from `SMALL_BYTES` on."""
SMALL_BYTES = 1 << 20
WAITED = 0.2
"""Share of the step that may be waiting for one thing."""
SLOWEST = 5


# Reading ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The last start of training in one rank's file."""

    path: Path
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.facts.get("rank", 0))

    @property
    def usual(self) -> list[dict[str, Any]]:
        """Steps that the prediction is about: not the first, none beside an evaluation, micro-batches as predicted."""
        passes = self.facts["predicted"]["backward_per_step"]
        usual = [step for step in self.steps[1:] if not step["evaluations"] and step["forwards"] == passes]
        return usual or self.steps

    def median(self, *keys: str) -> float:
        return statistics.median(_at(step, keys) for step in self.usual)

    def peak(self, tier: str, kind: str) -> int:
        return max(step["peak"].get(tier, {}).get(kind, 0) for step in self.steps)


def read(path: Path) -> Run:
    """Raises:
    ConfigError: no such file, of a later version, or without a single whole step.
    """
    facts: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    damaged = starts = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    for line in filter(None, lines):
        record = _record(line)
        if record is None:
            damaged += 1
        elif record["kind"] == "facts":
            facts, steps, starts = record, [], starts + 1
        elif facts:
            steps.append(record)
    if facts.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"{path} was written by hf_zero {facts.get('version')}, in another format: use that version")
    if not steps:
        raise ConfigError(f"{path} has no whole step in it: expected lines that ZeroCallback or engine.record wrote")
    run = Run(path, facts, steps)
    if damaged:
        run.notes.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} passed over")
    if starts > 1:
        run.notes.append(f"{path.name}: the last of {starts} starts of training")
    return run


def _record(line: bytes) -> dict[str, Any] | None:
    """One whole line of ours; None for any other."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    needed = {
        "facts": ("predicted", "world_size", "stage", "precision"),
        "step": (
            "step",
            "at_s",
            "seconds",
            "between_s",
            "forwards",
            "evaluations",
            "bytes",
            "wait_s",
            "peak",
            "process",
        ),
    }.get(str(record.get("kind")))
    return record if needed is not None and all(name in record for name in needed) else None


def read_all(path: Path) -> list[Run]:
    """Of every rank whose file is there, in rank order.

    Raises:
        ConfigError: none is.
    """
    if path.is_file():
        return [read(path)]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder or file; expected what ZeroCallback or engine.record wrote to")
    folder = path / "_zero" if (path / "_zero").is_dir() else path
    paths = [entry for entry in folder.iterdir() if re.fullmatch(r"zero_steps(\.rank\d+)?\.jsonl", entry.name)]
    if not paths:
        raise ConfigError(
            f"{path} has no zero_steps.jsonl: train with ZeroCallback (the Trainer's output_dir is the run), or call "
            "engine.record(folder)"
        )
    runs = [read(entry) for entry in paths]
    return sorted(runs, key=lambda run: run.rank)


# Numbers ------------------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What is shown of a run, as plain values: bytes and seconds, of the first rank that is there; `ranks`: of each."""
    run = runs[0]
    facts, predicted = run.facts, run.facts["predicted"]
    waits = {road: run.median("wait_s", road) for road in WAITS}
    median, between = run.median("seconds"), run.median("between_s")
    slowest = sorted(run.steps, key=lambda step: step["seconds"], reverse=True)[:SLOWEST]
    out: dict[str, Any] = {
        "run": str(run.path),
        "rank": run.rank,
        "steps": len(run.steps),
        "first_step": run.steps[0]["step"],
        "last_step": run.steps[-1]["step"],
        "facts": facts,
        "memory": list(_memory_rows(run)),
        "process": {name: max(step["process"].get(name, 0) for step in run.steps) for name in run.steps[-1]["process"]},
        "traffic": list(_traffic_rows(run)),
        "time": {
            "step_s": median,
            "predicted_step_s": predicted["step_s"],
            "between_s": between,
            "wait_s": waits,
            "rest_s": max(0.0, median - between - sum(waits.values())),
        },
        "slowest": [
            {"step": step["step"], "seconds": step["seconds"], "most": _largest_part(step)} for step in slowest
        ],
        "ranks": [
            {
                "rank": each.rank,
                "step_s": each.median("seconds"),
                "wait_s": statistics.median(sum(step["wait_s"].values()) for step in each.usual),
                "peak_bytes": {tier.value: each.peak(tier.value, "all") for tier in TIERS},
                "rss_peak_bytes": max(step["process"].get("rss peak", 0) for step in each.steps),
            }
            for each in runs
        ],
        "notes": [note for each in runs for note in each.notes],
        "moves": [
            f"rank {each.rank}, {move}" for each in runs for step in each.steps for move in step.get("moves", ())
        ],
    }
    out["warnings"] = list(_warnings(out))
    return out


def _memory_rows(run: Run) -> Iterator[dict[str, Any]]:
    predicted, highest = run.facts["predicted"]["peak"], run.facts["predicted"].get("peak_bytes", {})
    for tier in (tier.value for tier in TIERS):
        rows = [(kind, int(predicted[tier][kind]), run.peak(tier, kind)) for kind in KINDS]
        rows = [row for row in rows if row[1] or row[2]]
        if rows:
            rows.append(("all", int(highest.get(tier, sum(row[1] for row in rows))), run.peak(tier, "all")))
        for kind, told, found in rows:
            yield {"tier": tier, "kind": kind, "predicted": told, "measured": found, "off": _off(told, found)}


def _traffic_rows(run: Run) -> Iterator[dict[str, Any]]:
    for road in (*ROADS[:2], "scalar", "agree", *ROADS[2:]):
        told, found = run.facts["predicted"]["traffic"].get(road), run.median("bytes", road)
        if told or found:
            off = None if told is None else _off(told, found)
            yield {"road": road, "predicted": told, "measured": found, "wait_s": run.median("wait_s", road), "off": off}


def _off(told: float, found: float) -> float | None:
    """Relative to what was predicted; None where nothing was."""
    return (found - told) / told if told else None


def parts_of(step: dict[str, Any]) -> dict[str, float]:
    """Seconds of one step by what they went to; they add up to the step."""
    waits = {CHANNELS[road].label: float(step["wait_s"].get(road, 0.0)) for road in WAITS}
    between = float(step["between_s"])
    rest = max(0.0, step["seconds"] - between - sum(waits.values()))
    return {"computing and the rest": rest, **waits, "between steps (data, evaluation, saving)": between}


def _largest_part(step: dict[str, Any]) -> str:
    parts = parts_of(step)
    name = max(parts, key=lambda part: parts[part])
    return f"{parts[name]:.3f} s {name}"


def _warnings(out: dict[str, Any]) -> Iterator[str]:
    for row in out["memory"]:
        told, found = row["predicted"], row["measured"]
        if (
            row["kind"] == "all"
            and row["off"] is not None
            and abs(row["off"]) > OFF
            and abs(found - told) > SMALL_BYTES
        ):
            kinds = [each for each in out["memory"] if each["tier"] == row["tier"] and each["kind"] != "all"]
            most = max(kinds, key=lambda each: abs(each["measured"] - each["predicted"]))
            yield (
                f"{row['tier']} memory at peak: {size_text(found)}, predicted {size_text(told)} ({row['off']:+.0%}), most of "
                f"it in {most['kind']} ({size_text(most['measured'])}, predicted {size_text(most['predicted'])})"
            )
    for row in out["traffic"]:
        told, found = row["predicted"], row["measured"]
        if row["off"] is not None and abs(row["off"]) > OFF and abs(found - told) > SMALL_BYTES:
            yield f"{row['road']}: {size_text(found)} per step, predicted {size_text(told)} ({row['off']:+.0%})"
    time = out["time"]
    told_s = time["predicted_step_s"]
    if told_s and abs(time["step_s"] - told_s) > OFF * told_s:
        off = (time["step_s"] - told_s) / told_s
        yield (
            f"a step takes {time['step_s']:.3f} s, predicted {told_s:.3f} s ({off:+.0%}): that is a bound for perfect "
            "overlap; hf-zero probe measures this machine's speeds again"
        )
    for road, waited in time["wait_s"].items():
        if waited > WAITED * time["step_s"]:
            yield f"{waited / time['step_s']:.0%} of the step is {CHANNELS[road].label}. What helps: {CHANNELS[road].advice}"


def _at(values: dict[str, Any], keys: Sequence[str]) -> float:
    """`values[keys[0]][keys[1]]…`; 0 where the last is missing."""
    for key in keys[:-1]:
        values = values[key]
    return float(values.get(keys[-1], 0.0))
