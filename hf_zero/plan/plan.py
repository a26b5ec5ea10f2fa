"""Build a model's layout, and a plan for it. Needs no process group, device or values.

A plan is a layout, a tier for every state, the resulting bytes and seconds, and a reason for each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..config import ZeroConfig, ranks_text, size_text
from ..core.layout import Layout, ParamSpec
from ..core.precision import Precision, castable_params, dtype_name
from ..core.units import LIMITS, Group, Limits, find_groups, find_visits
from ..errors import LayoutError
from ..tiers.tier import Tier
from .costs import KINDS, TIERS, Memory, Placement
from .solve import TIERS_OF, PlanInputs, Step, excess, solve

NAMES = {
    "device": "device_memory",
    "host": "host_memory",
    "disk": "free space in offload_dir",
    "together": "device and host memory, which are one here,",
}


@dataclass(frozen=True)
class Plan:
    """The placement of all states on each rank, and its cost; `to_dict()` gives plain values for JSON."""

    inputs: PlanInputs
    placements: tuple[Placement, ...]
    """Placements by `SpanLayout.index`."""

    @cached_property
    def memory(self) -> Memory:
        """Bytes per rank, by tier and kind; activations are an estimate."""
        return self.inputs.memory(self.placements)

    @cached_property
    def step(self) -> Step:
        """Traffic and predicted time of a step."""
        return self.inputs.step(self.placements)

    @property
    def layout(self) -> Layout:
        return self.inputs.layout

    @property
    def config(self) -> ZeroConfig:
        return self.inputs.config

    @property
    def traffic(self) -> Mapping[str, int]:
        return self.step.traffic

    @property
    def parts(self) -> dict[str, float | None]:
        """Predicted seconds of each part of a step by itself, as `phase road`; None if its speed is not known."""
        return {" ".join(key): value for key, value in self.step.parts.items()}

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of units that stay gathered from forward to backward, those used last first."""
        return self.inputs.keeps(self.placements)

    @property
    def reasons(self) -> Iterator[str]:
        """One line for each choice."""
        config, batch = self.config, self.inputs.batch
        own, state = dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0)
        for span, placement in zip(self.layout.spans, self.placements):
            own[placement.parameters] += span.slice_numel
            if placement.optimizer is not None:
                state[placement.optimizer] += span.slice_numel
        yield _where("parameters", own, config.offload_params, "offload_params")
        if any(state.values()):
            yield _where("optimizer state", state, config.offload_optimizer, "offload_optimizer")
        if shares := self.layout.imbalance():
            most = "" if len(shares) <= 8 else f" (at most {max(shares):.2f})"
            yield (
                "parameters that the optimizer must have whole have one owner each: of their mean a rank owns "
                f"{', '.join(f'{share:.2f}' for share in shares[:8])}{most}"
            )
        if config.keep_gathered is not None and (order := self.inputs.candidates(self.placements)):
            nbytes = size_text(sum(self.layout.units[at].gathered_bytes for at in self.kept))
            yield f"{len(self.kept)} of {len(order)} units stay gathered from forward to backward, the last ones: {nbytes}"
        if batch is None:
            yield "activations and computing time are not counted: no batch was given"
        elif batch.architecture is None:
            yield "activations are not counted: the architecture's sizes are not known"
        else:
            sharing = f" on {config.sp_size} ranks" if config.sp_size > 1 else ""
            yield (
                f"activations: {size_text(sum(self.inputs.activations))}, an estimate for {batch.rows} x {batch.sequence} "
                f"tokens{sharing}{' with checkpointing' if batch.checkpointing else ''}"
            )
            if (tier := config.offload_activations) != "none":
                yield f"inputs of checkpointed blocks: on {tier} between forward and backward"
            if sent := self.traffic["sequence"]:
                yield f"attention exchanges {size_text(sent)} per rank and step within groups of {config.sp_size}"
        unknown = [road for (_, road), value in self.step.parts.items() if value is None]
        if unknown:
            yield (
                f"step time is not predicted: no speed is known of {', '.join(dict.fromkeys(unknown))}. Measure this machine: "
                f"torchrun --nproc-per-node RANKS -m hf_zero probe"
            )

    @property
    def fits(self) -> bool:
        return not excess(self.inputs.budgets, self.memory)

    @property
    def shortfall(self) -> str:
        """The missing bytes, and what to change; empty if everything fits."""
        over = excess(self.inputs.budgets, self.memory)
        if not over:
            return ""
        limits = ", ".join(f"{NAMES[name]} {size_text(limit)}" for name, limit in self.inputs.budgets.items())
        found = ", ".join(f"{NAMES[name]} is short of {size_text(value, up=True)}" for name, value in over.items())
        found += " even with all states in their slowest tier" if self.config.is_auto else ""
        stage = "stage=3, " if self.config.policy.keep_full else ""
        return (
            f"{found} at stage {self.config.stage} on {ranks_text(self.inputs.world_size)} "
            f"(per rank: {limits}). Use {stage}more offloading, gradient checkpointing, more ranks or more memory; "
            "`hf-zero plan MODEL --device-memory SIZE` finds settings that fit"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.config.stage,
            "world_size": self.inputs.world_size,
            "parameters": self.layout.numel,
            "trainable": self.layout.trainable_numel,
            "states_bytes_per_rank": self.memory.states,
            "states": {kind: sum(self.memory.stored[tier][kind] for tier in TIERS) for kind in KINDS[:3]},
            **self.memory.to_dict(),
            "budgets": self.inputs.budgets,
            "traffic": dict(self.traffic),
            "step_s": self.step.seconds,
            "parts_s": self.parts,
            "kept": [self.layout.units[at].name for at in self.kept],
            "fits": self.fits,
            "shortfall": self.shortfall,
            "reasons": list(self.reasons),
            "offload_optimizer": self.config.offload_optimizer,
            "offload_params": self.config.offload_params,
        }


def plan(inputs: PlanInputs) -> Plan:
    """Place every span of the layout and predict bytes and seconds: pure arithmetic, equal on every rank.

    If `auto` finds no placement that fits, all states are in their slowest tier, and `shortfall` has the missing bytes.
    """
    config = inputs.config
    slowest = inputs.uniform_placement(TIERS_OF[config.offload_params][-1], TIERS_OF[config.offload_optimizer][-1])
    return Plan(inputs, (solve(inputs) if config.is_auto else None) or slowest)


def _where(what: str, numel: Mapping[Tier, int], asked: str, setting: str) -> str:
    """Return one line on the tiers of `numel` elements, and why."""
    total = max(1, sum(numel.values()))
    shares = {
        tier: "all" if count == total else f"{100 * count / total:.1f} %" for tier, count in numel.items() if count
    }
    places = ", ".join(f"{share} on {tier.value}" for tier, share in shares.items())
    return f"{what}: {places}, as {setting}={asked!r} {'chooses' if asked == 'auto' else 'says'}"


class LayoutBuilder:
    """Turns a model's parameters into specs by unit, once: a layout never changes."""

    def __init__(
        self, model: nn.Module, precision: Precision, limits: Limits = LIMITS, units: Sequence[str] = ()
    ) -> None:
        self.names = names_of(model)
        self.groups: list[Group] = find_groups(model, limits, units)
        self._visits = find_visits(model, self.groups)
        self._precision = precision
        self._castable = castable_params(model, self.names, precision)

    def specs(self, optimizer_of: Mapping[nn.Parameter, int]) -> list[list[ParamSpec]]:
        """Return one list of specs per unit.

        Args:
            optimizer_of: index of the optimizer of each parameter that has one.
        """
        return [[self._spec(param, optimizer_of.get(param, -1)) for param in group.params] for group in self.groups]

    def layout(self, specs: Sequence[Sequence[ParamSpec]], shards: int) -> Layout:
        return Layout.build(zip((group.name for group in self.groups), specs), shards, self._visits)

    def _spec(self, param: nn.Parameter, optimizer: int) -> ParamSpec:
        own = dtype_name(param.dtype)
        # A parameter without an optimizer needs no float32 master.
        master = dtype_name(Precision.master_dtype(param)) if optimizer >= 0 else own
        compute = dtype_name(self._precision.compute_dtype(param, param in self._castable))
        names, shape, trainable = tuple(self.names[param]), tuple(param.shape), param.requires_grad
        gathered_in = self._precision.gathered_in(names, shape, trainable)
        return ParamSpec(names, shape, own, compute, master, trainable, optimizer, gathered_in=gathered_in)


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every parameter once, with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise LayoutError(f"parameter {name!r} has no shape yet: run one forward before sharding")
        if is_traceable_wrapper_subclass(param):
            raise LayoutError(
                f"parameter {name!r} is a {type(param).__name__}, a tensor made of others: it has no bytes of its own to be "
                "cut into slices. Quantise into plain integer parameters (bitsandbytes' 4-bit ones), or shard first and "
                "quantise a copy of the model for inference (copy.deepcopy)"
            )
        if param.layout is not torch.strided:
            raise LayoutError(
                f"parameter {name!r} has the layout {param.layout}, which cannot be cut into slices. Make it dense"
            )
        names.setdefault(param, []).append(name)
    if not names:
        raise LayoutError(f"{type(model).__name__} has no parameters to shard")
    return names
