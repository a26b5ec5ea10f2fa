"""Build the units of a model from its parameters, and give full parameters back."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..comm.agreement import read_on_all_ranks
from ..core.layout import ParamSpec
from ..core.precision import dtype_of
from ..errors import LayoutError
from ..optimizers.kinds import Kind, state_bytes, step_cost
from ..plan.costs import Placement
from ..plan.plan import LayoutBuilder
from .binding import Groups
from .context import Context
from .parameter import make_plain, set_raw_data, set_raw_grad, take_raw_grads
from .span import Span
from .unit import Unit


def specs_of(
    builder: LayoutBuilder,
    originals: Sequence[Groups],
    optimizers: Sequence[torch.optim.Optimizer],
    kinds: Sequence[Kind],
) -> list[list[ParamSpec]]:
    """Return the specs of each unit's parameters. They ignore optimizer groups: segments split spans by group.

    Each optimizer gets spans of its own: its gradients are cleared and its masters updated without another's.
    """
    owner = {
        p: (number, at) for number, groups in enumerate(originals) for at, params in enumerate(groups) for p in params
    }
    specs = builder.specs({param: number for param, (number, _) in owner.items()})
    over_matrices = [number for number, kind in enumerate(kinds) if kind is Kind.MATRICES]
    if not over_matrices:
        return specs
    sizes: dict[object, tuple[int, ...]] = {}

    def with_owner(spec: ParamSpec, param: nn.Parameter) -> ParamSpec:
        # A trained parameter that no optimizer has may join one later.
        number, at = owner.get(param, (over_matrices[0] if spec.trainable else -1, 0))
        if number not in over_matrices:
            return spec
        key = number, at, spec.shape, spec.master_dtype
        if key not in sizes:
            sizes[key] = state_bytes(optimizers[number], at, spec.shape, dtype_of(spec.master_dtype))
        return replace(spec, step_cost=step_cost(optimizers[number], spec.shape), state_bytes=sizes[key])

    return [
        [with_owner(spec, param) for spec, param in zip(unit, group.params)]
        for unit, group in zip(specs, builder.groups)
    ]


def build_units(
    context: Context, builder: LayoutBuilder, specs: Sequence[Sequence[ParamSpec]], placements: Sequence[Placement]
) -> None:
    """Build the units one after another, so that memory for one unit is enough in addition to the model."""
    for index, (group, unit_specs) in enumerate(zip(builder.groups, specs)):
        param_of = {spec.name: param for spec, param in zip(unit_specs, group.params)}
        spans = []
        for layout in context.layout.units[index].spans:
            params = [param_of[slot.spec.name] for slot in layout.slots]
            grads = take_raw_grads(params)
            spans.append(Span(layout, params, context, placements[layout.index]))
            for param, grad in zip(params, grads):
                if grad is not None:  # as a backward inside `no_sync` leaves it
                    set_raw_grad(param, grad.to(param.device, param.dtype))
        unit = Unit(group.name, index, group.hosts, spans, context)
        context.units.append(unit)
        if context.reshards:
            unit.close()
        for span in spans:
            context.wire.watch.units[span.layout.index] = unit.name


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to where the model computes."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


@torch.no_grad()
def give_back(context: Context) -> None:
    """Turn every parameter back into a full, plain one in its own dtype. A collective."""
    for unit in context.units:
        for span in unit.spans:
            whole = full_values(span)
            for slot, param in zip(span.layout.slots, span.params):
                values = whole[slot.offset : slot.stop].view(slot.spec.shape)
                make_plain(param)
                set_raw_data(param, values.to(getattr(torch, slot.spec.dtype), copy=True))
    gc.collect()


@torch.no_grad()
def full_values(span: Span) -> torch.Tensor:
    """Return all ranks' slices of a span in the master dtype, 1-D. A collective."""
    whole = torch.empty(span.layout.numel, dtype=span.master_dtype, device=span.device)
    mine = read_on_all_ranks(span.context.wire, span.values, may_fail=span.context.storage.uses_disk).to(span.device)
    if span.layout.shards > 1:
        span.context.wire.gather(whole, mine, span.layout.index, span.layout.cuts).close()
    else:
        whole.copy_(mine)
    return whole


def device_of(model: nn.Module, wanted: torch.device | None) -> torch.device:
    """Return where the model computes: `wanted`, or where its parameters are.

    Raises:
        LayoutError: the parameters are on several devices, or on the meta device.
    """
    found: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        found.setdefault(param.device, name)
        if param.device.type == "meta":
            raise LayoutError(
                f"parameter {name!r} is on the meta device and has no values. Load or initialise it first"
            )
    if len(found) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in found.items())
        raise LayoutError(f"all parameters must be on one device, found {where}. Move the model first")
    device = next(iter(found))
    if wanted is None or wanted == device or wanted.type == device.type == "cpu":
        return device
    if device.type != "cpu":
        raise LayoutError(f"the model is on {device}, and device is {wanted}. Move the model there, or to host memory")
    return wanted
