"""What `hf-zero plan` was asked: the options, their model and their machine, as inputs of plans."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..config import STAGES, parse_bytes
from ..core.precision import Precision
from ..plan.activations import Batch
from ..plan.machine import Machine, here, host_name, kept
from ..plan.solve import PlanInputs
from .models import Model
from .options import PlanOptions


@dataclass(frozen=True)
class Asked:
    """What was typed, the model that it names, and a machine: from here on it is arithmetic."""

    options: PlanOptions
    model: Model
    machine: Machine
    source: str = ""
    """Where the machine's figures are from."""

    @cached_property
    def precision(self) -> Precision:
        given = self.options.config(max(STAGES))
        return Precision.of(self.options.mixed_precision, given.reduce_dtype, given.full_precision, given.wire)

    def changed(self, **options: Any) -> Asked:
        return replace(self, options=replace(self.options, **options))

    def inputs(self, stage: int, ranks: int | None = None, **settings: Any) -> PlanInputs:
        """Of one stage, on other ranks or with other settings where they are given."""
        options, world_size = self.options, ranks or self.options.world_size
        config = options.config(stage, **settings)
        batch = None
        if options.batch is not None:
            checkpointing = options.gradient_checkpointing or options.offload_activations
            architecture = self.model.architecture
            batch = Batch(options.batch, options.sequence, checkpointing, options.offload_activations, architecture)
        layout = self.model.layout(self.precision, config.shards(world_size))
        return PlanInputs(
            layout,
            self.machine,
            config,
            world_size,
            self.precision,
            options.optimizer_tensors,
            batch,
            options.accumulation,
            node_ranks=options.world_size // options.nodes if options.nodes > 1 else 1,
        )


def machine_of(options: PlanOptions) -> tuple[Machine, str]:
    """Sizes and speeds, and where they are from. Sizes of this machine are used only where `auto` needs some."""
    if options.machine is not None:
        machine, source = Machine.load(options.machine), options.machine
    else:
        path = kept(cache_folder())
        machine, source = (Machine.load(path), f"hf-zero probe on {host_name()}") if path.exists() else (Machine(), "")
        machine = replace(machine, device_memory=None, host_memory=None, disk_free=None)
        if "auto" in (options.zero_offload_optimizer, options.zero_offload_params):
            ranks = max(1, min(options.world_size, torch.cuda.device_count() or options.world_size))
            free = here(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ranks=ranks)
            shares = machine.shares_memory if source else free.shares_memory
            machine = replace(machine, disk_free=free.disk_free, shares_memory=shares)
            if None in (options.device_memory, options.host_memory):
                machine = replace(machine, device_memory=free.device_memory, host_memory=free.host_memory)
                source = f"{source}{'; ' if source else ''}memory that is free on this machine"
    if options.disk_space is not None:
        machine = replace(machine, disk_free=parse_bytes(options.disk_space, "--disk-space"))
    return machine, source


def cache_folder() -> Path:
    """Where programs keep what they can make again (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_zero"
