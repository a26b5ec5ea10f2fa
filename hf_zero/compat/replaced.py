"""User code replaces a parameter (`module.weight = nn.Parameter(...)`, `load_state_dict(assign=True)`): a named error.

The optimizer and the engine would keep the old parameter, and the new one would silently never be trained.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..errors import StateError


class Replaced(Observer):
    """Raises where a sharded parameter is replaced by another one."""

    def attach(self, engine: Engine) -> None:
        self._context = engine.context
        self._handle = register_module_parameter_registration_hook(self._register)

    def detach(self) -> None:
        self._handle.remove()

    def _register(self, module: nn.Module, name: str, param: Tensor | None) -> None:
        old = module._parameters.get(name)
        place = None if old is None or old is param else place_of(old)
        if place is not None and place.span.context is self._context:
            raise StateError(
                f"{place.span.name_of(place.index)!r} was replaced by another parameter, which the optimizer does not have. "
                "Write its values instead (param.data.copy_(values), load_state_dict without assign=True), or detach() the "
                "engine first"
            )
