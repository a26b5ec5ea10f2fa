"""`model.state_dict()` and `load_state_dict()` of a sharded model, through torch's public per-module hooks.

`state_dict()` is a collective, on the model or any part of it: rank 0 gets full CPU tensors in the parameters' own types
(from the masters, never from a low-precision copy), the other ranks meta tensors of the same shapes, so that code which
only looks at keys, shapes and types runs everywhere. Tied parameters are one tensor object within a call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agree import read, together
from ..comm.wire import SoloWire
from ..core.precision import dtype_of
from ..errors import RankMismatchError, StateError, TierError
from .flat_param import Flat
from .unit import Unit


def gather_full(flat: Flat, wire: SoloWire) -> list[Tensor]:
    """A collective. The span's parameters in their own types and shapes: CPU tensors on rank 0, meta tensors elsewhere."""
    span = flat.span
    own = read(wire, flat.values, may_fail=flat.storage.uses_disk)
    here = wire.rank == 0
    if span.shards == 1:
        full = own.cpu() if here else own.to("meta")
    else:
        full = torch.empty(span.numel, dtype=own.dtype, device="cpu" if here else "meta")
        wire.collect(own, full if here else None, span.index)
    return [
        full[slot.offset : slot.stop].view(slot.spec.shape).to(getattr(torch, slot.spec.dtype), copy=True)
        for slot in span.slots
    ]


def outline_of(flat: Flat) -> list[Tensor]:
    """Meta tensors of the span's parameters, in their own types and shapes."""
    return [torch.empty(slot.spec.shape, dtype=dtype_of(slot.spec.dtype), device="meta") for slot in flat.span.slots]


class FullState:
    """The hooks of one model. A call's values live from its outermost module's first hook to its last."""

    def __init__(self, model: nn.Module, units: list[Unit], wire: SoloWire, settle: Callable[[], None]) -> None:
        self._wire = wire
        self._settle = settle  # returns when the masters are those of one step
        self._flat: dict[nn.Parameter, tuple[Flat, int]] = {}
        for unit in units:
            for flat in unit.flats:
                for slot, param in enumerate(flat.params):
                    self._flat[param] = (flat, slot)
        self._model = model
        self._units = units
        self._outlining = False
        self._depth = 0
        self._values: dict[Flat, list[Tensor]] = {}
        self._loading = 0
        self._spread = False
        self._landing: dict[nn.Parameter, Tensor] = {}
        self._handles: list[Any] = []
        for module in model.modules():
            if next(module.parameters(), None) is None:
                continue  # nothing of it is sharded, and other models may have it too (XLM's activation, for one)
            add = self._handles.append
            add(module.register_state_dict_pre_hook(self._begin))
            add(module.register_state_dict_post_hook(partial(self._give, module)))
            add(module.register_load_state_dict_pre_hook(self._load_begin))
            add(module.register_load_state_dict_post_hook(self._load_end))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    # Saving ---------------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not prefix:  # outermost; a call that raised may have left its traces
            self._depth = 0
            if not self._outlining:
                self._values.clear()
        self._depth += 1

    def _give(self, module: nn.Module, _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, param in module._parameters.items():
            if param is None or param not in self._flat or prefix + name not in state:
                continue
            flat, slot = self._flat[param]
            if flat not in self._values:
                self._settle()
                first = not self._values and flat.needs_all_ranks
                with self._wire.watch.doing("state_dict()") if first else nullcontext():
                    self._values[flat] = gather_full(flat, self._wire)
            state[prefix + name] = self._values[flat][slot]
        self._depth -= 1
        if self._depth == 0 and not self._outlining:
            self._values.clear()

    def outline(self) -> dict[str, Any]:
        """`state_dict()` of the whole model without communication: parameters as meta tensors, buffers as CPU copies."""
        for flat, _ in self._flat.values():
            if flat not in self._values:
                self._values[flat] = outline_of(flat)
        self._outlining = True
        try:
            state = self._model.state_dict()
        finally:
            self._outlining = False
            self._values.clear()
        named = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        return {
            key: value.detach().cpu().clone() if isinstance(value, Tensor) and key not in named else value
            for key, value in state.items()
        }

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
        own = {name: p for name, p in module._parameters.items() if p is not None and p in self._flat}
        if own and metadata.get("assign_to_params_buffers", False):
            raise StateError("load_state_dict(assign=True) would replace sharded parameters: load without assign")
        if self._loading == 0 or not prefix:
            self._loading = 0
            self._landing.clear()
            for unit in self._units:
                unit.release()  # what a parameter points at below is no edit of somebody's
            self._settle()
            # A dict made by state_dict() has meta tensors on all ranks but 0: then rank 0's values are sent around.
            meta = any(isinstance(v, Tensor) and v.is_meta for v in state.values())
            with self._wire.watch.doing("load_state_dict()"):
                answers = self._wire.exchange(meta)
            self._spread = any(answers)
            if answers[0]:
                raise RankMismatchError(
                    "load_state_dict: rank 0's tensors are on the meta device; it must have the values"
                )
            if self._spread and not all(answers[1:]):
                raise RankMismatchError(
                    "load_state_dict: some ranks pass meta tensors and some values; pass values on every rank, or on rank 0 "
                    "only (what state_dict() returned)"
                )
        self._loading += 1
        for name, param in own.items():
            value = state.get(prefix + name)
            if not isinstance(value, Tensor):
                continue
            flat, slot = self._flat[param]
            spec = flat.span.slots[slot].spec
            if tuple(value.shape) != spec.shape and not (spec.shape == () and tuple(value.shape) == (1,)):
                continue  # torch reports it as a size mismatch
            landing = torch.empty(spec.shape, dtype=flat.master_dtype, device=flat.device)
            if self._spread:
                if self._wire.rank == 0:
                    landing.copy_(value.reshape(spec.shape))
                self._wire.broadcast(landing)
                state[prefix + name] = landing
            self._landing[param] = landing
            # torch copies the value into what the parameter points at; `_load_end` takes this rank's part of it.
            param.data = landing

    def _load_end(self, module: nn.Module, incompatible: Any) -> None:
        with torch.no_grad():
            for param in module._parameters.values():
                if param is None or param not in self._landing:
                    continue
                # Tied parameters land once per name; the last one wins, as in torch.
                self._take(param, self._landing.pop(param))
        self._loading -= 1
        if self._loading == 0:
            self._landing.clear()
            self.settle()

    def _take(self, param: nn.Parameter, landing: Tensor) -> None:
        flat, slot = self._flat[param]
        for shard, at, numel, start in flat.pieces(slot):
            shard.values[at : at + numel].copy_(landing.view(-1)[start : start + numel])
        param.data = flat.guards.shown[slot]
        flat.uncount(slot)

    def settle(self) -> None:
        """The masters are new: whole parameters follow, where the stage keeps them."""

        def carry() -> None:
            for unit in self._units:
                unit.release()
                unit.updated()

        together(self._wire, "carrying new values to where they rest", carry, answer=False, kind=TierError)
        for unit in self._units:
            if unit.policy.keep_full:
                unit.gather()
        for unit in self._units:
            if unit.policy.keep_full:
                unit.wait()
