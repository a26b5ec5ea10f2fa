"""What a released parameter shows, and how a write to it is found."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..core.layout import Span
from ..core.precision import dtype_of
from ..errors import StateError


class Guards:
    """One NaN per parameter of a span; a released parameter's `.data` is its guard expanded to the true shape.

    A stray read gives NaN; a stray write changes the guard and is found by the next gather. Types without a NaN have 0, and
    nothing is found.

    Attributes:
        addresses: of what is shown.
        shown: by parameter, its guard expanded, in the type that it is gathered in: a change of a parameter's type would cut it
            off from the graphs that it is part of (`autograd.grad` finds a parameter by its AccumulateGrad node).
    """

    def __init__(self, span: Span, device: torch.device) -> None:
        self._span = span
        dtype = dtype_of(span.spec.compute_dtype)
        self._has_nan = dtype.is_floating_point or dtype.is_complex
        value = float("nan") if self._has_nan else 0
        self._values = torch.full((len(span.slots),), value, dtype=dtype, device=device)
        self.shown = [guard.expand(slot.spec.shape) for guard, slot in zip(self._values.unbind(), span.slots)]
        self.addresses = [guard.data_ptr() for guard in self.shown]

    def intact(self) -> Tensor:
        """0-dim bool: no parameter was written while it was released. No host wait."""
        if self._has_nan:
            return self._values.isnan().all()
        return torch.ones((), dtype=torch.bool, device=self._values.device)

    def check(self, unit: str) -> None:
        """Raise if a parameter was written while it was released."""
        if self._has_nan and not bool(self.intact()):
            self.refuse(unit, int((~self._values.isnan()).nonzero()[0]))

    def refuse(self, unit: str, index: int) -> NoReturn:
        """This parameter was written while it was released."""
        if self._has_nan:
            self._values.fill_(float("nan"))
        raise StateError(
            f"parameter {self._span.slots[index].spec.name!r} of unit {unit!r} was written to while it was released (its "
            "values live in the ranks' shards; what was written is lost). Assign `param.data = values` on every rank, or use "
            "zero.GatheredParameters, zero.set_full_parameter or load_state_dict"
        )
