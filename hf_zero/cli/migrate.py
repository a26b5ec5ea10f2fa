"""`hf-zero migrate`: a DeepSpeed JSON, or an accelerate or FSDP YAML, as settings of ours. What becomes of a key is a row of
`migrations`; here is only how rows are applied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import STAGES, ZeroConfig
from ..errors import ConfigError
from .commands import OK, WRONG, as_flags, as_plugin, print_json
from .files import read_settings
from .migrations import ACCELERATE, DEEPSPEED, FSDP, Row
from .options import MigrateOptions
from .show import pasted, table, text

_DEEPSPEED_KEYS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "fp16",
    "bf16",
    "optimizer",
}
_ACCELERATE_KEYS = {"distributed_type", "compute_environment", "deepspeed_config", "num_processes"}
_NOTHING: tuple[Any, ...] = (None, "", "none", False, 0, 1, [], {})
"""Values with which a setting asks for nothing, so that nothing is lost."""
_STYLES = {"lost": "bold red", "unknown": "bold red", "same": "green", "trainer": "green"}
_ORDER = ("unknown", "lost", "same", "trainer", "stays", "not needed")
_SHARDED = max(STAGES)


@dataclass(frozen=True)
class Finding:
    """One setting of the file, and what becomes of it."""

    key: str
    value: Any
    verdict: str
    becomes: str
    why: str


@dataclass
class Migration:
    """What a file says in our words."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `ZeroConfig`."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer (`TrainingArguments`)."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def lost(self) -> list[Finding]:
        return [found for found in self.findings if found.verdict in ("lost", "unknown")]

    @property
    def command_line(self) -> str:
        return as_flags({**{f"zero_{name}": value for name, value in self.settings.items()}, **self.trainer})


def run(options: MigrateOptions) -> int:
    """Prints it; status 1 where something that mattered has no equivalent, or is not known."""
    made = migrate(Path(options.file))
    if options.json:
        values = {"kind": made.kind, "settings": made.settings, "trainer": made.trainer}
        values |= {"command_line": made.command_line, "plugin": as_plugin(made.settings)}
        print_json({**values, "findings": [asdict(found) for found in made.findings]})
    else:
        _show(made, options.file)
    return WRONG if made.lost else OK


def migrate(path: Path) -> Migration:
    """Raises ConfigError: no file that can be read, or none of these."""
    values = read_settings(path)
    keys = set(values)
    fsdp = {name.removeprefix("fsdp_") for name in keys} & {row.key for row in FSDP}
    if keys & _ACCELERATE_KEYS:
        made = Migration(f"accelerate, {values.get('distributed_type', 'NO')}")
        _accelerate(made, values, path)
    elif "fsdp" in keys or "fsdp_config" in keys or (fsdp and not keys & _DEEPSPEED_KEYS):
        made = Migration("the Trainer's FSDP")
        _trainer(made, values)
    elif keys & _DEEPSPEED_KEYS:
        made = Migration("DeepSpeed")
        _apply(made, values, DEEPSPEED)
    else:
        raise ConfigError(
            f"{path} is neither a DeepSpeed config (zero_optimization, …), nor an accelerate config (distributed_type, …), nor "
            f"one of FSDP (fsdp_sharding_strategy, …); it has {', '.join(sorted(map(str, keys))[:8]) or 'nothing'}"
        )
    _settle(made)
    return made


def _accelerate(made: Migration, values: dict[str, Any], path: Path) -> None:
    """Its own keys, and those of the engine that it sets up."""
    values = dict(values)
    fsdp, engine = (_object(values, name, path) for name in ("fsdp_config", "deepspeed_config"))
    values.pop("fsdp_config", None)
    file = engine.pop("deepspeed_config_file", None)
    if engine or file:
        values["deepspeed_config"] = engine
    _apply(made, values, ACCELERATE)
    if fsdp:
        _apply(made, _unprefixed(fsdp), FSDP, "fsdp_config.fsdp_")
    if file:
        inner = path.parent / str(file)  # or where it says, if that is absolute
        _apply(made, read_settings(inner), DEEPSPEED, f"{inner.name}: ")


def _object(values: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: expected settings by name under {name}, found {type(found).__name__}")
    return dict(found)


def _trainer(made: Migration, values: dict[str, Any]) -> None:
    """`TrainingArguments(fsdp=…, fsdp_config=…)`, or the file that fsdp_config names."""
    asked = values.get("fsdp", [])
    words = (
        asked.split() if isinstance(asked, str) else [str(word) for word in asked] if isinstance(asked, list) else []
    )
    inner = values.get("fsdp_config", {key: value for key, value in values.items() if key != "fsdp"})
    strategies = {row for of in FSDP if of.key == "sharding_strategy" for row in of.values or {}}
    for word in words:
        if word in strategies:
            _apply(made, {"sharding_strategy": word}, FSDP, "fsdp: ")
        elif word == "offload":
            _apply(made, {"offload_params": True}, FSDP, "fsdp: ")
        elif word == "auto_wrap":
            _apply(made, {"auto_wrap_policy": word}, FSDP, "fsdp: ")
        else:
            made.findings.append(
                Finding("fsdp", word, "unknown", "", "not known to hf_zero: look it up before you drop it")
            )
    if asked is True and not made.settings:
        made.settings["stage"] = _SHARDED
    if isinstance(inner, Mapping):
        _apply(made, _unprefixed(inner), FSDP, "fsdp_")
    elif inner:
        made.findings.append(
            Finding("fsdp_config", inner, "unknown", "", "a file of its own: hf-zero migrate that file, too")
        )
    if "stage" not in made.settings:
        made.settings["stage"] = _SHARDED  # FSDP's own default: full_shard


def _unprefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).removeprefix("fsdp_"): value for key, value in values.items()}


def _apply(made: Migration, values: Mapping[str, Any], rows: tuple[Row, ...], prefix: str = "") -> None:
    for key, value in _flat(values, rows):
        row = next((row for row in rows if fnmatchcase(key, row.key)), None)
        made.findings.append(_finding(made, prefix + key, value, row))


def _flat(values: Mapping[str, Any], rows: tuple[Row, ...], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value and not any(row.key in (key, f"{key}*") for row in rows):
            yield from _flat(value, rows, f"{key}.")
        else:
            yield key, value


def _finding(made: Migration, key: str, value: Any, row: Row | None) -> Finding:
    if row is None:
        return Finding(key, value, "unknown", "", "not known to hf_zero: look it up before you drop it")
    if value == "auto":
        return Finding(key, value, "not needed", "", "auto: it comes from the Trainer's arguments, as before")
    if row.verdict == "lost" and value is not True and value in _NOTHING:
        return Finding(key, value, "not needed", "", "asks for nothing")
    if row.verdict not in ("same", "trainer"):
        return Finding(key, value, row.verdict, "", row.why)
    target = made.settings if row.verdict == "same" else made.trainer
    if row.values == {}:  # the argument is named, and nothing is set
        return Finding(key, value, row.verdict, row.into, row.why)
    here = value if row.values is None else row.values.get(str(value).lower(), KeyError)
    if here is KeyError:
        return Finding(key, value, "lost", "", row.why or f"expected one of {', '.join(row.values or ())}")
    if value is None:
        return Finding(key, value, "not needed", "", "asks for nothing")
    names = [name.strip() for name in row.into.split(",")]
    for name, part in zip(names, here if len(names) > 1 and isinstance(here, list) else [here]):
        if target.setdefault(name, part) != part:
            return Finding(key, value, "lost", "", f"{name} is {target[name]!r} already: here it is one setting")
    if row.values is not None and str(value).lower().startswith("hybrid") or (row.key, str(value)) in _HYBRID_NUMBERS:
        return Finding(
            key,
            value,
            "lost",
            f"{row.into}={here}",
            "over all ranks; replicas=NODES makes copies across nodes",
        )
    return Finding(key, value, row.verdict, f"{row.into}={here}", row.why)


_HYBRID_NUMBERS = {("sharding_strategy", "4"), ("sharding_strategy", "5")}


def _settle(made: Migration) -> None:
    """What settings mean together; the result is one that `ZeroConfig` takes."""
    settings = made.settings
    precision = made.trainer.pop("mixed_precision", "no")
    if precision != "no":
        made.trainer[precision] = True
    made.trainer = {name: value for name, value in made.trainer.items() if value is not False}
    is_fsdp = any(found.key.endswith(("fsdp_offload_params", "fsdp: offload_params")) for found in made.findings)
    if is_fsdp and settings.get("offload_params") == "cpu":
        settings["offload_optimizer"] = "cpu"
    stage = settings.get("stage", 0 if made.kind == "DeepSpeed" else ZeroConfig().stage)
    settings["stage"] = stage
    policy = STAGES.get(stage) if isinstance(stage, int) else None  # None: ZeroConfig refuses it below
    if policy is not None and policy.keep_full and settings.get("offload_params", "none") != "none":
        why = f"stage {stage} keeps whole parameters on the device"
        made.findings.append(Finding("offload_params", settings.pop("offload_params"), "not needed", "", why))
    for name in ("offload_optimizer", "offload_params"):
        if settings.get(name) == "none":
            del settings[name]
    if "disk" not in (settings.get("offload_optimizer"), settings.get("offload_params")):
        settings.pop("offload_dir", None)
    order = [name for name in ZeroConfig.__dataclass_fields__ if name in settings]
    made.settings = {name: settings[name] for name in order}
    ZeroConfig(**made.settings)


def _show(made: Migration, file: str) -> None:
    console = Console()
    alike: dict[tuple[str, str, str], list[str]] = {}
    for found in sorted(made.findings, key=lambda found: _ORDER.index(found.verdict)):
        name = found.key if found.value is None else f"{found.key}: {json.dumps(found.value)}"
        alike.setdefault((found.verdict, found.becomes, found.why), []).append(name)
    rows: list[list[str | Text]] = [
        [Text(verdict, style=_STYLES.get(verdict, "")), "\n".join(names), "\n".join(filter(None, (becomes, why)))]
        for (verdict, becomes, why), names in alike.items()
    ]
    table(console, f"{file} ({made.kind})", ("", "there", "here"), rows, left=3)
    text(console, "")
    text(console, "As flags of a script with zero.ZeroTrainingArguments:", "bold")
    pasted(console, made.command_line)
    text(console, "As an argument of TrainingArguments or Accelerator (parallelism_config=…):", "bold")
    pasted(console, as_plugin(made.settings))
    text(console, "Take the DeepSpeed or FSDP settings themselves out of the script and of accelerate's configuration.")
    for found in made.lost:
        text(console, f"! {found.key}: {found.why}", "bold red")
