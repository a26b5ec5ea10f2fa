"""A run's steps as they were measured, against what was predicted: read from its files, summed up, and what to change.

A run's file (`plan.record.Recorder` writes it) has one JSON object per line: facts, then steps. Every start of training appends
facts of its own; the last start is reported.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.files import parse_json, read_bounded
from ..config import size_text
from ..errors import CheckpointError, ConfigError
from ..plan.costs import KINDS, TIERS
from ..plan.record import FORMAT
from ..plan.report import duration
from ..plan.work import CHANNELS, COLLECTIVES, ROADS, WAITS

OFF = 0.05
"""A prediction that is further off is warned of, from `SMALL_BYTES` on."""
SMALL_BYTES = 1 << 20
WAITED = 0.2
"""Share of the step that may be waiting for one thing."""
SLOWEST = 5
BETWEEN = "between steps (data, evaluation, saving)"
COUNTED = "counted by hf_zero (parameters, gradients, optimizer state, buffers)"


# Reading ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The last start of training in one rank's file.

    Attributes:
        facts: `{}` before the first step is over.
        logs: losses and what else was logged, with their steps.
        ended: training came to its end; else it goes on, or was killed.
        age_s: since the last line was written.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    age_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        named = re.search(r"\.rank(\d+)\.jsonl$", self.path.name)
        return int(self.facts.get("rank") or (named[1] if named else 0))

    @property
    def usual(self) -> list[dict[str, Any]]:
        """Steps that the prediction is about: not the first, none beside an evaluation, micro-batches as predicted."""
        passes = self.facts["predicted"]["backward_per_step"]
        usual = [step for step in self.steps[1:] if not step["evaluations"] and step["forwards"] == passes]
        return usual or self.steps

    def median(self, name: str, *inner: str) -> float:
        """Of the usual steps; 0 of what is not in them."""
        values = (step[name].get(inner[0], 0.0) if inner else step.get(name, 0.0) for step in self.usual)
        return float(statistics.median(values))

    def planned_peak(self, tier: str) -> int:
        """Of all kinds together."""
        predicted = self.facts["predicted"]
        return int(predicted.get("peak_bytes", {}).get(tier, sum(predicted["peak"][tier].values())))

    def peak(self, tier: str, kind: str) -> int:
        return max(step["peak"].get(tier, {}).get(kind, 0) for step in self.steps)


MAX_BYTES = 4 << 30
"""Of one rank's file: some million steps."""


def read(path: Path) -> Run:
    """A run in progress has what there is of it; one whose first step is not over has no steps.

    Raises:
        ConfigError: no such file, of a later version, or of something else.
    """
    run = Run(path)
    damaged = starts = 0
    try:
        lines = read_bounded(path, MAX_BYTES).splitlines()
        run.age_s = max(0.0, time.time() - path.stat().st_mtime)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    for line in filter(None, lines):
        record = _record(line)
        if record is None:
            damaged += 1
        elif record["kind"] == "facts":
            starts += 1
            run = Run(path, record, age_s=run.age_s)
        elif run.facts:
            run.ended = record["kind"] == "end"
            if record["kind"] in ("step", "log"):
                (run.steps if record["kind"] == "step" else run.logs).append(record)
    if run.facts.get("format", FORMAT) != FORMAT:
        version = run.facts.get("version")
        raise ConfigError(f"{path} was written by hf_zero {version}, in another format: use that version")
    if lines and not run.facts:
        raise ConfigError(f"{path} has no whole step in it: expected lines that ZeroCallback or engine.record wrote")
    if damaged:
        run.notes.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} passed over")
    if starts > 1:
        run.notes.append(f"{path.name}: the last of {starts} starts of training")
    return run


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "facts": ("predicted", "world_size", "stage", "precision"),
    "step": ("step", "at_s", "seconds", "between_s", "forwards", "evaluations", "bytes", "wait_s", "peak", "process"),
    "log": ("step", "values"),
}


def _record(line: bytes) -> dict[str, Any] | None:
    """One whole line of ours; None for any other."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    is_ours = isinstance(record, dict) and "kind" in record
    return record if is_ours and all(name in record for name in _NEEDED.get(str(record["kind"]), ())) else None


def read_all(path: Path) -> list[Run]:
    """Of every rank whose file is there, in rank order; those without a step come last.

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
    runs = sorted((read(entry) for entry in paths), key=lambda run: (not run.steps, run.rank))
    for run in runs:
        if not run.steps:
            run.notes.append(f"rank {run.rank}: its first step is not over yet")
    if runs[0].steps and len(runs) < (ranks := int(runs[0].facts["world_size"])):
        runs[0].notes.append(f"{len(runs)} of {ranks} ranks' files are here: those of other machines are there")
    return runs


# Numbers ------------------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What is shown of a run, as plain values: bytes and seconds, of the first rank that is there; `ranks`: of each."""
    notes = [note for each in runs for note in each.notes]
    runs = [each for each in runs if each.steps] or runs[:1]
    run = runs[0]
    out: dict[str, Any] = {
        "run": str(run.path),
        "rank": run.rank,
        "state": "ended" if all(each.ended for each in runs) else "not ended",
        "last_written_s_ago": min(each.age_s for each in runs),
        "steps": len(run.steps),
    }
    if not run.steps:
        return {**out, "notes": notes, "verdict": [_said("state", None, "the first step is not over yet")]}
    facts, predicted = run.facts, run.facts["predicted"]
    waits = {road: run.median("wait_s", road) for road in WAITS}
    median, between = run.median("seconds"), run.median("between_s")
    slowest = sorted(run.steps, key=lambda step: step["seconds"], reverse=True)[:SLOWEST]
    process = {name: max(step["process"].get(name, 0) for step in run.steps) for name in run.steps[-1]["process"]}
    out |= {
        "first_step": run.steps[0]["step"],
        "last_step": run.steps[-1]["step"],
        "max_steps": facts.get("about", {}).get("max_steps"),
        "facts": facts,
        "memory": list(_memory_rows(run)),
        "limits": {name: given for name in ("device_memory", "host_memory") if (given := facts["config"].get(name))},
        "process": process,
        "outside": list(_outside(run, process)),
        "traffic": list(_traffic_rows(run)),
        "time": {
            "step_s": median,
            "predicted_step_s": predicted["step_s"],
            "between_s": between,
            "wait_s": waits,
            "rest_s": max(0.0, median - between - sum(waits.values())),
        },
        "throughput": throughput(runs),
        "losses": [{"step": log["step"], **log["values"]} for log in run.logs],
        "slowest": [
            {"step": step["step"], "seconds": step["seconds"], "most": _largest_part(step)} for step in slowest
        ],
        "ranks": [
            {
                "rank": each.rank,
                "steps": len(each.steps),
                "step_s": each.median("seconds"),
                "wait_s": statistics.median(sum(step["wait_s"].values()) for step in each.usual),
                "parts_s": median_parts(each),
                "peak_bytes": {tier.value: each.peak(tier.value, "all") for tier in TIERS},
                "rss_peak_bytes": max(step["process"].get("rss peak", 0) for step in each.steps),
            }
            for each in runs
        ],
        "notes": notes,
        "moves": [
            f"rank {each.rank}, {move}" for each in runs for step in each.steps for move in step.get("moves", ())
        ],
    }
    out["warnings"] = list(_warnings(out))
    out["verdict"] = list(_verdict(out))
    return out


def throughput(runs: Sequence[Run]) -> dict[str, Any]:
    """Per second, of all ranks: of those whose files are here, and as much of each other; None where none were counted."""
    share = int(runs[0].facts["world_size"]) / len(runs)
    out: dict[str, Any] = {"is_estimate": share != 1}
    for name in ("samples", "tokens"):
        rates = [
            statistics.median(step.get(name, 0) / step["seconds"] if step["seconds"] else 0.0 for step in run.usual)
            for run in runs
        ]
        out[f"{name}_per_s"] = sum(rates) * share or None
    return out


def median_parts(run: Run) -> dict[str, float]:
    """Seconds by part of a step, each the median over the usual steps."""
    parts = [parts_of(step) for step in run.usual]
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def _outside(run: Run, highest: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """What the system and torch's allocator say the memory is at its highest, and what of it is what.

    The engine counts what it allocates. The rest of a process is Python and libraries, which were there before the first
    step, and what training allocates beside the engine: activations, gradients in the making, what an allocator keeps.
    """
    start, on_cpu = run.facts.get("start"), run.facts["machine"]["device"] == "cpu"
    if start and highest.get("rss peak"):
        tiers = ("device", "host") if on_cpu else ("host",)
        counted = max(sum(step["peak"].get(tier, {}).get("all", 0) for tier in tiers) for step in run.steps)
        before = max(0, start["process"].get("rss", 0) - sum(start["counted"].get(tier, 0) for tier in tiers))
        in_training = highest["rss peak"] > start["process"].get("rss peak", 0)
        peak = highest["rss peak"] if in_training else highest.get("rss", 0)
        parts = {
            COUNTED: min(counted, peak),
            "there before the first step (Python, libraries, data)": min(before, max(0, peak - counted)),
            "activations, gradients in the making, allocator": max(0, peak - counted - before),
        }
        note = "" if in_training else f"it was higher before training: {size_text(highest['rss peak'])}"
        yield {"what": "process, resident", "peak": peak, "parts": parts, "note": note}
    if allocated := highest.get("device allocated peak"):
        counted = run.peak("device", "all")
        reserved = max(allocated, highest.get("device reserved peak", 0))
        parts = {
            COUNTED: min(counted, allocated),
            "activations, gradients in the making, temporaries": max(0, allocated - counted),
            "kept by torch's allocator, not in use": reserved - allocated,
        }
        yield {"what": "device, torch's allocator", "peak": reserved, "parts": parts, "note": ""}


def _said(topic: str, ok: bool | None, text: str) -> dict[str, Any]:
    return {"topic": topic, "ok": ok, "text": text}


def _verdict(out: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Did it go on to its end, did it fit the plan, how fast, where does the time go, did it learn. `ok`: None, no verdict."""
    of = f" of {out['max_steps']:,}" if out["max_steps"] else ""
    if out["state"] == "ended":
        yield _said("state", True, f"ended after step {out['last_step']:,}{of}")
    else:
        ago = duration(out["last_written_s_ago"])
        yield _said("state", None, f"in progress or killed: step {out['last_step']:,}{of}, last written {ago} ago")
    for row in out["memory"]:
        if row["kind"] == "all":
            off = "" if row["off"] is None else f" ({row['off']:+.1%})"
            fits = row["counted"] <= row["predicted"] * (1 + OFF) + SMALL_BYTES
            text = f"{size_text(row['counted'])} counted at peak, {size_text(row['predicted'])} planned{off}"
            yield _said(f"{row['tier']} memory", fits, ("fits the plan: " if fits else "above the plan: ") + text)
    for each in out["outside"]:
        parts = ", ".join(f"{size_text(size)} {name}" for name, size in each["parts"].items() if size)
        yield _said(each["what"], None, f"{size_text(each['peak'])} at peak: {parts}")
    time_, rate = out["time"], out["throughput"]
    about = "about " if rate["is_estimate"] else ""
    speeds = [
        f"{about}{rate[f'{name}_per_s']:,.4g} {name}/s" for name in ("tokens", "samples") if rate[f"{name}_per_s"]
    ]
    yield _said("speed", None, ", ".join([*speeds, f"{time_['step_s']:.3g} s per step (median)"]))
    parts_s = out["ranks"][0]["parts_s"]
    whole = sum(parts_s.values())
    if whole:
        most = sorted(parts_s.items(), key=lambda part: part[1], reverse=True)[:3]
        waits = max(time_["wait_s"].values(), default=0.0)
        texts = [f"{seconds / whole:.0%} {name}" for name, seconds in most if seconds / whole >= 0.005]
        yield _said("time", waits <= WAITED * time_["step_s"], ", ".join(texts))
    losses = [log["loss"] for log in out["losses"] if "loss" in log]
    if losses:
        yield _said("loss", None if math.isfinite(losses[-1]) else False, f"{losses[0]:.4g} → {losses[-1]:.4g}")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Of two summaries: what, both values, and the second's change relative to the first; `unit`: bytes, s, 1/s or none."""
    rows: list[dict[str, Any]] = []
    for (what, unit, a), (_, _, b) in zip(_compared(one), _compared(other)):
        if a is not None or b is not None:
            numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
            rows.append({"what": what, "unit": unit, "values": [a, b], "change": _off(a, b) if numbers else None})
    return rows


def _compared(out: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name in ("stage", "world_size", "parameters"):
        yield name.replace("_", " "), "", out["facts"].get(name)
    for name in ("offload_optimizer", "offload_params"):
        yield name, "", out["facts"]["config"].get(name)
    yield "steps", "", out["steps"]
    yield "step, median", "s", out["time"]["step_s"]
    yield "waiting per step, median", "s", out["ranks"][0]["wait_s"]
    for name in ("tokens", "samples"):
        yield f"{name}/s", "1/s", out["throughput"][f"{name}_per_s"]
    for tier in (tier.value for tier in TIERS):
        yield f"{tier} peak, highest rank", "bytes", max(row["peak_bytes"][tier] for row in out["ranks"]) or None
    yield "process peak, highest rank", "bytes", max(row["rss_peak_bytes"] for row in out["ranks"]) or None
    yield "sent per step", "bytes", sum(row["counted"] for row in out["traffic"] if row["road"] in COLLECTIVES)
    for name, what in (("loss", "last loss"), ("eval_loss", "last evaluation loss")):
        yield what, "", next((log[name] for log in reversed(out["losses"]) if name in log), None)


def _memory_rows(run: Run) -> Iterator[dict[str, Any]]:
    predicted = run.facts["predicted"]["peak"]
    for tier in (tier.value for tier in TIERS):
        rows = [(kind, int(predicted[tier][kind]), run.peak(tier, kind)) for kind in KINDS]
        rows = [row for row in rows if row[1] or row[2]]
        if rows:
            rows.append(("all", run.planned_peak(tier), run.peak(tier, "all")))
        for kind, told, found in rows:
            yield {"tier": tier, "kind": kind, "predicted": told, "counted": found, "off": _off(told, found)}


def _traffic_rows(run: Run) -> Iterator[dict[str, Any]]:
    for road in (*ROADS[:2], "scalar", "agree", *ROADS[2:]):
        told, found = run.facts["predicted"]["traffic"].get(road), run.median("bytes", road)
        if told or found:
            off = None if told is None else _off(told, found)
            yield {"road": road, "predicted": told, "counted": found, "wait_s": run.median("wait_s", road), "off": off}


def _off(told: float, found: float) -> float | None:
    """Relative to what was predicted; None where nothing was."""
    return (found - told) / told if told else None


def parts_of(step: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of one step by what they went to; they add up to the step."""
    waits = {CHANNELS[road].label: float(step["wait_s"].get(road, 0.0)) for road in WAITS}
    between = float(step["between_s"])
    rest = max(0.0, step["seconds"] - between - sum(waits.values()))
    return {"computing and the rest": rest, **waits, BETWEEN: between}


def _largest_part(step: dict[str, Any]) -> str:
    name, most_s = max(parts_of(step).items(), key=lambda part: part[1])
    return f"{most_s:.3f} s {name}"


def _warnings(out: dict[str, Any]) -> Iterator[str]:
    for row in out["memory"]:
        told, found = row["predicted"], row["counted"]
        if row["kind"] == "all" and _is_off(row):
            kinds = [each for each in out["memory"] if each["tier"] == row["tier"] and each["kind"] != "all"]
            most = max(kinds, key=lambda each: abs(each["counted"] - each["predicted"]))
            yield (
                f"{row['tier']} memory at peak: {size_text(found)}, predicted {size_text(told)} ({row['off']:+.0%}), most of "
                f"it in {most['kind']} ({size_text(most['counted'])}, predicted {size_text(most['predicted'])})"
            )
    for row in out["traffic"]:
        told, found = row["predicted"], row["counted"]
        if _is_off(row):
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


def _is_off(row: Mapping[str, Any]) -> bool:
    return row["off"] is not None and abs(row["off"]) > OFF and abs(row["counted"] - row["predicted"]) > SMALL_BYTES
