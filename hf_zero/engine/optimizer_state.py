"""Reads an optimizer's state by parameter from the segments of all ranks, and writes it to them.

A segment's state has tensors with one value per element (`exp_avg`), and single values for all elements (`step`). The state of
a matrix may have arrays of any shape. A rank knows the state of its own segments only. `describe` exchanges which states each
parameter has, so that all ranks make the same gathers, and rank 0 can write the index of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.ranges import ParameterState
from ..comm.agreement import read_on_all_ranks
from ..comm.wire import Wire
from ..core.precision import dtype_name, dtype_of
from ..errors import CheckpointError, ZeroError
from ..optimizers.step_probe import probe_step
from ..tiers.array import OnDisk, Values, fetch, flat_of
from ..tiers.tier import Tier
from .segments import Segment
from .span import Span

if TYPE_CHECKING:
    from .binding import Binding

Entries = dict[str, Any]
"""The state of one parameter, or of one segment."""
Described = tuple[int, Sequence[int], dict[str, tuple[str, tuple[int, ...] | None]], Entries]
"""One segment: the span's index, the members, arrays as (dtype, shape) and single values. Shape None: the parameter's."""


def arrays_of(binding: Binding, segment: Segment, entries: Mapping[str, Any]) -> dict[str, Values]:
    """Return the entries that have one value per element of a segment; for a matrix, every tensor except scalars.

    Raises:
        CheckpointError: a tensor has neither one value nor one per element.
    """
    found: dict[str, Values] = {}
    for name, value in entries.items():
        if not isinstance(value, (Tensor, OnDisk)) or name == "step" or value.dim() == 0:
            continue
        where = segment.span.name_of(segment.members[0])
        if isinstance(value, Tensor) and (type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided):
            raise CheckpointError(
                f"optimizer state {name!r} of {where!r} is a {type(value).__name__} ({value.layout}), which a checkpoint "
                "cannot hold. Save with save_optimizer=False"
            )
        if segment.is_matrix or (value.numel() == segment.numel and segment.numel > 1):
            found[name] = value
        elif value.numel() == segment.numel:
            made = probe_step(binding.optimizer)
            if made is None or made.states.get(name, True):
                found[name] = value
        elif value.numel() > 1:
            raise CheckpointError(
                f"optimizer state {name!r} of {where!r} has shape {tuple(value.shape)}: neither one value nor one per "
                f"element of {segment.numel}. It cannot be stored by parameter"
            )
    return found


# Over all ranks -------------------------------------------------------------------------------------------------------


def describe(binding: Binding, wire: Wire) -> dict[str, ParameterState]:
    """Return the optimizer's state under the parameters' names, the same on every rank. A collective.

    Raises:
        CheckpointError: on every rank: a rank has a state that cannot be stored by parameter.
    """
    mine: list[Described] = []
    failure: ZeroError | None = None
    try:
        mine = [_described(binding, segment) for group in binding.segments for segment in group if segment.members]
    except ZeroError as error:
        failure = error
    is_shared = any(span.layout.shards > 1 for span in binding.spans)
    reason = None if failure is None else str(failure)
    everyone = wire.exchange((reason, mine)) if is_shared else [(reason, mine)]
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            raise CheckpointError(f"rank {rank}: {theirs}") from failure
    spans = {span.layout.index: span for span in binding.spans}
    out: dict[str, ParameterState] = {}
    for rank, (_, segments) in enumerate(everyone):
        for number, members, arrays, single in segments:
            for index in members:
                spec = spans[number].layout.slots[index].spec
                shapes = {name: (dtype, shape or spec.shape) for name, (dtype, shape) in arrays.items()}
                found = ParameterState(spec.shape, shapes, single)
                if state_signature(out.setdefault(spec.name, found)) != state_signature(found):
                    raise CheckpointError(
                        f"optimizer state of {spec.name!r}: rank {rank} has {sorted({*shapes, *single})}, an earlier rank "
                        "has others or other step counts: not every rank has made the same steps"
                    )
    return {name: one for name, one in out.items() if one.arrays or one.scalars}


def state_signature(state: ParameterState | None) -> object:
    """Return a value that is equal for parameters that may share a segment: same states, same single values."""
    if state is None:
        return None
    arrays = sorted((name, dtype) for name, (dtype, _) in state.arrays.items())
    return arrays, sorted((name, as_text(value)) for name, value in state.scalars.items())


def _described(binding: Binding, segment: Segment) -> Described:
    entries = binding.state_of(segment)
    arrays = arrays_of(binding, segment, entries)

    def is_like(value: Tensor) -> bool:
        return value.shape == segment.shape if segment.is_matrix else value.numel() == segment.numel

    about = {
        name: (dtype_name(value.dtype), None if isinstance(value, OnDisk) or is_like(value) else tuple(value.shape))
        for name, value in arrays.items()
    }
    single = {name: on_cpu(value) for name, value in entries.items() if name not in arrays}
    return segment.span.layout.index, segment.members, about, single


def full_states(binding: Binding, wire: Wire, *, everywhere: bool) -> dict[nn.Parameter, Entries]:
    """Return by parameter the state that a plain optimizer would have, on CPU. A collective.

    Args:
        everywhere: every rank gets the values. Else only rank 0 does, and the others get meta tensors of sharded states.
    """
    described = describe(binding, wire)
    out: dict[nn.Parameter, Entries] = {}
    for span in binding.spans:
        having = {
            index: described[slot.spec.name]
            for index, slot in enumerate(span.layout.slots)
            if slot.spec.name in described
        }
        gather = _gather_matrices if span.layout.is_unsliced else _gather_slices
        arrays = gather(binding, span, wire, having, everywhere or span.layout.shards == 1)
        for index, one in having.items():
            entries = {name: on_cpu(value) for name, value in one.scalars.items()} | arrays[index]
            out[span.params[index]] = {name: entries[name] for name in sorted(entries)}
    return out


def _gather_slices(
    binding: Binding, span: Span, wire: Wire, having: Mapping[int, ParameterState], everywhere: bool
) -> dict[int, Entries]:
    out: dict[int, Entries] = {index: {} for index in having}
    names = sorted({(name, array[0]) for one in having.values() for name, array in one.arrays.items()})
    for name, dtype in names:
        own = partial(_own_slice, binding, span, name, dtype_of(dtype))
        whole = _joined(span, wire, read_on_all_ranks(wire, own, may_fail=span.context.storage.uses_disk), everywhere)
        for index, one in having.items():
            if one.arrays.get(name, ("",))[0] == dtype:
                slot = span.layout.slots[index]
                out[index][name] = whole[slot.offset : slot.stop].view(slot.spec.shape).clone()
    return out


def _own_slice(binding: Binding, span: Span, name: str, dtype: torch.dtype) -> Tensor:
    """Return this rank's slice of one state, with zeros for segments without it."""
    out = torch.zeros(span.local_numel, dtype=dtype, device=span.device)
    for segment in segments_of(binding, span):
        value = binding.state_of(segment).get(name)
        if isinstance(value, (Tensor, OnDisk)) and value.dtype == dtype and value.numel() == segment.numel:
            out[segment.as_slice].copy_(fetch(flat_of(value)))
    return out


def _joined(span: Span, wire: Wire, own: Tensor, everywhere: bool) -> Tensor:
    """Return all ranks' slices on CPU, or a meta tensor if this rank does not get them. A collective."""
    layout = span.layout
    if layout.shards == 1:
        return own.cpu()
    if everywhere:
        whole = torch.empty(layout.numel, dtype=own.dtype, device=own.device)
        wire.gather(whole, own, layout.index, layout.cuts).close()
        return whole.cpu()
    here = wire.rank == 0
    whole = torch.empty(layout.numel, dtype=own.dtype, device="cpu" if here else "meta")
    for rank in range(layout.shards):
        landing = whole[slice(*layout.bounds(rank))] if here else own
        wire.send_to_rank_0(own if wire.rank == rank else None, landing, rank)
    return whole


def _gather_matrices(
    binding: Binding, span: Span, wire: Wire, having: Mapping[int, ParameterState], everywhere: bool
) -> dict[int, Entries]:
    """Return states of matrices, arrays of any shape, each from the rank that owns the parameter."""
    segments = {segment.members[0]: segment for segment in segments_of(binding, span)}
    out: dict[int, Entries] = {}
    for index, one in having.items():
        out[index] = {}
        owner = span.layout.owner(span.layout.slots[index])
        for name, (dtype, shape) in sorted(one.arrays.items()):
            entries = binding.state_of(segments[index]) if index in segments else {}
            load = partial(fetch, entries.get(name))  # type: ignore[arg-type]
            mine = read_on_all_ranks(wire, load, may_fail=span.context.storage.uses_disk)
            if span.layout.shards == 1:
                out[index][name] = on_cpu(mine).reshape(shape)
            elif everywhere:
                own = mine.reshape(shape) if wire.rank == owner else None
                out[index][name] = broadcast_from(wire, own, shape, dtype_of(dtype), owner)
            else:
                here = torch.empty(shape, dtype=dtype_of(dtype), device="cpu" if wire.rank == 0 else "meta")
                own = mine.reshape(-1).cpu() if wire.rank == owner else None
                landing = here.view(-1) if wire.rank == 0 else torch.empty(0, dtype=here.dtype, device="cpu")
                wire.send_to_rank_0(own, landing, owner)
                out[index][name] = here
    return out


def broadcast_from(wire: Wire, own: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int = 0) -> Tensor:
    """Broadcast the tensor `own` of rank `source` to the CPU of every rank. A collective."""
    landing = torch.empty(tuple(shape), dtype=dtype, device=wire.device or torch.device("cpu"))
    if own is not None:
        landing.copy_(own)
    if landing.numel():
        wire.broadcast(landing.view(-1).view(torch.uint8), source)
    return landing.cpu()


# To the segments ------------------------------------------------------------------------------------------------------


def put_states(
    binding: Binding, span: Span, saved: Mapping[nn.Parameter, Mapping[str, Any] | None], elementwise: Container[str]
) -> None:
    """Replace the states of a span's segments by this rank's parts of `saved`. Without communication.

    Args:
        saved: states of whole parameters.
        elementwise: names of the states that have one value per element.

    Raises:
        TierError: they cannot be stored.
    """

    def mark(index: int) -> object:
        entries = saved.get(span.params[index]) or {}
        return sorted((name, None if name in elementwise else as_text(value)) for name, value in entries.items())

    group_of = binding.group_of
    for segment in segments_of(binding, span):
        options = binding.optimizer.param_groups[group_of[span.params[segment.members[0]]]]
        for each in binding.divide(segment, mark):
            entries = dict(
                _parts_of(each, [saved.get(span.params[index]) or {} for index in each.members], elementwise)
            )
            for name, value in entries.items():
                if isinstance(value, Tensor) and (name in elementwise or (each.is_matrix and value.dim() > 0)):
                    dtype = span.master_dtype if value.is_floating_point() else value.dtype
                    memory = allocate_state(each, name, dtype, value.shape)
                    entries[name] = memory.copy_(value if isinstance(memory, Tensor) else value.reshape(-1))
                else:
                    entries[name] = single_value(options, span, name, value)
            binding.put_state(each, entries)


def _parts_of(
    segment: Segment, states: Sequence[Mapping[str, Any]], elementwise: Container[str]
) -> Iterator[tuple[str, Any]]:
    """Yield a segment's state from the states of its whole parameters, which share names and single values."""
    for name, sample in states[0].items():
        if segment.is_matrix or name not in elementwise or not isinstance(sample, Tensor):
            yield name, sample
            continue
        joined = torch.zeros(segment.numel, dtype=sample.dtype, device=sample.device)
        for index, entries in zip(segment.members, states):
            part = segment.span.part_of(index)
            if part is not None:
                start = part.start - segment.start
                joined[start : start + part.numel].copy_(entries[name].detach().reshape(-1)[part.source_slice])
        yield name, joined


def allocate_state(segment: Segment, name: str, dtype: torch.dtype, shape: Sequence[int], kept: Any = None) -> Values:
    """Return memory for a state where the segment is stored; its values are undefined.

    Args:
        kept: an old state, whose memory is reused if it fits.

    Raises:
        TierError: there is no room on disk.
    """
    if isinstance(kept, (Tensor, OnDisk)) and tuple(kept.shape) == tuple(shape) and kept.dtype == dtype:
        return kept
    span, numel = segment.span, math.prod(shape)
    if segment.tier is Tier.DEVICE:
        return torch.empty(tuple(shape), dtype=dtype, device=span.device)
    if segment.tier is Tier.DISK and tuple(shape) == tuple(segment.shape):
        return span.state_on_disk(name, dtype)[segment.as_slice]
    return span.context.storage.link.empty(numel, dtype).view(tuple(shape))


def single_value(options: Mapping[str, Any], span: Span, name: str, value: Any) -> Any:
    """Copy a single value of a state to where the optimizer's step expects it."""
    if not isinstance(value, Tensor):
        return value
    if span.tier is not Tier.DEVICE:
        return value.detach().to("cpu", copy=True)
    if name == "step" and not (options.get("fused") or options.get("capturable")):
        return value.detach().clone()
    return value.detach().to(span.device, copy=True)


def elementwise_of(binding: Binding, saved: Mapping[nn.Parameter, Mapping[str, Any] | None]) -> set[str]:
    """Return the names of states that have one value per element, which parameters of one element cannot show."""
    out: set[str] = set()
    single: set[str] = {"step"}
    unclear: set[str] = set()
    for param, entries in saved.items():
        for name, value in (entries or {}).items():
            numel, shape = (value.numel(), value.shape) if isinstance(value, Tensor) else (1, None)
            (out if numel > 1 else unclear if shape == param.shape else single).add(name)
    unclear -= out | single
    if unclear and (made := probe_step(binding.optimizer)) is not None:
        unclear &= {name for name, is_elementwise in made.states.items() if is_elementwise}
    return (out | unclear) - {"step"}


def segments_of(binding: Binding, span: Span) -> list[Segment]:
    """Return the segments of a span that one optimizer has."""
    mine = binding.group_of
    return [segment for segment in span.segments if span.params[segment.members[0]] in mine]


def on_cpu(value: Any) -> Any:
    """Return a copy of a tensor on the CPU, and any other value unchanged."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def as_text(value: Any) -> str:
    """Return a text that is the same for equal single values."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(float(value))
    return repr(float(value)) if isinstance(value, (int, float)) else repr(value)
