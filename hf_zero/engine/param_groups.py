"""Translates optimizer groups into segments: when an optimizer is bound, and when user code changes its groups.

User code sees segments in `group["params"]`, and may move them between groups, remove them, or add parameters of the model.
Segments differ between ranks. So the ranks exchange the contents of their groups, and derive the same groups of parameters.
Then segments are split where groups differ, and created for elements that have none. Spans do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..comm import agreement
from ..errors import LayoutError, RankMismatchError
from ..optimizers.kinds import Kind, optimizer_kind
from .binding import Binding, Groups
from .context import Context
from .parameter import original_class, place_of
from .segments import Segment, first_segments
from .span import Span

Names = Mapping[nn.Parameter, Sequence[str]]
GroupEntry = tuple[str, Any]
"""An entry of a group: ("segments", (binding, group)) of an earlier binding, or ("parameter", name)."""
GroupEntries = tuple[list[GroupEntry], list[str]]
"""The entries of one group in order, and the names of the parameters that have elements in its segments on this rank."""


def bind(
    optimizers: Sequence[torch.optim.Optimizer], context: Context, originals: Sequence[Groups], kinds: Sequence[Kind]
) -> list[Binding]:
    """Give each optimizer the segments of its parameters, with the state that it has."""
    made = [
        Binding(optimizer, number, [list(group) for group in groups], context, kind)
        for number, (optimizer, groups, kind) in enumerate(zip(optimizers, originals, kinds))
    ]
    _assign(context, made)
    for binding in made:
        binding.take_state()
    return made


def rebind(optimizers: Sequence[torch.optim.Optimizer], context: Context, bindings: Sequence[Binding]) -> list[Binding]:
    """Bind these optimizers instead of `bindings`, with the groups that they have now. A collective.

    Optimizers that stay bound keep the state of their parameters. Those that do not get the model's parameters back.

    Raises:
        LayoutError: a group has a parameter that it cannot have.
        UnsupportedOptimizerError: an optimizer that cannot step over a sharded model.
        RankMismatchError: optimizers or groups differ between ranks. Raised on every rank, before anything has changed.
    """
    before = {binding.optimizer: binding for binding in bindings}
    config, names = context.config, context.names
    is_sharded = context.layout.shards > 1
    with agreement.on_all_ranks(context.wire, "Engine.bind", kind=RankMismatchError) as report:
        kinds = [
            before[each].kind
            if each in before
            else optimizer_kind(each, names, sharded=is_sharded, offloaded=config.offloads, class_of=original_class)
            for each in optimizers
        ]
        changed = [each not in before or not before[each].is_current() for each in optimizers]
        sources = [_sources_of(each, bindings, names) for each in optimizers]
        lines = [line for each, groups in zip(optimizers, sources) for line in _lines(each, groups, each in before)]
        report.local = (lines, changed, sources)
    agreement.check_same_lines([mine[0] for mine in report.by_rank])
    originals: list[Groups] = []
    explicit = {
        source[1]
        for _, _, everything in report.by_rank
        for groups in everything
        for sources, _ in groups
        for source in sources
        if source[0] == "parameter"
    }
    for number, optimizer in enumerate(optimizers):
        if optimizer in before and not any(mine[1][number] for mine in report.by_rank):
            originals.append(before[optimizer].originals)
        else:
            everywhere = [mine[2][number] for mine in report.by_rank]
            originals.append([_merged(each, bindings, names, explicit) for each in zip(*everywhere)])
    _check_once(optimizers, originals, names)
    _check_spans(context, originals, kinds)
    out: list[Binding] = []
    for number, (optimizer, groups, kind) in enumerate(zip(optimizers, originals, kinds)):
        binding = before.get(optimizer) or Binding(optimizer, number, groups, context, kind)
        _follow_names(binding, groups, names)
        binding.index, binding.originals = number, groups
        out.append(binding)
    _assign(context, out)
    for optimizer, binding in before.items():
        if optimizer not in optimizers:
            for group, params in zip(optimizer.param_groups, binding.originals):
                group["params"] = list(params)
            optimizer.state.clear()
    for binding in out:
        if binding.optimizer not in before:
            binding.take_state()
    return out


def originals_of(optimizers: Sequence[torch.optim.Optimizer], names: Names) -> list[Groups]:
    """Return the model's parameters by optimizer and group, for optimizers that are not bound yet.

    Raises:
        LayoutError: an optimizer has a parameter that the model does not have, or two optimizers have the same one.
    """
    out: list[Groups] = []
    for optimizer in optimizers:
        for at, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param not in names:
                    raise LayoutError(_foreign(optimizer, at, param))
        out.append([list(group["params"]) for group in optimizer.param_groups])
    _check_once(optimizers, out, names)
    return out


# Contents of groups ---------------------------------------------------------------------------------------------------


def _sources_of(optimizer: torch.optim.Optimizer, bindings: Sequence[Binding], names: Names) -> list[GroupEntries]:
    segments = {
        id(each.tensor): (number, before, each)
        for number, binding in enumerate(bindings)
        for before, group in enumerate(binding.segments)
        for each in group
    }
    out: list[GroupEntries] = []
    for at, group in enumerate(optimizer.param_groups):
        sources: dict[GroupEntry, None] = {}
        members: list[str] = []
        for tensor in group["params"]:
            found = segments.get(id(tensor))
            if found is not None:
                number, group_before, segment = found
                sources["segments", (number, group_before)] = None
                members += [segment.span.name_of(index) for index in segment.members]
            elif tensor in names:
                sources["parameter", names[tensor][0]] = None
            else:
                raise LayoutError(_foreign(optimizer, at, tensor))
        out.append((list(sources), members))
    return out


def _merged(
    ranks: Sequence[GroupEntries], bindings: Sequence[Binding], names: Names, explicit: set[str]
) -> list[nn.Parameter]:
    """Return the parameters of one group, merged from all ranks' entries."""
    sources = dict.fromkeys(source for mine, _ in ranks for source in mine)
    present = {name for _, members in ranks for name in members} - explicit
    param_of = {each[0]: param for param, each in names.items()}
    out: list[nn.Parameter] = []
    for kind, source in sources:
        if kind == "parameter":
            out.append(param_of[source])
            continue
        number, at = source
        out += [p for p in bindings[number].originals[at] if names[p][0] in present]
    return out


def _lines(optimizer: torch.optim.Optimizer, groups: Sequence[GroupEntries], is_bound: bool) -> Iterator[str]:
    """Yield lines of text that must be the same on every rank."""
    name = type(optimizer).__name__
    yield f"{name} with {len(groups)} groups"
    for at, (sources, _) in enumerate(groups):
        yield f"optimizer group {at} of {[source for kind, source in sources if kind == 'parameter']}"
    if not is_bound:
        yield f"{name} that has {'state' if optimizer.state else 'no state'}"


def _check_once(optimizers: Sequence[torch.optim.Optimizer], originals: Sequence[Groups], names: Names) -> None:
    seen: dict[nn.Parameter, int] = {}
    for number, groups in enumerate(originals):
        for param in (param for params in groups for param in params):
            if param not in seen:
                seen[param] = number
                continue
            first, name = seen[param], names[param][0]
            if first == number:
                raise LayoutError(f"{name!r} is twice in the groups of an optimizer. Each parameter belongs to one")
            raise LayoutError(
                f"{name!r} is in two optimizers, number {first} ({type(optimizers[first]).__name__}) and number {number} "
                f"({type(optimizers[number]).__name__}). Each parameter belongs to one"
            )


def _check_spans(context: Context, originals: Sequence[Groups], kinds: Sequence[Kind]) -> None:
    """
    Raises:
        LayoutError: a parameter's span was built for another kind of optimizer, or for none.
    """
    owner = {param: kind for groups, kind in zip(originals, kinds) for params in groups for param in params}
    for span in (span for unit in context.units for span in unit.spans):
        for index, param in enumerate(span.params):
            if owner.get(param) is Kind.MATRICES and not span.layout.is_unsliced:
                raise LayoutError(
                    f"{span.name_of(index)!r} joins an optimizer that needs full matrices, and its elements are partitioned "
                    "over the ranks. Give that optimizer all its parameters, frozen ones too, when zero.shard is called"
                )
            if param in owner and span.master_dtype.itemsize < 4 and span.trainable:
                raise LayoutError(
                    f"{span.name_of(index)!r} joins an optimizer, and has no float32 master ({span.master_dtype}): no "
                    "optimizer had it when zero.shard was called. Pass the optimizer to zero.shard"
                )


def _foreign(optimizer: torch.optim.Optimizer, group: int, tensor: torch.Tensor) -> str:
    return (
        f"group {group} of {type(optimizer).__name__} has a parameter of shape {tuple(tensor.shape)} that is not one of the "
        "sharded model's. Add all modules before sharding, and build the optimizer over model.parameters(). Freeze what is not "
        "to train (requires_grad_(False)); put several models into one nn.ModuleList and shard that"
    )


def _follow_names(binding: Binding, groups: Groups, names: Names) -> None:
    """Move entries of `param_names` with parameters that have changed groups."""
    known = binding.param_names
    for group in binding.optimizer.param_groups:  # of parameters that have joined
        pairs = zip(group["params"], group.get("param_names", ()))
        known |= {param: name for param, name in pairs if param in names}
    if binding.originals is not groups:
        for group, params in zip(binding.optimizer.param_groups, groups):
            if "param_names" in group:
                group["param_names"] = [known.get(param, names[param][0]) for param in params]


# Segments -------------------------------------------------------------------------------------------------------------


def _assign(context: Context, bindings: Sequence[Binding]) -> None:
    """Give each binding the segments of its `originals`: keep those that exist, split where groups differ, make the others."""
    owner = {param: (each, at) for each in bindings for at, params in enumerate(each.originals) for param in params}
    kept = {segment: each for each in bindings for group in each.segments for segment in group}
    for binding in bindings:
        binding.segments, binding.spans, binding.shared_spans = [[] for _ in binding.originals], [], {}
    for unit in context.units:
        for span in unit.spans:
            where = [owner.get(param) for param in span.params]
            span.segments = _segments_for(span, where, kept)
            owners = dict.fromkeys(each[0] for each in where if each is not None)
            for found in owners:
                found.spans.append(span)
                if len(owners) > 1 or None in where:
                    found.shared_spans[span] = [i for i, each in enumerate(where) if each and each[0] is found]
            for segment in span.segments:
                found_at = where[segment.members[0]]
                if found_at is not None:
                    found_at[0].segments[found_at[1]].append(segment)
    for binding in bindings:
        for group, params in zip(binding.segments, binding.originals):
            if params and not group:
                group.append(_without_elements(params))
        if binding.kind is Kind.MATRICES:  # in the order of the parameters: sums over several are rounded in that order
            order = {param: number for number, param in enumerate(p for params in binding.originals for p in params)}
            for group in binding.segments:
                group.sort(
                    key=lambda segment: order[segment.span.params[segment.members[0]]] if segment.members else -1
                )
        binding.show_segments()


def _without_elements(params: Sequence[nn.Parameter]) -> Segment:
    """Return the segment of a group of which this rank has no elements."""
    place = place_of(params[0])
    if place is None:
        raise LayoutError("a parameter of an optimizer is not of the sharded model")
    segment = Segment(place.span, 0, 0, [])
    segment.tensor.requires_grad_(any(param.requires_grad for param in params))
    segment.sync_requires_grad()
    return segment


def _segments_for(
    span: Span, where: Sequence[tuple[Binding, int] | None], kept: Mapping[Segment, Binding]
) -> list[Segment]:
    out: list[Segment] = []
    missing = list(where)
    for segment in span.segments:
        binding = kept.get(segment)
        if binding is None:
            continue
        for part in binding.parts(segment, where.__getitem__):
            found = where[part.members[0]]
            if found is None or found[0] is not binding:
                binding.put_state(part, {})
                continue
            out.append(part)
            for index in part.members:
                missing[index] = None
    # Between a backward and its step, a segment has gradients as a whole, or none.
    present = span.bucket.present if span.bucket.grad is not None else [True] * len(missing)
    made = first_segments(span, [each and (each, has) for each, has in zip(missing, present)])
    for segment in made:
        segment.show_grad()
    return sorted([*out, *made], key=lambda segment: (segment.start, segment.stop))
