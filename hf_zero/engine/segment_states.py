"""`optimizer.state` while an optimizer is bound: the states of its segments, by the tensors of its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import StateError
from .parameter import ShardedParameter


class SegmentStates(defaultdict[Any, dict[str, Any]]):
    """States that user code reads by the tensors of `optimizer.param_groups`.

    Parameters of the model have no entry. A plain `defaultdict` would create an empty one, and user code's writes to it would
    be lost silently. Access waits for updates that run after `optimizer.step()`. The engine itself uses `dict`'s methods.

    Args:
        factory, states: as of `defaultdict`, whose `copy` and `|` pass only these.
        wait_for_step: waits until no other thread updates states.
    """

    def __init__(
        self, factory: Any, states: Mapping[Any, dict[str, Any]], wait_for_step: Callable[[], None] = lambda: None
    ) -> None:
        self.wait_for_step = wait_for_step
        super().__init__(factory, states)

    def __missing__(self, key: Any) -> dict[str, Any]:
        self._check(key)
        return super().__missing__(key)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    @staticmethod
    def _check(key: Any) -> None:
        if isinstance(key, ShardedParameter):
            place = key._zero_place
            raise StateError(
                f"optimizer.state was asked for parameter {place.span.name_of(place.index)!r}, and it has states of this "
                "rank's segments, the tensors of optimizer.param_groups. Call zero.full_optimizer_state(param, name), or "
                "zero.set_full_optimizer_state(param, name, value), on every rank"
            )


def _settled(name: str) -> Any:
    plain = getattr(defaultdict, name)
    takes_key = name in ("__contains__", "get", "pop", "setdefault", "__setitem__")

    def method(self: SegmentStates, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_step()
        if takes_key:
            self._check(args[0])
        return plain(self, *args, **kwargs)

    return method


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__len__", "__contains__"),
    *("__eq__", "__ior__"),
    *("get", "keys", "items", "values", "pop", "popitem", "setdefault", "update", "clear"),
):
    setattr(SegmentStates, _name, _settled(_name))
