"""A torch optimizer over this rank's spans: its parameters, its full state.

The optimizer object and its `param_groups` dicts stay the user's own; only `group["params"]` is replaced, by a few long
1-D float32 tensors (the masters). So schedulers, hooks and wrappers that hold the optimizer go on working.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.manifest import digest_of
from ...comm.agree import on_all_ranks, read
from ...comm.wire import SoloWire, wire_device
from ...errors import CheckpointError, LayoutError, RankMismatchError
from ..registrations import same_frozen
from ..values.flat_param import Flat, joined, sent, slice_of
from ..values.state_shard import is_elementwise
from ..values.unit import Unit
from .optimizer_state import SliceStates, SteppedStates, restore_types
from .shadow_optimizer import states_of
from .state_pieces import OptimizerPieces, merge_scalar


def state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """State tensors per parameter element, for predictions before the first step; 2 (Adam) where it is not known. Of several
    optimizers the most: an upper bound."""
    return max((_state_tensors(optimizer) for optimizer in optimizers), default=0)


def _state_tensors(optimizer: torch.optim.Optimizer) -> int:
    group = optimizer.param_groups[0]
    match type(optimizer).__name__:
        case "SGD":
            return int(bool(group.get("momentum")))
        case "RMSprop":
            return 1 + int(bool(group.get("momentum"))) + int(bool(group.get("centered")))
        case "Adam" | "AdamW":
            return 3 if group.get("amsgrad") else 2
        case "Adagrad" | "Lion":
            return 1
        case _:
            return 2


class Binding:
    """One optimizer bound to the spans of one model that are its groups'.

    Args:
        index: which of the model's optimizers it is, as `ParamSpec.optimizer` counts.
        originals: by group, the model's parameters.
    """

    one_gradient = True
    """The optimizer sees one gradient for all parameters of a span, or none."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        wire: SoloWire,
        originals: list[list[nn.Parameter]],
        index: int,
    ) -> None:
        self.optimizer, self.index = optimizer, index
        self.originals = originals
        self._wire = wire
        self.flats: list[Flat] = []
        by_group: list[list[Flat]] = [[] for _ in originals]
        for unit in units:
            for flat in unit.trained:
                if self.has(flat):
                    self.flats.append(flat)
                    by_group[flat.span.spec.group].append(flat)
        self._masters = self._stand_ins(by_group)
        for options, params in zip(optimizer.param_groups, self._masters):
            options["params"] = params
        self._shown = [
            [*map(id, params)] for params in self._masters
        ]  # these lists are the program's to edit, in place too
        self._states: SliceStates | None = None

    def keep_states(self, settle: Callable[[], None] | None) -> None:
        """`optimizer.state` is one that refuses what it cannot answer. What a program has put in its place since counts.

        Args:
            settle: another thread may update states behind the step; waits for it.
        """
        found, before = self.optimizer.state, self._states
        if found is before:
            return
        states = dict(found)
        if before is not None:
            if settle is not None:
                settle()
            self._forget(self.flats)
        mine = {param for params in self._masters for param in params}
        names = {
            param: slot.spec.name
            for flat in self.flats
            for slot, param in zip(flat.span.slots, flat.params)
            if param not in mine  # the groups may have parameters as they are
        }
        self.optimizer.state = self._states = (
            SliceStates(states, names) if settle is None else SteppedStates(states, names, settle, self.forget_states)
        )
        if before is not None:
            self._take_states(states)

    def _take_states(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """A program gave the optimizer these: what does not rest on the device goes to where it does."""
        for flat in self.flats:
            for shard in flat.shards:
                if shard.is_offloaded and shard.master in states:
                    shard.put(self.optimizer, shard.master, states[shard.master])

    def has(self, flat: Flat) -> bool:
        spec = flat.span.spec
        return spec.group >= 0 and spec.optimizer == self.index

    def _stand_ins(self, flats: list[list[Flat]]) -> list[list[Tensor]]:
        """By group, what the optimizer has instead of the model's parameters."""
        return [[shard.master for flat in mine for shard in flat.shards] for mine in flats]

    def show_grads(self) -> None:
        """What the optimizer's parameters have as gradients is what the spans have. They are the same here."""

    def hide_slices(self) -> None:
        """The optimizer's own step is next: its parameters have plain gradients."""

    def stepped(self) -> None:
        """After the optimizer's own step."""

    def forget(self) -> None:
        """Another optimizer takes its place: this one has no state of the model's parameters afterwards."""
        self._forget(self.flats)
        self._states, self.optimizer.state = None, defaultdict(dict, self.optimizer.state)
        for flat in self.flats:
            flat.wholes = None

    def forget_states(self) -> None:
        self._forget(self.flats)

    def _forget(self, flats: Iterable[Flat]) -> None:
        for flat in flats:
            for shard in flat.shards:
                shard.put(self.optimizer, shard.master, {})

    def is_current(self) -> bool:
        """False once someone added, removed or moved a group, or edited or replaced the parameters of one."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._masters) and all(
            group["params"] is mine and [*map(id, mine)] == shown
            for group, mine, shown in zip(groups, self._masters, self._shown)
        )

    def current_originals(self) -> list[list[nn.Parameter]]:
        """The model's parameters by group, as groups and their lists are now.

        Each is in one group: of its own listing and its master's the former counts. A parameter without a master (a frozen
        one) is where the first master of its former group is, or that group's list.
        """
        lists = [group["params"] for group in self.optimizer.param_groups]
        listed = {id(param): number for number, params in enumerate(lists) for param in params}
        stands_for = self._stands_for()
        masters = {id(master): master for master in stands_for}
        place: dict[nn.Parameter, int] = {}
        for mine, shown, params in zip(self._masters, self._shown, self.originals):
            there = next((number for number, each in enumerate(lists) if each is mine), None)
            home = next((listed[key] for key in shown if key in listed), None if shown else there)
            with_master = {param: key for key in shown if key in masters for param in stands_for[masters[key]]}
            for param in params:
                key = id(param) if id(param) in listed else with_master.get(param)
                found = home if key is None else listed.get(key)
                if found is not None:
                    place[param] = found
        out = []
        for number, params in enumerate(lists):
            kept = [param for param, found in place.items() if found == number]
            is_edited = not any(
                params is mine and [*map(id, mine)] == ids for mine, ids in zip(self._masters, self._shown)
            )
            # States are numbered in this order: of what the program lists by itself in the program's.
            own = [param for param in params if id(param) not in masters] if is_edited else []
            out.append([*(param for param in kept if param not in set(own)), *dict.fromkeys(own)])
        return out

    def _stands_for(self) -> dict[Tensor, Sequence[nn.Parameter]]:
        """What in the groups is the optimizer's own, and which of the model's parameters it has values of."""
        return {shard.master: flat.params for flat in self.flats for shard in flat.shards}

    def pieces(self, names: Mapping[nn.Parameter, str]) -> OptimizerPieces:
        groups = zip(self.optimizer.param_groups, self.originals)
        named = [{**group, "params": [names[param] for param in params]} for group, params in groups]
        return OptimizerPieces(self.flats, self._wire, self.optimizer, named)

    # Full state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A collective. The state as the plain optimizer over whole parameters would give it, on CPU: rank 0 has the values,
        other ranks meta tensors of the same shapes."""
        for before in self.optimizer._optimizer_state_dict_pre_hooks.values():
            before(self.optimizer)
        alone = not any(flat.needs_all_ranks for flat in self.flats)
        with nullcontext() if alone else self._wire.watch.doing("the optimizer's state_dict()"):
            found = self._numbered(self.originals, everywhere=False)
        for after in self.optimizer._optimizer_state_dict_post_hooks.values():
            changed = after(self.optimizer, found)
            found = found if changed is None else changed
        return found

    def _numbered(self, originals: list[list[nn.Parameter]], *, everywhere: bool) -> dict[str, Any]:
        index = {param: i for i, param in enumerate(p for params in originals for p in params)}
        found = ((p, entries) for flat in self.flats for p, entries in self._whole_state(flat, everywhere).items())
        state = {index[param]: entries for param, entries in found if param in index}
        return {
            "state": {i: state[i] for i in sorted(state)},
            "param_groups": numbered_groups(self.optimizer, originals),
        }

    def take(self, flats: Iterable[Flat]) -> dict[nn.Parameter, dict[str, Any]]:
        """A collective. The state of these spans' parameters, whole, on every rank; the optimizer forgets it."""
        mine = [flat for flat in flats if flat in self.flats]
        state = {param: entries for flat in mine for param, entries in self._whole_state(flat, True).items()}
        self._forget(mine)
        return state

    def put(self, flats: Iterable[Flat], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """This rank's slices of what `take` gave, for spans that were cut anew."""
        new = list(flats)
        sliced = self._sliced(state, new)
        for flat in new:
            states = [state.get(param) or {} for param in flat.params]
            flat.put_state(self.optimizer, self._slice_state(flat, states, sliced))

    # Back to a plain optimizer --------------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """A collective. What the plain optimizer would have, whole, on every rank. Nothing changes."""
        return self._numbered(self.current_originals(), everywhere=True)

    def unbind(self, state_dict: dict[str, Any]) -> None:
        """The optimizer has the model's parameters again, which are whole by now, in the same groups, and that state."""
        for group, params in zip(self.optimizer.param_groups, self.current_originals()):
            group["params"] = list(params)
        self._states, self.optimizer.state = None, defaultdict(dict)
        load_plainly(self.optimizer, state_dict)
        restore_types(self.optimizer, state_dict)

    def _whole_state(self, flat: Flat, everywhere: bool) -> dict[nn.Parameter, dict[str, Any]]:
        names = flat.state_names(self.optimizer)
        everywhere = everywhere or flat.span.shards == 1  # what every rank has it gives
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for key in sorted(names):
            value = read(self._wire, partial(flat.state, self.optimizer, key), may_fail=flat.storage.uses_disk)
            whole = joined(flat, self._wire, value, everywhere=everywhere) if names[key] else None
            pieces = [on_cpu(value) for _ in flat.params] if whole is None else flat.cut_up(whole)
            for param, piece in zip(flat.params, pieces):
                state.setdefault(param, {})[key] = piece if whole is None else piece.clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's slices from a full state: every rank passes all of it, or rank 0 does and the others pass what
        `state_dict()` gave them, meta tensors. A collective.

        As in torch: floating values come in the parameters' type, here the masters', and the optimizer brings older forms of
        its state (a `step` that is a number) up to date.

        Raises:
            CheckpointError: other groups, or a state tensor of another shape; names the parameter.
            RankMismatchError: some ranks pass values and some do not, or ranks pass other states.
        """
        what = "the optimizer's load_state_dict()"
        saved: dict[nn.Parameter, dict[str, Any] | None] = {}
        with on_all_ranks(self._wire, what, kind=RankMismatchError):
            saved.update(self._saved(state_dict))
        self._put(saved, state_dict, self._must_spread(saved))

    def marks(self, state_dict: dict[str, Any], names: Mapping[nn.Parameter, Sequence[str]]) -> dict[str, str]:
        """Of a full state, by parameter that has some: what of it is one value for the parameter, as text.

        Raises:
            CheckpointError: other groups, or a state tensor of another shape; names the parameter.
        """
        saved = self._saved(state_dict)
        sliced = self._sliced(saved)
        return {
            names[param][0]: repr(sorted((key, _number(value)) for key, value in entries.items() if key not in sliced))
            for param, entries in saved.items()
            if entries
        }

    def _saved(self, state_dict: dict[str, Any]) -> dict[nn.Parameter, dict[str, Any] | None]:
        """The states in a state dictionary of the plain optimizer, by parameter; None where there is none.

        Raises:
            CheckpointError: it has other groups, or a state tensor of another shape; names the parameter.
        """
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        mine = [len(params) for params in self.originals]
        if sizes != mine:
            raise CheckpointError(
                f"the optimizer state has groups of {sizes} parameters, this optimizer has {mine}: it belongs to another "
                "model, or to one with other parameters frozen"
            )
        saved = {
            param: state_dict["state"].get(i)
            for group, params in zip(groups, self.originals)
            for i, param in zip(group["params"], params)
        }
        self._check_shapes(saved)
        return saved

    def _check_shapes(self, saved: Mapping[nn.Parameter, dict[str, Any] | None]) -> None:
        sliced = self._sliced(saved)
        for flat in self.flats:
            for slot, param in zip(flat.span.slots, flat.params):
                for key, value in (saved.get(param) or {}).items():
                    if key in sliced and isinstance(value, Tensor) and tuple(value.shape) != slot.spec.shape:
                        raise CheckpointError(
                            f"optimizer state {key!r} of {slot.spec.name!r} has shape {tuple(value.shape)}, expected "
                            f"{slot.spec.shape}"
                        )

    def _must_spread(self, saved: Mapping[nn.Parameter, dict[str, Any] | None]) -> bool:
        """Whether rank 0 alone has the values. A collective."""
        entries = [(i, key, value) for i, states in enumerate(saved.values()) for key, value in (states or {}).items()]
        tensors = [(i, key, value) for i, key, value in entries if isinstance(value, Tensor)]
        shapes = sorted((i, key, tuple(value.shape), str(value.dtype)) for i, key, value in tensors)
        answers = self._wire.exchange((any(value.is_meta for _, _, value in tensors), digest_of(repr(shapes).encode())))
        if answers[0][0]:
            raise RankMismatchError(
                "load_state_dict of the optimizer: rank 0's tensors are on the meta device; it must have the values"
            )
        for rank, (_, digest) in enumerate(answers):
            if digest != answers[0][1]:
                raise RankMismatchError(
                    f"load_state_dict of the optimizer: rank {rank} passes states of other parameters, types or shapes than "
                    "rank 0; pass the same everywhere"
                )
        empty = [rank for rank, (meta, _) in enumerate(answers) if meta]
        if empty and len(empty) < len(answers) - 1:
            raise RankMismatchError(
                f"load_state_dict of the optimizer: ranks {empty} pass meta tensors and the others values; pass values on "
                "every rank, or on rank 0 only (what state_dict() returned)"
            )
        return bool(empty)

    def _received(self, entries: dict[str, Any]) -> dict[str, Any]:
        """One parameter's states, with rank 0's values everywhere. A collective."""
        out = dict(entries)
        for key in sorted(entries):
            value = entries[key]
            if isinstance(value, Tensor):
                place = wire_device(self._wire, torch.device("cpu"))
                landing = sent(self._wire, value if self._wire.rank == 0 else None, value.shape, value.dtype, place)
                out[key] = landing.to(torch.device("cpu") if value.is_meta else value.device)
        return out

    def _put(self, saved: dict[nn.Parameter, dict[str, Any] | None], state_dict: dict[str, Any], spread: bool) -> None:
        sliced = self._sliced(saved)
        ready = []
        for flat in self.flats:
            states = [saved.get(param) or {} for param in flat.params]
            if spread:
                states = [self._received(entries) for entries in states]
            entries = self._slice_state(flat, states, sliced)
            for key, value in entries.items():
                if is_elementwise(key, value, flat.span.slice_numel) and value.is_floating_point():
                    entries[key] = value.to(flat.master_dtype)
            ready.append((flat, entries))
        for flat, entries in ready:
            flat.put_state(self.optimizer, entries)
        for group, packed in zip(self.optimizer.param_groups, state_dict["param_groups"]):
            group.update({key: value for key, value in packed.items() if key != "params"})
        self.optimizer.__setstate__({"state": self.optimizer.state, "param_groups": self.optimizer.param_groups})

    def _sliced(
        self, saved: Mapping[nn.Parameter, dict[str, Any] | None], flats: Sequence[Flat] | None = None
    ) -> set[str]:
        """States with one value per element. Parameters of one element do not show it: their other states have one, too."""
        out: set[str] = set()
        single: set[str] = {"step"}
        hidden: set[str] = set()
        for flat in self.flats if flats is None else flats:
            for slot, param in zip(flat.span.slots, flat.params):
                for key, value in (saved.get(param) or {}).items():
                    numel, shape = (value.numel(), value.shape) if isinstance(value, Tensor) else (1, None)
                    (out if numel > 1 else hidden if shape == slot.spec.shape else single).add(key)
        hidden -= out | single
        if hidden:
            states = states_of(self.optimizer)
            if states is not None:
                hidden &= {name for name, elementwise in states.items() if elementwise}
        return (out | hidden) - {"step"}

    def _slice_state(self, flat: Flat, states: list[dict[str, Any]], sliced: Container[str]) -> dict[str, Any]:
        """This rank's slice of what the parameters of one span have, whole."""
        keys = list(dict.fromkeys(key for entries in states for key in entries))
        out: dict[str, Any] = {}
        for key in keys:
            sample = next(entries[key] for entries in states if key in entries)
            if not isinstance(sample, Tensor):
                out[key] = sample
            elif key in sliced:
                out[key] = slice_of(flat, [entries.get(key) for entries in states], sample.dtype)
            else:
                for slot, entries in zip(flat.span.slots, states):
                    if key in entries:
                        merge_scalar(out, key, entries[key], slot.spec.name)
                if flat.device.type != "cpu" and sample.device.type != "cpu":
                    out[key] = out[key].to(flat.device)
        return out


def on_cpu(value: Any) -> Any:
    """Of a tensor a copy there."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else repr(value)


def load_plainly(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """The class's own `load_state_dict`; the groups stay the same dicts."""
    groups = list(optimizer.param_groups)
    type(optimizer).load_state_dict(optimizer, state_dict)
    for group, loaded in zip(groups, optimizer.param_groups):
        group.update(loaded)
    optimizer.param_groups[:] = groups


def originals_of(
    optimizers: Sequence[torch.optim.Optimizer], names: dict[nn.Parameter, str], bound: Iterable[Binding]
) -> list[list[list[nn.Parameter]]]:
    """By optimizer that is about to be bound, the model's parameters in each of its groups.

    Args:
        bound: as optimizers are now.

    Raises:
        LayoutError: a parameter that the model does not have, or that two of them have.
    """
    found = [_originals_of(optimizer, names, bound) for optimizer in optimizers]
    holder: dict[nn.Parameter, int] = {}
    for number, groups in enumerate(found):
        for param in (param for group in groups for param in group):
            if holder.setdefault(param, number) != number:
                raise LayoutError(
                    f"parameter {names[param]!r} is in two optimizers, number {holder[param]} "
                    f"({type(optimizers[holder[param]]).__name__}) and number {number} ({type(optimizers[number]).__name__}): "
                    "a parameter has one; build them over parts of the model that share nothing"
                )
    return found


def _originals_of(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], bound: Iterable[Binding]
) -> list[list[nn.Parameter]]:
    before = (binding.current_originals() for binding in bound if binding.optimizer is optimizer)
    groups = next(before, [list(group["params"]) for group in optimizer.param_groups])
    for index, group in enumerate(groups):
        for place, param in enumerate(group):
            if param not in names:
                if (same := same_frozen(names, param)) is not None:
                    group[place] = same
                    continue
                raise LayoutError(
                    f"the optimizer's group {index} holds a parameter (number {place}, shape {tuple(param.shape)}) that "
                    "the model does not have: build the optimizer over this model's parameters only. One over several models "
                    "needs them in one (nn.ModuleList([a, b])), which is sharded; what was added to a model since is not in it"
                )
    return groups


def take_state(optimizer: torch.optim.Optimizer, originals: list[list[nn.Parameter]]) -> dict[str, Any] | None:
    """The state of a plain optimizer, before its parameters are replaced; None when it has none yet."""
    known = optimizer.state.keys()
    if not any(param in known for group in originals for param in group):
        return None
    flat = [param for group in originals for param in group]
    state = {i: optimizer.state.pop(param) for i, param in enumerate(flat) if param in known}
    return {"state": state, "param_groups": numbered_groups(optimizer, originals)}


def numbered_groups(optimizer: torch.optim.Optimizer, originals: list[list[nn.Parameter]]) -> list[dict[str, Any]]:
    """The groups as `state_dict` has them: options, and under `params` running numbers of the original parameters."""
    groups: list[dict[str, Any]] = []
    start = 0
    for group, params in zip(optimizer.param_groups, originals):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": list(range(start, start + len(params)))})
        start += len(params)
    return groups
