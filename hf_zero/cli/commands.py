"""Shared by the commands: exit statuses, options of `plan` and `simulate`, and text to paste.

Nothing here imports torch: help, version and completion answer at once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..config import ZeroConfig

OK, WRONG, USAGE = 0, 1, 2
"""Exit statuses of every command: all is well; something is wrong or failed; invalid arguments."""
MOST_RANKS = 1 << 16
"""Ranks that `plan` accepts."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Arguments of `hf-zero plan`; `main.plan` describes them."""

    model: str | None = None
    parameters: str | None = None
    world_size: int = 8
    zero_stage: int | None = None
    mixed_precision: str = "no"
    zero_offload_optimizer: str = "none"
    zero_offload_params: str = "none"
    zero_step_in_backward: bool = False
    zero_reduce_dtype: str | None = None
    zero_full_precision: str = ""
    zero_units: str = ""
    zero_replicas: int = 1
    zero_sp_size: int = 1
    zero_offload_activations: str = "none"
    zero_wire: str = "none"
    device_memory: str | None = None
    keep_gathered: str | None = None
    host_memory: str | None = None
    disk_space: str | None = None
    optimizer_tensors: int = 2
    batch: int | None = None
    sequence: int = 2048
    accumulation: int = 1
    gradient_checkpointing: bool = False
    machine: str | None = None
    sweep: bool = False
    plot: str | None = None
    json: bool = False
    debug: bool = False

    def config(self, stage: int, **changes: object) -> ZeroConfig:
        """Build the `ZeroConfig` of the settings that were given."""
        given = {item.name.removeprefix("zero_"): getattr(self, item.name) for item in fields(self)}
        del given["debug"]  # of the command, not the engine's debug mode
        known = {item.name: given[item.name] for item in fields(ZeroConfig) if item.name in given}
        return ZeroConfig(**{**known, "stage": stage, **changes})


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Arguments of `hf-zero simulate`; `main.simulate` describes them."""

    model: str
    world_size: int = 8
    nodes: int = 1
    zero_stage: int = 2
    mixed_precision: str = "no"
    accumulation: int = 1
    batch: int = 1
    sequence: int = 128
    network: str = "infiniband"
    adapters: int = 0
    flops: float | None = None
    machine: str | None = None
    zero_units: str = ""
    zero_replicas: int = 1
    zero_wire: str = "none"
    keep_gathered: str | None = None
    scaling: str = "none"
    plot: str | None = None
    json: bool = False
    debug: bool = False


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def as_flags(values: Mapping[str, Any]) -> str:
    """Write settings as command-line flags; False values are left out."""
    given = ((flag_of(name), value) for name, value in values.items() if value is not False)
    return " ".join(name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in given)


def as_plugin(settings: Mapping[str, Any]) -> str:
    """Write settings as Python code."""
    return f"zero.ZeroPlugin({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))
