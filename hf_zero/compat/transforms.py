"""Refuses forwards inside differentiating transforms of `torch.func`, which wrap every tensor that is created inside."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.observer import Observer
from ..errors import StateError


class Transforms(Observer):
    """Checks which transforms a forward runs in. `torch.vmap` is supported."""

    def before_forward(self, args: Any, kwargs: Any) -> None:
        """
        Raises:
            StateError: the forward runs inside `torch.func.grad`, `jvp` and the like.
        """
        functorch: Any = torch._C._functorch
        for transform in functorch.get_interpreter_stack() or ():
            if transform.key() != functorch.TransformType.Vmap:
                raise StateError(
                    f"a sharded model was called inside torch.func.{transform.key().name.lower()}, where its parameters cannot "
                    "be gathered. Differentiate by torch.autograd.grad(..., create_graph=True) or torch.autograd.functional"
                )
