"""Gradients that overflow in float16: whether they may, and one rank's shown on all, so that loss scalers agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..core.precision import Precision
from ..tiers.pool import Storage
from .unit import Unit


class Overflow:
    """Of one engine.

    Attributes:
        possible: something computes in float16, for all that is known.
    """

    def __init__(self, model: nn.Module, precision: Precision, wire: SoloWire, device: torch.device) -> None:
        self._wire, self._device = wire, device
        self.possible = precision.autocast_dtype == torch.float16 or any(
            p.dtype == torch.float16 and p.requires_grad for p in model.parameters()
        )

    def look(self) -> None:
        """Before a forward: an autocast region of the user's own may be on."""
        if not self.possible and _computes_in_float16(self._device):
            self.possible = True

    def show(self, units: Sequence[Unit], storage: Storage | None, *, reduced: bool) -> None:
        """After a backward. Groups show their gradients in full, for a loss scaler. A collective with `reduced`.

        Args:
            storage: where something is offloaded.
            reduced: gradients were sent to their owners, of which there are several: those of all ranks know afterwards.
        """
        if not self.possible:
            return
        # What no optimizer has no loss scaler looks at: it makes no step skip, and cannot carry the news.
        flats = [flat for unit in units for flat in unit.trained if flat.span.is_updated]
        if storage is not None:
            storage.wide = True
            for flat in flats:
                flat.grads()
        if reduced:
            self._share([grad for flat in flats for _, grad in flat.grads()])

    def _share(self, grads: Sequence[Tensor]) -> None:
        """On every rank, whatever gradients it has: the others wait for its answer."""
        found = torch.zeros((), device=self._device)
        for place in {grad.device for grad in grads}:
            here = _any_infinite(iter([grad for grad in grads if grad.device == place]))
            found = torch.maximum(found, here.to(self._device))
        found = self._wire.max_scalar(found)
        infinite = torch.where(found > 0, float("inf"), 0.0)
        for grad in grads:
            if grad.numel():  # an element to carry it: the padding of a span will do
                grad[:1].add_(infinite.to(device=grad.device, dtype=grad.dtype))
                break


def _computes_in_float16(device: torch.device) -> bool:
    """Whether an autocast region of the user's own is on with float16: gradients may overflow then."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16


def _any_infinite(tensors: Iterator[Tensor]) -> Tensor:
    """0-dim float32: 0.0 when every element is finite, else 1.0. One fused pass per tensor, no host wait."""
    found: Tensor | None = None
    one: Tensor | None = None
    for tensor in tensors:
        if found is None or one is None:
            found = torch.zeros((), dtype=torch.float32, device=tensor.device)
            one = torch.ones((), dtype=torch.float32, device=tensor.device)
        torch._amp_foreach_non_finite_check_and_unscale_([tensor], found, one)
    return found if found is not None else torch.zeros(())
