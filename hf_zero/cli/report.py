"""Read a recorded run and compare it with its plan.

`diagnostics.recorder.Recorder` writes one file per rank with one JSON object per line: facts, then steps and
logs. Every start of training appends its own facts. The last start is reported.
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
from ..diagnostics.recorder import FORMAT, RECENT, rates, value_at
from ..errors import CheckpointError, ConfigError
from ..plan.costs import KINDS, TIERS
from ..plan.report import duration
from ..plan.traffic import COLLECTIVES, WAITS

TOLERANCE = 0.05
"""Relative excess over the plan that is reported, for sizes above `SMALL_BYTES`."""
SMALL_BYTES = 1 << 20
MUCH_WAITING = 0.2
"""Share of a step spent waiting for one thing that is reported."""
MAX_BYTES = 4 << 30
"""Largest file of one rank: some million steps."""
KIND_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered parameters",
    "communication": "communication buffers",
    "staging": "transfer buffers",
    "activations": "activations",
    "all": "total",
}
_BATCH = "more tokens per step (batch, accumulation)"
_RANKS = "balanced batches, or a check for a slow rank"
LABELS: Mapping[str, tuple[str, str]] = {
    "gather": ("all-gather", f"{_BATCH}, stage 2 (gathers once per step), or a faster network"),
    "reduce": ("reduce-scatter", f"{_BATCH}, reduce_dtype='bfloat16', or a faster network"),
    "scalar": ("norms and flags", _RANKS),
    "agree": ("agreement between ranks", _RANKS),
    "down": ("copies to the host", f"{_BATCH}, or less state on the host (offload_optimizer='auto')"),
    "up": ("copies to the device", f"{_BATCH}, or parameters on the device (offload_params='none')"),
    "read": ("disk reads", "parameters on the host (offload_params='cpu'), or a faster disk"),
    "write": ("disk writes", "less state on disk ('cpu' or 'auto'), or a faster disk"),
    "optimizer": (
        "optimizer step of offloaded state",
        f"{_BATCH}, step_in_backward=True without clipping, or offload_optimizer='auto'",
    ),
}
"""Label of each wait in a step, and advice that makes it shorter."""
PARTS = {
    "compute": "computing and everything else",
    **{channel: f"waiting: {label}" for channel, (label, _) in LABELS.items()},
    "between": "between steps (data, evaluation, saving)",
}
"""Label of each part of a step."""


# Reading ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The last start of training in one rank's file.

    Attributes:
        facts: empty until the first step has ended.
        logs: losses and other logged values, with their steps.
        ended: training finished; otherwise it is in progress or was killed.
        age_s: seconds since the last line was written.
    """

    path: Path
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    logs: list[dict[str, Any]]
    ended: bool
    age_s: float
    notes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        named = re.search(r"\.rank(\d+)\.jsonl$", self.path.name)
        return int(self.facts.get("rank") or (named[1] if named else 0))

    @property
    def usual(self) -> list[dict[str, Any]]:
        """Steps that the plan describes: not the first, without evaluation, all micro-batches."""
        passes = self.facts["predicted"]["backward_per_step"]
        usual = [s for s in self.steps[1:] if not s["evaluations"] and s["forwards"] == passes]
        return usual or self.steps

    def median(self, *keys: str) -> float:
        return float(statistics.median(value_at(step, *keys) for step in self.usual))

    def highest(self, *keys: str) -> int:
        return int(max(value_at(step, *keys) for step in self.steps))

    def planned_peak(self, tier: str) -> int:
        return int(self.facts["predicted"]["peak_bytes"][tier])

    def parts_s(self) -> dict[str, float]:
        """Seconds by part of a step (`PARTS`), each the median over the usual steps; those of one step add up to it."""
        steps = []
        for step in self.usual:
            waits = {channel: float(step["wait_s"].get(channel, 0.0)) for channel in WAITS}
            rest = step["seconds"] - step["between_s"] - sum(waits.values())
            steps.append({"compute": max(0.0, rest), **waits, "between": float(step["between_s"])})
        return {name: statistics.median(step[name] for step in steps) for name in PARTS}


def read(path: Path) -> Run:
    """Read one rank's file; a run in progress has the steps that were written so far.

    Raises:
        ConfigError: the file is missing, has another format, or is not a record of steps.
    """
    try:
        lines = read_bounded(path, MAX_BYTES).splitlines()
        age_s = max(0.0, time.time() - path.stat().st_mtime)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    records = [_record(line) for line in lines if line]
    whole = [record for record in records if record is not None]
    starts = [at for at, record in enumerate(whole) if record["kind"] == "facts"]
    facts, *after = whole[starts[-1] :] if starts else [{}]
    steps, logs = ([record for record in after if record["kind"] == kind] for kind in ("step", "log"))
    run = Run(path, facts, steps, logs, ended=bool(after) and after[-1]["kind"] == "end", age_s=age_s)
    if run.facts.get("format", FORMAT) != FORMAT:
        version = run.facts.get("version")
        raise ConfigError(f"{path} was written by hf_zero {version}, in another format. Use that version.")
    if lines and not run.facts:
        raise ConfigError(f"{path} has no whole step. Expected lines that ZeroCallback or engine.record wrote.")
    if damaged := len(records) - len(whole):
        run.notes.append(f"{path.name}: skipped {damaged} damaged line{'s' if damaged > 1 else ''}")
    if len(starts) > 1:
        run.notes.append(f"{path.name}: the last of {len(starts)} starts of training")
    return run


def _record(line: bytes) -> dict[str, Any] | None:
    """Return one complete line of a record; None for any other."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def read_all(path: Path) -> list[Run]:
    """Read the files of all ranks, in rank order; those without a step come last.

    Raises:
        ConfigError: no file was found.
    """
    if path.is_file():
        return [read(path)]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder or file. Give the output_dir of a run with ZeroCallback.")
    folder = path / "_zero" if (path / "_zero").is_dir() else path
    found = [each for each in folder.iterdir() if re.fullmatch(r"zero_steps(\.rank\d+)?\.jsonl", each.name)]
    if not found:
        raise ConfigError(
            f"{path} has no zero_steps.jsonl. Train with ZeroCallback (the run is the Trainer's "
            "output_dir), or call engine.record(folder)."
        )
    runs = sorted((read(each) for each in found), key=lambda run: (not run.steps, run.rank))
    last = runs[0] if runs[0].rank == 0 else min(runs, key=lambda run: run.age_s)
    ranks = int(last.facts["world_size"]) if last.facts else math.inf
    older = [run for run in runs if run.steps and run.rank >= ranks and run is not last]
    runs = [run for run in runs if run not in older]
    if older:
        left_out = ", ".join(str(run.rank) for run in older)
        runs[0].notes.append(f"left out rank {left_out}: written by an earlier run with more ranks")
    for run in runs:
        if not run.steps:
            run.notes.append(f"rank {run.rank}: its first step is not over yet")
    if runs[0].steps and len(runs) < (world_size := int(runs[0].facts["world_size"])):
        runs[0].notes.append(f"{len(runs)} of {world_size} ranks' files are here; the others are on other machines")
    return runs


# Numbers ------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Summarise a run as plain values (bytes, seconds) of the first rank found; `ranks` has each."""
    notes = [note for each in runs for note in each.notes]
    runs = [each for each in runs if each.steps] or runs[:1]
    run = runs[0]
    out: dict[str, Any] = {
        "run": str(run.path),
        "rank": run.rank,
        "state": "ended" if all(each.ended for each in runs) else "not ended",
        "last_written_s_ago": min(each.age_s for each in runs),
        "steps": len(run.steps),
        "notes": notes,
    }
    if not run.steps:
        verdict = {"topic": "Verdict", "ok": None, "value": "Started", "text": "the first step is not over yet"}
        return {**out, "verdict": [verdict]}
    facts = run.facts
    out |= {
        "first_step": run.steps[0]["step"],
        "last_step": run.steps[-1]["step"],
        "max_steps": facts.get("about", {}).get("max_steps"),
        "facts": facts,
        "memory": list(_memory_rows(run)),
        "traffic": list(_traffic_rows(run)),
        "total_s": run.steps[-1]["at_s"],
        "batch": {name: run.median(name) * int(facts["world_size"]) for name in ("samples", "tokens")},
        "throughput": throughput(runs),
        "losses": [{"step": log["step"], **log["values"]} for log in run.logs],
        "ranks": [_rank_row(each) for each in runs],
    }
    out["warnings"] = list(_warnings(out))
    out["verdict"] = [dict(zip(("topic", "ok", "value", "text"), row)) for row in _verdict(out)]
    return out


def _rank_row(run: Run) -> dict[str, Any]:
    return {
        "rank": run.rank,
        "steps": len(run.steps),
        "step_s": run.median("seconds"),
        "wait_s": statistics.median(sum(step["wait_s"].values()) for step in run.usual),
        "parts_s": run.parts_s(),
        "peak_bytes": {tier.value: run.highest("peak", tier.value, "all") for tier in TIERS},
        "planned_bytes": {tier.value: run.planned_peak(tier.value) for tier in TIERS},
        "rss_peak_bytes": run.highest("process", "rss peak"),
        "allocated_peak_bytes": run.highest("process", "device allocated peak"),
    }


def throughput(runs: Sequence[Run]) -> dict[str, Any]:
    """Return samples and tokens per second of all ranks; ranks without a file count like the others."""
    share = int(runs[0].facts["world_size"]) / len(runs)
    found = zip(*(rates(run.usual[-RECENT:]) for run in runs))  # the steps that the end of training reports, too
    samples, tokens = (sum(each) * share or None for each in found)
    return {"is_estimate": share != 1, "samples_per_s": samples, "tokens_per_s": tokens}


def _memory_rows(run: Run) -> Iterator[dict[str, Any]]:
    predicted = run.facts["predicted"]["peak"]
    for tier in (tier.value for tier in TIERS):
        rows = [(kind, int(predicted[tier][kind]), run.highest("peak", tier, kind)) for kind in KINDS]
        rows = [row for row in rows if row[1] or row[2]]
        rows += [("all", run.planned_peak(tier), run.highest("peak", tier, "all"))] if rows else []
        for kind, planned, counted in rows:
            yield {"tier": tier, "kind": kind, **_compared(planned, counted)}


def _traffic_rows(run: Run) -> Iterator[dict[str, Any]]:
    for channel in WAITS[:-1]:
        planned, counted = run.facts["predicted"]["traffic"].get(channel), run.median("bytes", channel)
        if planned or counted:
            yield {"road": channel, **_compared(planned, counted)}


def _compared(planned: float | None, counted: float) -> dict[str, float | None]:
    return {"predicted": planned, "counted": counted, "off": None if planned is None else _relative(planned, counted)}


def _relative(planned: float, found: float) -> float | None:
    """Change of `found` relative to `planned`; None where nothing was planned."""
    return (found - planned) / planned if planned else None


def _verdict(out: dict[str, Any]) -> Iterator[tuple[str, bool | None, str, str]]:
    """Yield (topic, ok, value, text) of what a reader wants first: loss, speed, memory, time, verdict."""
    wrong = [f"{row['tier']} memory above the plan" for row in out["memory"] if row["kind"] == "all" and _is_above(row)]
    losses = [log["loss"] for log in out["losses"] if "loss" in log]
    if losses:
        is_number = math.isfinite(losses[-1])
        yield "Loss", None if is_number else False, f"{losses[-1]:.4g}", f"from {losses[0]:.4g}"
        wrong += [] if is_number else ["loss not finite"]
    rates = ((name, out["throughput"][f"{name}_per_s"]) for name in ("tokens", "samples"))
    name, rate = next((each for each in rates if each[1]), ("samples", None))
    about = "estimated for all ranks" if out["throughput"]["is_estimate"] else "all ranks"
    yield f"{name.capitalize()}/s", None, f"{rate:,.4g}" if rate else "–", about
    on_device, process = (max(row[f"{of}_peak_bytes"] for row in out["ranks"]) for of in ("allocated", "rss"))
    kind = "device memory" if on_device else "process memory, with Python and libraries"
    yield "Peak memory", None, size_text(on_device or process), f"{kind}, highest rank"
    yield "Time", None, duration(out["total_s"]), f"{out['steps']:,} steps of {out['ranks'][0]['step_s']:.3g} s"
    is_over, of = out["state"] == "ended", f" of {out['max_steps']:,}" if out["max_steps"] else ""
    value = "Check" if wrong else "Finished" if is_over else "Not finished"
    state = f"{'after' if is_over else 'in progress or killed:'} step {out['last_step']:,}{of}"
    state += "" if is_over else f", last written {duration(out['last_written_s_ago'])} ago"
    ok = False if wrong else True if is_over else None
    yield "Verdict", ok, value, f"{state}; {', '.join(wrong) or 'memory within the plan'}"


def _warnings(out: dict[str, Any]) -> Iterator[str]:
    """Yield what exceeds the plan or takes long. Using less than planned raises no warning."""
    for row in out["memory"]:
        if row["kind"] == "all" and _is_above(row):
            kinds = [each for each in out["memory"] if each["tier"] == row["tier"] and each["kind"] != "all"]
            most = max(kinds, key=lambda each: each["counted"] - each["predicted"])
            yield (
                f"{row['tier']} memory is above the plan: {size_text(row['counted'])} at peak, "
                f"{size_text(row['predicted'])} planned. Most of the difference: "
                f"{KIND_LABELS[most['kind']]} ({size_text(most['counted'])}, "
                f"{size_text(most['predicted'])} planned)."
            )
    first = out["ranks"][0]
    for channel, (label, advice) in LABELS.items():
        share = first["parts_s"][channel] / first["step_s"] if first["step_s"] else 0.0
        if share > MUCH_WAITING:
            yield f"{share:.0%} of a step waits for: {label}. What helps: {advice}."


def _is_above(row: Mapping[str, Any]) -> bool:
    planned = row["predicted"]
    return planned is not None and row["counted"] > planned * (1 + TOLERANCE) + SMALL_BYTES


# Two runs -----------------------------------------------------------------------------------------


def differences(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare two summaries on what can be compared.

    Returns:
        Rows (`what`, both `values`, relative `change`, `unit`: bytes, s, 1/s or none), and one
        sentence for each kind of measurement that was left out.
    """
    devices = [out["facts"]["machine"]["device"].partition(":")[0] for out in (one, other)]
    batches = zip(one["batch"].values(), other["batch"].values())
    kinds, left_out = {"setting", "memory", "speed", "step"}, []
    if one["facts"]["parameters"] != other["facts"]["parameters"]:
        kinds = {"setting"}
        left_out.append("The models have different sizes: memory, speed and loss are not compared.")
    elif devices[0] != devices[1]:
        kinds -= {"speed", "step"}
        left_out.append(f"The runs used different devices ({' and '.join(devices)}): speed is not compared.")
    elif not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in batches):
        kinds.remove("step")
        left_out.append("The runs have different batches per step: the time of a step is not compared.")
    pairs = [(*first, second[-1]) for first, second in zip(_measurements(one), _measurements(other))]
    rows = []
    for kind, what, unit, a, b in [*pairs, *_loss_measurements(one, other)]:
        if kind in kinds and (a, b) != (None, None):
            change = None if kind == "setting" or None in (a, b) else _relative(a, b)
            rows.append({"what": what, "unit": unit, "values": [a, b], "change": change})
    return rows, left_out


def _measurements(out: dict[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (kind, what, unit, value): memory needs equal models, speed equal devices as well, steps equal batches as well."""
    facts, ranks, rates = out["facts"], out["ranks"], out["throughput"]
    settings = {
        "model": facts.get("about", {}).get("model"),
        "parameters": facts["parameters"],
        "stage": facts["stage"],
        "ranks": facts["world_size"],
        "optimizer offload": facts["config"].get("offload_optimizer"),
        "parameter offload": facts["config"].get("offload_params"),
        "steps": out["steps"],
    }
    yield from (("setting", what, "", value) for what, value in settings.items())
    memory = {f"{tier.value} memory": [row["peak_bytes"][tier.value] for row in ranks] for tier in TIERS}
    memory["torch's device memory"] = [row["allocated_peak_bytes"] for row in ranks]
    memory["process memory"] = [row["rss_peak_bytes"] for row in ranks]
    yield from (("memory", f"{what}, highest rank", "bytes", max(sizes) or None) for what, sizes in memory.items())
    yield "step", "time per step (median)", "s", ranks[0]["step_s"]
    yield "step", "waiting per step (median)", "s", ranks[0]["wait_s"]
    yield "step", "sent per step", "bytes", sum(r["counted"] for r in out["traffic"] if r["road"] in COLLECTIVES)
    yield from (("speed", f"{name}/s", "1/s", rates[f"{name}_per_s"]) for name in ("tokens", "samples"))


def _loss_measurements(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Yield the losses at the last step that both runs logged."""
    for name, label in (("loss", "loss"), ("eval_loss", "evaluation loss")):
        a, b = ({log["step"]: log[name] for log in out["losses"] if name in log} for out in (one, other))
        if common := a.keys() & b.keys():
            step = max(common)
            yield "memory", f"{label} at step {step:,}", "", a[step], b[step]
