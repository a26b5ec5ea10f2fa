"""`state_dict()` and `load_state_dict()` of modules whose values are elsewhere, through torch's public per-module hooks.

`state_dict()` is a collective, on the model or any part of it: rank 0 gets full CPU tensors in the parameters' own types
(from the masters, never from a low-precision copy), the other ranks meta tensors of the same shapes, so that code which
only looks at keys, shapes and types runs everywhere; who computes with them finds values, see `Elsewhere`. Tied parameters
are one tensor object within a call. `load_state_dict` takes that, or values on every rank. Inside `zero.unsharded` it is
torch's own: the parameters' values, on every rank.
"""

from __future__ import annotations

import copy
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ..comm.agree import on_all_ranks, read
from ..comm.wire import SoloWire, wire_device
from ..core.precision import dtype_of
from ..errors import RankMismatchError, StateError, TierError
from ..plan.machine import free_host_bytes
from .values.flat_param import Flat, joined
from .values.reads import AsTheyAre, Unmasked, needs_values
from .values.sharded import Sharded

_SHARE = 8
"""Ranks other than 0 keep a state dict's values where these are at most this part of the host memory that is free."""


class Elsewhere(Tensor):
    """An entry of a state dict on a rank other than 0: a meta tensor to whoever looks at it, with values for who computes.

    Programs use a state dict on every rank (moving averages, target networks: `twin.load_state_dict(model.state_dict())`).

    Attributes:
        held: the values; None where host memory has no room for them on every rank.

    Raises:
        StateError: there are none, and elements are asked for (`item`, `cpu`, arithmetic with a tensor that has some).
    """

    held: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if not needs_values(func):
                return func(*args, **given[1])
            mine = [each for each in tree_leaves(given) if isinstance(each, Elsewhere)]
            if all(each.held is not None for each in mine):
                args, kwargs = tree_map_only(Elsewhere, lambda each: each.held, given)
                return func(*args, **kwargs)
            try:
                result = func(*args, **given[1])
            except (RuntimeError, TypeError) as error:
                shapes = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in mine)
                raise StateError(
                    f"{getattr(func, '__name__', func)} of a value of state_dict(): every rank but 0 has its shape and type "
                    f"alone ({shapes}), since the model's values on every rank take more than 1/{_SHARE} of the host memory "
                    "that is free. Compute with it on rank 0, or make the state dict and what reads it inside `with "
                    "zero.unsharded(model):`, where all ranks have all values on the device"
                ) from error
        return tree_map_only(Tensor, lambda made: elsewhere(made) if made.is_meta else made, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return elsewhere(torch.empty_like(self), copy.deepcopy(self.held, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file or another process has a plain tensor
        return (self.as_subclass(Tensor) if self.held is None else self.held).__reduce_ex__(protocol)


def elsewhere(like: Tensor, held: Tensor | None = None) -> Tensor:
    """
    Args:
        like: a meta tensor.
        held: values of the same shape and type.
    """
    made = like.as_subclass(Elsewhere)
    made.held = held
    return made


class StateDictHooks(ABC):
    """The hooks, over whoever has the values. A call's values live from its outermost module's first hook to its last."""

    def __init__(self) -> None:
        self._depth = 0
        self._values: dict[nn.Parameter, Tensor] = {}
        self._module: nn.Module | None = None  # the outermost
        self.everywhere = False
        """In this call: every rank has values."""
        self._unmasked: list[Unmasked] = []  # of the modules that torch is at, innermost last
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

    @property
    def shows_values(self) -> bool:
        """Whether all parameters show, on every rank, what `gather` would give."""
        return False

    @abstractmethod
    def gather(self, param: nn.Parameter, wire: SoloWire, first: bool) -> Mapping[nn.Parameter, Tensor]:
        """Values as `state_dict()` gives them, of this parameter and of those that come with it. A collective.

        Args:
            first: of this call.
        """

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
        if not prefix:  # outermost; a call that raised may have left its traces
            self._depth = 0
            self._values.clear()
            self._module = module
            while self._unmasked:
                self._unmasked.pop().end()
        self._depth += 1
        # torch takes `detach()` of each, for `_give` to replace.
        self._unmasked.append(Unmasked(module._parameters.values()))

    def _give(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._unmasked.pop().end()
        for name, param in module._parameters.items():
            if param is None or prefix + name not in state:
                continue
            wire = self.wire_of(param)
            if wire is None or self.shows_values:
                continue
            if param not in self._values:
                self._values.update(self.gather(param, wire, first=not self._values))
            state[prefix + name] = self._values[param]
        self._depth -= 1
        if self._depth == 0:
            self._values.clear()
            self._module = None

    def agree_on_room(self, wire: SoloWire, *, alone: bool = False) -> None:
        """Whether host memory has room for a call's values on every rank. A collective.

        Args:
            alone: the call sends nothing, and this rank decides by itself.
        """
        params = () if self._module is None else self._module.parameters()
        needed_bytes = _SHARE * sum(param.numel() * param.element_size() for param in params)
        if alone:
            self.everywhere = needed_bytes <= free_host_bytes(wire.size)
            return
        told = wire.exchange((socket.gethostname(), free_host_bytes()))
        hosts = [host for host, _ in told]
        self.everywhere = all(needed_bytes * hosts.count(host) <= free_bytes for host, free_bytes in told)

    def given(self, values: Tensor, wire: SoloWire) -> Tensor:
        """Values on the CPU or, where this rank has none, a meta tensor: as an entry of a state dict."""
        if wire.rank == 0:
            return values
        return elsewhere(values.to("meta"), None if values.is_meta else values)

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
    """

    def __init__(self, sharded: Sharded, settle: Callable[[Sequence[Flat] | None], None]) -> None:
        super().__init__()
        self._sharded = sharded
        self._settle = settle
        self._outlining = False

    def wire_of(self, param: nn.Parameter) -> SoloWire | None:
        return self._sharded.wire if param in self._sharded.places else None

    @property
    def shows_values(self) -> bool:
        return self._sharded.shows_masters

    def gather(self, param: nn.Parameter, wire: SoloWire, first: bool) -> Mapping[nn.Parameter, Tensor]:
        flat = self._sharded.places[param].flat
        full: Tensor | None = None
        if not self._outlining:
            self._settle([flat])  # not all of them: this is called for each span
            with wire.watch.doing("state_dict()") if first and flat.needs_all_ranks else nullcontext():
                if first:
                    self.agree_on_room(wire, alone=not flat.needs_all_ranks)
                own = read(wire, flat.values, may_fail=flat.storage.uses_disk)
                full = joined(flat, wire, own, everywhere=self.everywhere)
        found = {}
        for slot, each in zip(flat.span.slots, flat.params):
            dtype = dtype_of(slot.spec.dtype)
            if full is None:
                found[each] = torch.empty(slot.spec.shape, dtype=dtype, device="meta")
            else:
                value = full[slot.offset : slot.stop].view(slot.spec.shape).to(dtype, copy=True)
                found[each] = self.given(value, wire)
        return found

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
