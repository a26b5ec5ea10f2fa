"""An optimizer that must have parameters whole: each of true shape, where ranks share the model out with one owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.agree import read
from ...comm.wire import SoloWire, wire_device
from ...tiers.array import in_memory
from ..values.flat_param import Flat, sent
from ..values.reads import AsTheyAre
from ..values.stand_in import Keeper, OwnGradient, PagedGradient
from .optimizer import Binding, load_plainly, on_cpu
from .supported_optimizers import moves_without_gradient


class WholeBinding(Binding):
    """An optimizer over parameters of true shape, for rules that look at whole matrices.

    A span's master stays one flat buffer; each parameter in it gets a **whole**: a Parameter of true shape that is a view of
    the master, with a `.grad` that is a view of the span's gradient. The optimizer's groups hold the wholes in the order in
    which they held the model's parameters; where ranks share the model out, those that this rank owns, maybe none.

    What does not rest on the device the optimizer's own step does not see: `whole_step` steps over it afterwards. A whole in
    host memory shows its values and its gradient there, one on disk NaN and a stand-in for its gradient.
    """

    one_gradient = False
    _hides = False
    """The groups' lists are without what does not rest on the device."""

    _settle: Callable[[], None] | None

    def _stands_for(self) -> dict[Tensor, Sequence[nn.Parameter]]:
        return {whole: (param,) for param, whole in self._whole_of.items()}

    def _stand_ins(self, flats: list[list[Flat]]) -> list[list[Tensor]]:
        self._whole_of: dict[nn.Parameter, nn.Parameter] = {}
        for flat in self.flats:
            if flat.wholes is None:
                flat.make_wholes()
            self._whole_of |= {flat.params[index]: whole for index, whole in (flat.wholes or {}).items()}
        self._shared_out = any(flat.span.cuts for flat in self.flats)
        # A frozen parameter stays itself: it has no gradient, and places in `state_dict()` are counted with it.
        self._all: list[list[Tensor]] = [
            [self._whole_of.get(p, p) for p in params if p in self._whole_of or not self._shared_out]
            for params in self.originals
        ]
        return [list(params) for params in self._all]

    @cached_property
    def steps_without_gradient(self) -> bool:
        """The optimizer changes parameters that have no gradient, too."""
        return moves_without_gradient(self.optimizer)

    @property
    def _offloaded(self) -> list[Flat]:
        """Spans of which something rests elsewhere than on the device."""
        return [flat for flat in self.flats if flat.shards[0].is_offloaded]

    def show_grads(self) -> None:
        self._show_grads(plainly=not self._shared_out)
        if self._hides:
            self._hides = False
            for params, everything in zip(self._masters, self._all):
                params[:] = everything

    def hide_slices(self) -> None:
        """Of what does not rest on the device the groups show no gradients in the optimizer's own step; nor parameters, where
        it would change those without one."""
        self._show_grads(plainly=True, is_step=True)
        if (offloaded := self._offloaded) and self.steps_without_gradient:
            self._hides = True
            hidden = {whole for flat in offloaded for whole in (flat.wholes or {}).values()}
            for params, everything in zip(self._masters, self._all):
                params[:] = [param for param in everything if param not in hidden]

    def _show_grads(self, *, plainly: bool, is_step: bool = False) -> None:
        for flat in self.flats:
            shard, wholes, keeper = flat.shards[0], flat.wholes or {}, flat.handles.keeper
            grad = None if is_step and shard.is_offloaded else shard.grad_of_wholes()
            # On disk, or in host memory in the compute type: not read or widened before user code needs it.
            is_narrow = grad is None and not is_step and shard.has_grad and not shard.storage.transient
            parts = {} if grad is None else dict(flat.own_wholes(grad))
            for index, whole in wholes.items():
                shown: Tensor | None = None
                if flat.present[index] and keeper is not None and is_narrow:
                    shown = self._paged(keeper, flat, index) if shard.is_paged else self._narrow(keeper, flat, index)
                elif flat.present[index] and index in parts:
                    shown = parts[index]
                    if not plainly and keeper is not None:
                        shown = OwnGradient.of_whole(
                            keeper, shown, self.index, is_shared_out=self._shared_out, local=shown
                        )
                shard.give_grad(whole, shown, is_step=is_step)

    def _narrow(self, keeper: Keeper, flat: Flat, index: int) -> Tensor:
        of = weakref.ref(flat)  # a graph that user code keeps holds gradients, and they would hold the span

        def widen() -> Tensor | None:
            flat = of()
            if flat is None or flat.shards[0].whole_grad() is None or (grad := flat.shards[0].grad_of_wholes()) is None:
                return None
            return dict(flat.own_wholes(grad))[index]

        whole = (flat.wholes or {})[index]
        with AsTheyAre():
            like = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
        return OwnGradient.of_whole(keeper, like, self.index, is_shared_out=self._shared_out, widen=widen)

    def _paged(self, keeper: Keeper, flat: Flat, index: int) -> Tensor:
        whole = (flat.wholes or {})[index]
        at = flat.span.slots[index].offset - flat.span.bounds(flat.rank)[0]
        with AsTheyAre():
            return PagedGradient.of_part(
                keeper,
                whole,
                weakref.ref(flat.shards[0]),
                slice(at, at + whole.numel()),
                self.index,
                is_shared_out=self._shared_out,
            )

    def stepped(self) -> None:
        """An optimizer that gave a whole other memory: its values go where they belong."""
        for flat in self.flats:
            if not flat.shards[0].is_offloaded:
                flat.settle_wholes()
        self.show_grads()

    def _forget(self, flats: Iterable[Flat]) -> None:
        for flat in flats:
            for whole in (flat.wholes or {}).values():
                flat.shards[0].put(self.optimizer, whole, {})

    def keep_states(self, settle: Callable[[], None] | None) -> None:
        self._settle = settle
        super().keep_states(settle)

    def _take_states(self, states: Mapping[Any, dict[str, Any]]) -> None:
        for flat in self._offloaded:
            for whole in (flat.wholes or {}).values():
                if whole in states:
                    flat.shards[0].put(self.optimizer, whole, states[whole])

    # State: the optimizer's own -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer gives it, on CPU. On every rank where every rank has all; else a collective, and rank 0 has
        the values, the others meta tensors."""
        if self._shared_out or self._offloaded:
            return super().state_dict()
        state = type(self.optimizer).state_dict(self.optimizer)
        kept = {i: {key: on_cpu(value) for key, value in each.items()} for i, each in sorted(state["state"].items())}
        return {**state, "state": kept}

    def _put(self, saved: dict[nn.Parameter, dict[str, Any] | None], state_dict: dict[str, Any], spread: bool) -> None:
        if spread:
            state = state_dict["state"]
            state_dict = {**state_dict, "state": {i: self._received(state[i]) for i in sorted(state)}}
        if self._shared_out:
            state_dict = self._own_part(state_dict)
        load_plainly(self.optimizer, state_dict)
        if self._offloaded:
            self.keep_states(self._settle)

    def _own_part(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Of a full state, what this rank's groups have, by the same numbers."""
        groups = [
            {**group, "params": [i for i, param in zip(group["params"], params) if param in self._whole_of]}
            for group, params in zip(state_dict["param_groups"], self.originals)
        ]
        own = {i for group in groups for i in group["params"]}
        return {
            **state_dict,
            "param_groups": groups,
            "state": {i: v for i, v in state_dict["state"].items() if i in own},
        }

    def _check_shapes(self, saved: Mapping[nn.Parameter, dict[str, Any] | None]) -> None:
        """States may have any shape."""

    def _whole_state(self, flat: Flat, everywhere: bool) -> dict[nn.Parameter, dict[str, Any]]:
        def found() -> dict[int, dict[str, Any]]:
            entries = {index: each for index, each in flat.whole_entries(self.optimizer).items() if each}
            return {index: {k: in_memory(v) for k, v in each.items()} for index, each in entries.items()}

        mine = read(self._wire, found, may_fail=flat.storage.uses_disk)
        if flat.span.cuts:
            mine = self._from_owners(flat, mine, everywhere)
        elif flat.shards[0].is_offloaded:
            mine = {index: {k: on_cpu(v) for k, v in each.items()} for index, each in mine.items()}
        return {flat.params[index]: entries for index, entries in sorted(mine.items())}

    def _from_owners(
        self, flat: Flat, mine: Mapping[int, dict[str, Any]], everywhere: bool
    ) -> dict[int, dict[str, Any]]:
        """By place in the span's parameters, the state that their owners have, on CPU: on rank 0, meta tensors elsewhere, or
        everywhere. A collective; tensors travel one by one, with nothing else of the state in memory twice."""
        wire = self._wire
        told = wire.exchange({index: {k: _outline(v) for k, v in entries.items()} for index, entries in mine.items()})
        out: dict[int, dict[str, Any]] = {}
        for rank, outlines in enumerate(told[: flat.span.shards]):  # other replicas have the same
            for index, entries in sorted(outlines.items()):
                out[index] = dict(entries)
                for key, value in entries.items():
                    if not isinstance(value, _Outline):
                        continue
                    own = mine[index][key].detach().contiguous() if rank == wire.rank else None
                    here = everywhere or wire.rank == 0
                    out[index][key] = _sent(wire, own, value, rank, everywhere) if here or own is not None else None
                    if not here:
                        out[index][key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return out

    def put(self, flats: Iterable[Flat], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """For spans that were cut anew: they get wholes, and those the state."""
        for flat in flats:
            flat.make_wholes()
            for index, whole in (flat.wholes or {}).items():
                entries = state.get(flat.params[index])
                if entries is not None:
                    flat.shards[0].put(self.optimizer, whole, entries)


class _Outline(NamedTuple):
    """A state's tensor whose values are on another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _outline(value: Any) -> Any:
    """What of a state ranks tell each other: single values as they are."""
    if not isinstance(value, Tensor):
        return value
    return _Outline(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()


def _sent(wire: SoloWire, own: Tensor | None, outline: _Outline, source: int, everywhere: bool) -> Tensor:
    """A tensor of rank `source`, which passes it, on rank 0 or everywhere, on CPU. A collective."""
    if everywhere:
        return sent(wire, own, *outline, wire_device(wire, torch.device("cpu")), source).cpu()
    landing = torch.empty(outline.shape, dtype=outline.dtype, device="cpu")
    wire.carry(None if own is None else own.view(-1).view(torch.uint8), landing.view(-1).view(torch.uint8), source)
    return landing
