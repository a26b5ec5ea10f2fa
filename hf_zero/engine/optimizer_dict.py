"""Implements `optimizer.state_dict()` and `load_state_dict()` in torch's format, over full parameters.

`state_dict()` returns values on rank 0 and meta tensors of the same shapes on the other ranks. `load_state_dict` accepts that,
or values on every rank. Both are collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..checkpoint.manifest import digest_of
from ..comm.agreement import on_all_ranks, read_on_all_ranks
from ..comm.wire import Wire
from ..errors import CheckpointError, RankMismatchError
from .binding import Binding
from .optimizer_state import Entries, broadcast_from, elementwise_of, full_states, put_states

Saved = dict[nn.Parameter, Mapping[str, Any] | None]


def state_dict(binding: Binding, wire: Wire) -> dict[str, Any]:
    """Return the state as a plain optimizer over full parameters would, and run the optimizer's hooks. A collective."""
    optimizer = binding.optimizer
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    with wire.watch.operation("the optimizer's state_dict()"):
        states = full_states(binding, wire, everywhere=False)
    numbers = {param: number for number, param in enumerate(p for params in binding.originals for p in params)}
    by_number = {numbers[param]: entries for param, entries in states.items()}
    state: dict[Any, Any] = {number: by_number[number] for number in sorted(by_number)}
    state |= {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    found: dict[str, Any] = {"state": state, "param_groups": numbered_groups(binding)}
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, found)
        found = found if changed is None else changed
    return found


def numbered_groups(binding: Binding) -> list[dict[str, Any]]:
    """Return the groups as in `state_dict()`: options, and under `params` the numbers of the model's parameters."""
    groups: list[dict[str, Any]] = []
    start = 0
    for group, params in zip(binding.optimizer.param_groups, binding.originals):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": list(range(start, start + len(params)))})
        start += len(params)
    return groups


def load_state_dict(binding: Binding, wire: Wire, given: Mapping[str, Any]) -> None:
    """Load this rank's part of a full state, and run the optimizer's hooks. A collective.

    As in torch, floating-point states get the dtype of the masters, and states of older torch versions are accepted.

    Raises:
        CheckpointError: other groups, or a state tensor of another shape; names the parameter.
        RankMismatchError: only some ranks pass values, or ranks pass other states.
    """
    optimizer = binding.optimizer
    loaded: Any = dict(given)  # as torch does: a hook may change it
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, loaded)
        loaded = loaded if changed is None else changed
    with on_all_ranks(wire, "the optimizer's load_state_dict()", kind=RankMismatchError):
        saved = _saved(binding, loaded)
        elementwise = elementwise_of(binding, saved)
        _check_shapes(binding, saved, elementwise)
    is_broadcast = _needs_broadcast(wire, saved)
    for span in binding.spans:
        states: Saved = {param: saved.get(param) for param in span.params}
        if is_broadcast:
            states = {param: None if each is None else _received(wire, each) for param, each in states.items()}
        may_fail = span.context.storage.uses_disk
        read_on_all_ranks(wire, partial(put_states, binding, span, states, elementwise), may_fail=may_fail)
    optimizer.state.update({key: value for key, value in loaded["state"].items() if not isinstance(key, (int, Tensor))})
    for group, packed in zip(optimizer.param_groups, loaded["param_groups"]):
        group.update({key: value for key, value in packed.items() if key != "params"})
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _saved(binding: Binding, loaded: Mapping[str, Any]) -> Saved:
    """
    Raises:
        CheckpointError: the state is of other groups.
    """
    groups = loaded["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    mine = [len(params) for params in binding.originals]
    if sizes != mine:
        raise CheckpointError(
            f"the optimizer state has groups of {sizes} parameters, this optimizer has {mine}: it belongs to another model, "
            "or to one with other parameters frozen"
        )
    return {
        param: loaded["state"].get(number)
        for group, params in zip(groups, binding.originals)
        for number, param in zip(group["params"], params)
    }


def _check_shapes(binding: Binding, saved: Saved, elementwise: Container[str]) -> None:
    for span in binding.spans:
        for index, param in enumerate(span.params if not span.layout.is_unsliced else ()):
            for name, value in (saved.get(param) or {}).items():
                if name in elementwise and isinstance(value, Tensor) and value.shape != param.shape:
                    raise CheckpointError(
                        f"optimizer state {name!r} of {span.name_of(index)!r} has shape {tuple(value.shape)}, expected "
                        f"{tuple(param.shape)}"
                    )


def _needs_broadcast(wire: Wire, saved: Saved) -> bool:
    """Return whether rank 0 alone has the values. A collective."""
    what = "load_state_dict of the optimizer"
    entries = [(i, name, value) for i, each in enumerate(saved.values()) for name, value in (each or {}).items()]
    tensors = [(i, name, value) for i, name, value in entries if isinstance(value, Tensor)]
    shapes = sorted((i, name, tuple(value.shape), str(value.dtype)) for i, name, value in tensors)
    answers = wire.exchange((any(value.is_meta for _, _, value in tensors), digest_of(repr(shapes).encode())))
    if answers[0][0]:
        raise RankMismatchError(f"{what}: rank 0's tensors are on the meta device. Pass the values on rank 0")
    for rank, (_, digest) in enumerate(answers):
        if digest != answers[0][1]:
            raise RankMismatchError(
                f"{what}: rank {rank} passes states of other parameters, types or shapes than rank 0. Pass the same everywhere"
            )
    empty = [rank for rank, (is_meta, _) in enumerate(answers) if is_meta]
    if empty and len(empty) < len(answers) - 1:
        raise RankMismatchError(
            f"{what}: ranks {empty} pass meta tensors and the others values. Pass values on every rank, or on rank 0 only "
            "(what state_dict() returned)"
        )
    return bool(empty)


def _received(wire: Wire, entries: Mapping[str, Any]) -> Entries:
    """Return one parameter's state, with rank 0's values everywhere. A collective."""
    out = dict(entries)
    for name in sorted(entries):
        value = entries[name]
        if isinstance(value, Tensor):
            out[name] = broadcast_from(wire, value if wire.rank == 0 else None, value.shape, value.dtype)
    return out


# Back to a plain optimizer --------------------------------------------------------------------------------------------


def unbind(binding: Binding, states: Mapping[nn.Parameter, Entries]) -> None:
    """Give the optimizer the model's parameters again, which must be full, and their state."""
    optimizer = binding.optimizer
    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    state.update({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    for group, params in zip(optimizer.param_groups, binding.originals):
        group["params"] = list(params)
        for param in params:
            if param in states:
                state[param] = {name: _plain(group, param, name, each) for name, each in states[param].items()}
    optimizer.state = state


def _plain(group: Mapping[str, Any], param: nn.Parameter, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name == "step":
        return value.to(param.device) if group.get("fused") or group.get("capturable") else value
    return value.to(param.device, param.dtype if value.is_floating_point() else value.dtype)
