"""An optimizer over parameters of true shape, for rules that look at whole matrices.

A span's master stays one flat buffer; each parameter in it gets a **whole**: a Parameter of true shape that is a view of the
master, with a `.grad` that is a view of the span's gradient. The optimizer's groups hold the wholes in the order in which
they held the model's parameters, and its state is its own, as over a plain model: what it computes is what it would
compute there. Only where nothing is cut, and all state is in the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from .flat_param import Flat
from .optimizer import Binding, load_plainly
from .unit import Unit


class WholeBinding(Binding):
    """One optimizer bound to the wholes of one model."""

    one_gradient = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        wire: SoloWire,
        originals: list[list[nn.Parameter]],
    ) -> None:
        self._whole_of: dict[nn.Parameter, nn.Parameter] = {}
        super().__init__(optimizer, units, wire, originals)

    def _stand_ins(self, flats: list[list[Flat]]) -> list[list[Tensor]]:
        for flat in self.flats:
            if not flat.wholes:
                flat.make_wholes()
            self._whole_of |= dict(zip(flat.params, flat.wholes))
        # A frozen parameter stays itself: it has no gradient, and places in `state_dict()` are counted with it.
        return [[self._whole_of.get(param, param) for param in params] for params in self.originals]

    def show_grads(self) -> None:
        for flat in self.flats:
            grad = flat.shards[0].device_grad
            for whole, slot, present in zip(flat.wholes, flat.span.slots, flat.present):
                if grad is None or not present:
                    whole.grad = None
                else:
                    whole.grad = grad[slot.offset : slot.stop].view(slot.spec.shape)

    def stepped(self) -> None:
        """An optimizer that gave a whole other memory: its values go where they belong."""
        for flat in self.flats:
            flat.settle_wholes()

    def forget(self) -> None:
        for flat in self.flats:
            for whole in flat.wholes:
                self.optimizer.state.pop(whole, None)
            flat.wholes = []

    # State: the optimizer's own -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer gives it, on CPU; on every rank."""
        state = type(self.optimizer).state_dict(self.optimizer)
        kept = {
            index: {
                key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }
            for index, entries in state["state"].items()
        }
        return {**state, "state": kept}

    def _put(self, saved: dict[nn.Parameter, dict[str, Any] | None], state_dict: dict[str, Any], spread: bool) -> None:
        if spread:
            state = state_dict["state"]
            state_dict = {**state_dict, "state": {i: self._received(state[i], spread) for i in sorted(state)}}
        load_plainly(self.optimizer, state_dict)

    def _check_shapes(self, saved: Mapping[nn.Parameter, dict[str, Any] | None]) -> None:
        """States may have any shape."""

    def take(self, flats: Iterable[Flat]) -> dict[nn.Parameter, dict[str, Any]]:
        """The state of these spans' parameters; the optimizer forgets it."""
        mine = [flat for flat in flats if flat in self.flats]
        state = {param: entries for flat in mine for param, entries in self._whole_state(flat, True).items()}
        for flat in mine:
            for whole in flat.wholes:
                self.optimizer.state.pop(whole, None)
        return state

    def _whole_state(self, flat: Flat, everywhere: bool) -> dict[nn.Parameter, dict[str, Any]]:
        state = self.optimizer.state
        return {param: dict(state[whole]) for param, whole in zip(flat.params, flat.wholes) if whole in state}

    def put(self, flats: Iterable[Flat], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """For spans that were cut anew: they get wholes, and those the state."""
        for flat in flats:
            flat.make_wholes()
            for param, whole in zip(flat.params, flat.wholes):
                if param in state:
                    self.optimizer.state[whole] = state[param]
