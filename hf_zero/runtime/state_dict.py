"""`state_dict()` and `load_state_dict()` of modules whose values are elsewhere, through torch's public per-module hooks.

`state_dict()` of the model or any part of it gives rank 0 full CPU tensors in the parameters' own types, from the masters.
These are copies and cannot be written, see `Entry`. The other ranks get meta tensors of the same shapes, with values for code
that computes with them. It is a collective, except where this rank has the values: parameters that show what the masters hold
(stages 0 to 2 in the parameters' own types) are copied from there. Tied parameters are one tensor object within a call.

Inside `zero.unsharded` an entry is the parameter's own memory, as in PyTorch, on every rank. `load_state_dict` takes what
`state_dict()` gave, or values on every rank.
"""

from __future__ import annotations

import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.agree import on_all_ranks, read
from ..comm.wire import SoloWire, wire_device
from ..core.precision import dtype_of
from ..errors import RankMismatchError, StateError, TierError
from ..plan.machine import free_host_bytes
from .state_dict_entries import SHARE, entry, with_own_storage
from .values.flat_param import Flat, joined
from .values.reads import AsTheyAre, Unmasked
from .values.sharded import Sharded
from .values.unit import State, Unit


@dataclass
class StateDictCall:
    """One state dict that is being made.

    Attributes:
        state: returns it, or None once it is gone.
        values: what was gathered for it, by parameter.
        everywhere: every rank has room for all values, as the ranks have agreed; None: they have not, so far.
        has_room: this rank has; None: not asked so far.
    """

    state: Callable[[], Any]
    values: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    everywhere: bool | None = None
    has_room: bool | None = None


class StateDictHooks(ABC):
    """The hooks, over whoever has the values. A call's values live from its outermost module's first hook to its last."""

    def __init__(self) -> None:
        self._begun: list[tuple[nn.Module, Unmasked]] = []
        """The modules whose state dict is being made, outermost first; behind a call that raised, also its modules."""
        self._calls: list[StateDictCall] = []
        """Outermost first: a hook of the program may make a state dict while another is being made."""
        self._loading = 0
        self._wire = SoloWire()  # of the call
        self._spread = False
        """The values to load are on rank 0 alone."""
        self._landing: dict[nn.Parameter, Tensor] = {}

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_state_dict_pre_hook(self._begin),
            module.register_state_dict_post_hook(partial(self._give)),  # torch sets an attribute of it
            module.register_load_state_dict_pre_hook(self._load_begin),
            module.register_load_state_dict_post_hook(self._load_end),
        ]

    # Who has the values ---------------------------------------------------------------------------------------------

    @abstractmethod
    def wire_of(self, param: nn.Parameter) -> SoloWire | None:
        """The ranks that have the parameter's values between them; None where `.data` has them."""

    def shows(self, param: nn.Parameter) -> bool:
        """Whether the parameter's own memory is the entry."""
        return False

    @abstractmethod
    def gather(self, param: nn.Parameter, wire: SoloWire, call: StateDictCall) -> Mapping[nn.Parameter, Tensor]:
        """Values as `state_dict()` gives them, of this parameter and of those that come with it. A collective."""

    @abstractmethod
    def open(self, param: nn.Parameter) -> Tensor:
        """Memory in the parameter's shape, in its `.data`: torch copies into it."""

    @abstractmethod
    def close(self, param: nn.Parameter, landing: Tensor) -> None:
        """This rank's part of what torch has copied into `landing` is the parameter's value now."""

    def before_load(self) -> None:  # noqa: B027 -- nothing, where each parameter is opened as its module is reached
        """Once a call."""

    def after_load(self) -> None:  # noqa: B027 -- nothing, where each is closed as its module is left
        """Once a call."""

    # Saving ---------------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        # No module is inside itself: where it is under way already, that call has raised.
        for at, (begun, _) in enumerate(self._begun):
            if begun is module:
                self._end(at)
                break
        # torch takes `detach()` of each, for `_give` to replace.
        self._begun.append((module, Unmasked(module._parameters.values())))

    def _end(self, at: int) -> None:
        while len(self._begun) > at:
            self._begun.pop()[1].end()

    def _give(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        at = next((at for at, (begun, _) in enumerate(self._begun) if begun is module), len(self._begun))
        self._end(at + 1)  # those inside of it have raised
        call = self._call_for(state)
        for name, param in list(module._parameters.items()):  # gathering lists modules, which may register them again
            key = prefix + name
            if param is None or key not in state or (wire := self.wire_of(param)) is None:
                continue
            if param not in call.values:
                if not self.shows(param):
                    call.values.update(self.gather(param, wire, call))
                elif state[key] is param:  # `keep_vars`
                    continue
                else:
                    call.values[param] = self.shown(param)
            state[key] = call.values[param]
        self._end(at)
        if not self._begun:
            self._calls.clear()

    def _call_for(self, state: dict[str, Any]) -> StateDictCall:
        self._calls = [call for call in self._calls if call.state() is not None]
        for call in self._calls:
            if call.state() is state:
                return call
        try:
            made = StateDictCall(weakref.ref(state))
        except TypeError:  # `destination={}`
            made = StateDictCall(lambda: state)
        self._calls.append(made)
        return made

    def agree_on_room(self, wire: SoloWire, call: StateDictCall) -> bool:
        """Whether host memory has room for a call's values on every rank. A collective, once a call."""
        if call.everywhere is None:
            with wire.watch.doing("state_dict()"):
                told = wire.exchange((socket.gethostname(), free_host_bytes()))
            hosts = [host for host, _ in told]
            needed_bytes = self._needed_bytes()
            call.everywhere = all(needed_bytes * hosts.count(host) <= free_bytes for host, free_bytes in told)
        return call.everywhere

    def has_room(self, wire: SoloWire, call: StateDictCall) -> bool:
        """Whether this rank keeps a call's values. Without communication."""
        if call.has_room is None:
            call.has_room = wire.rank == 0 or self._needed_bytes() <= free_host_bytes(wire.size)
        return call.has_room

    def _needed_bytes(self) -> int:
        params = self._begun[0][0].parameters() if self._begun else ()
        return SHARE * sum(param.numel() * param.element_size() for param in params)

    def given(self, values: Tensor, wire: SoloWire, device: torch.device) -> Tensor:
        """Values on the CPU or, where this rank has none, a meta tensor: as an entry of a state dict.

        Args:
            device: the parameter's.
        """
        is_moved = device.type != "cpu"
        if wire.rank == 0:
            return entry(values, is_copy=True, is_moved=is_moved)
        held = None if values.is_meta else values
        return entry(values.to("meta"), held, is_copy=True, is_moved=is_moved)

    def shown(self, param: nn.Parameter) -> Tensor:
        """The parameter's own memory, as an entry of a state dict."""
        return with_own_storage(param.detach())

    # Loading --------------------------------------------------------------------------------------------------------

    def _load_begin(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        own = {
            name: param
            for name, param in module._parameters.items()
            if param is not None and (param in self._landing or self.wire_of(param) is not None)
        }
        if own and metadata.get("assign_to_params_buffers", False):
            raise StateError("load_state_dict(assign=True) would replace sharded parameters: load without assign")
        if self._loading == 0 or not prefix:
            self._loading = 0
            self._landing.clear()
            self._spread = False
            wires = (wire for param in module.parameters() if (wire := self.wire_of(param)) is not None)
            wire = next(wires, None)
            if wire is not None:  # else all values are in the parameters, and torch alone loads them
                self.before_load()
                self._wire, self._spread = wire, _from_rank_0(state, wire)
        self._loading += 1
        for name, param in own.items():
            value = state.get(prefix + name)
            if not isinstance(value, Tensor):
                continue
            shape = tuple(param.shape)
            if tuple(value.shape) != shape and not (shape == () and tuple(value.shape) == (1,)):
                continue  # torch reports it as a size mismatch
            landing = self._landing[param] = self.open(param)
            if self._spread:
                sent = landing.to(wire_device(self._wire, landing.device))
                if self._wire.rank == 0:
                    sent.copy_(value.reshape(shape))
                self._wire.broadcast(sent)
                state[prefix + name] = sent

    def _load_end(self, module: nn.Module, incompatible: Any) -> None:
        with torch.no_grad():
            for param in module._parameters.values():
                # Tied parameters land once per name; the last one wins, as in torch.
                if param is not None and param in self._landing:
                    self.close(param, self._landing.pop(param))
        self._loading -= 1
        if self._loading == 0:
            self._landing.clear()
            self.after_load()


def _from_rank_0(state: Mapping[str, Any], wire: SoloWire) -> bool:
    """Whether the values to load are on rank 0 alone: a dict made by `state_dict()` has meta tensors elsewhere. A collective.

    Raises:
        RankMismatchError: rank 0 has none, or only some of the others.
    """
    with wire.watch.doing("load_state_dict()"):
        is_meta = wire.exchange(any(isinstance(value, Tensor) and value.is_meta for value in state.values()))
    if is_meta[0]:
        raise RankMismatchError("load_state_dict: rank 0's tensors are on the meta device; it must have the values")
    if any(is_meta) and not all(is_meta[1:]):
        raise RankMismatchError(
            "load_state_dict: some ranks pass meta tensors and some values; pass values on every rank, or on rank 0 "
            "only (what state_dict() returned)"
        )
    return any(is_meta)


class ShardedHooks(StateDictHooks):
    """Of a sharded model.

    Args:
        settle: returns when the masters of these spans, or of all (None), are those of one step.
        leads: whether a method of the optimizer may have written its tensors, which parameters follow in the next forward.
    """

    def __init__(
        self, sharded: Sharded, settle: Callable[[Sequence[Flat] | None], None], leads: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._sharded = sharded
        self._settle, self._leads = settle, leads
        self._outlining = False

    def wire_of(self, param: nn.Parameter) -> SoloWire | None:
        return self._sharded.wire if param in self._sharded.places else None

    def shows(self, param: nn.Parameter) -> bool:
        if self._outlining or not self._sharded.shows_masters:
            return False
        flat = self._sharded.places[param].flat
        if flat.casts:
            self._settle([flat])
        return True

    def shown(self, param: nn.Parameter) -> Tensor:
        _, flat, index = self._sharded.places[param]
        return with_own_storage(flat.casts[index][1]) if index in flat.casts else super().shown(param)

    def gather(self, param: nn.Parameter, wire: SoloWire, call: StateDictCall) -> Mapping[nn.Parameter, Tensor]:
        unit, flat, _ = self._sharded.places[param]
        full: Tensor | None = None
        if not self._outlining:
            self._settle([flat])  # not all of them: this is called for each span
            if self._is_here(unit, flat):
                full = flat.full.detach() if self.has_room(wire, call) else flat.full.to("meta")
            elif not flat.needs_all_ranks:
                full = joined(flat, wire, flat.values(), everywhere=self.has_room(wire, call))
            else:
                everywhere = self.agree_on_room(wire, call)
                with wire.watch.doing("state_dict()"):
                    own = read(wire, flat.values, may_fail=flat.storage.uses_disk)
                    full = joined(flat, wire, own, everywhere=everywhere)
        found = {}
        for slot, each in zip(flat.span.slots, flat.params):
            dtype = dtype_of(slot.spec.dtype)
            if full is None:
                found[each] = torch.empty(slot.spec.shape, dtype=dtype, device="meta")
            else:
                value = full[slot.offset : slot.stop].view(slot.spec.shape)
                value = value.to(dtype) if value.is_meta else value.to("cpu", dtype, copy=True)
                found[each] = self.given(value, wire, flat.device)
        return found

    def _is_here(self, unit: Unit, flat: Flat) -> bool:
        """Whether whole parameters have the masters' values on every rank. The same on every rank."""
        if not flat.shows_exactly or unit.state is not State.GATHERED or flat.stale or self._leads():
            return False
        return not any(shard.edited() for shard in flat.shards)

    def outline(self) -> dict[str, Any]:
        """`state_dict()` of the whole model without communication: parameters as meta tensors, buffers as CPU copies."""
        model = self._sharded.model
        self._outlining = True
        try:
            with AsTheyAre():  # a module's own `state_dict` may read its parameters: on this rank alone
                state = model.state_dict()
        finally:
            self._outlining = False
        named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return {
            key: value.detach().cpu().clone() if isinstance(value, Tensor) and key not in named else value
            for key, value in state.items()
        }

    def before_load(self) -> None:
        self._sharded.refuse_unsharded("load_state_dict()")
        for unit in self._sharded.units:
            unit.release()  # what a parameter points at afterwards is no edit of somebody's
        self._settle(None)

    def open(self, param: nn.Parameter) -> Tensor:
        _, flat, index = self._sharded.places[param]
        flat.show(index, torch.empty(flat.span.slots[index].spec.shape, dtype=flat.master_dtype, device=flat.device))
        return param.data

    def close(self, param: nn.Parameter, landing: Tensor) -> None:
        _, flat, index = self._sharded.places[param]
        for shard, piece in flat.pieces(index):
            shard.values[piece.here].copy_(landing.view(-1)[piece.there])
        flat.unshow(index, gathered=False)

    def after_load(self) -> None:
        """The masters are new: whole parameters follow, where the stage keeps them. A collective."""
        units = self._sharded.units
        with on_all_ranks(self._sharded.wire, "carrying new values to where they rest", kind=TierError):
            for unit in units:
                unit.release()
                unit.updated()
        if self._sharded.policy.keep_full:
            for unit in units:
                unit.gather()
            for unit in units:
                unit.wait()
