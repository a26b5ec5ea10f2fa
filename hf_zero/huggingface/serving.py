"""Let library code ask a sharded model for its state on one rank: the answer is at hand, and nothing communicates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

_ABSENT = object()


@contextmanager
def own_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside, the instance itself has this attribute."""
    before = module.__dict__.get(name, _ABSENT)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


@contextmanager
def serving(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `state_dict()` of the model and of its parts answers from `state`, so that one rank alone may write.

    Of a sharded model it is a collective, and library code between here and the file calls it on the writer only.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(own_attribute(module, "state_dict", _server(state, f"{name}." if name else "")))
        yield


def _server(state: Mapping[str, Any], inside: str) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        answer: dict[str, Any] = OrderedDict() if destination is None else destination
        answer.update({prefix + key[len(inside) :]: value for key, value in state.items() if key.startswith(inside)})
        return answer

    return state_dict


__all__ = ["own_attribute", "serving"]
