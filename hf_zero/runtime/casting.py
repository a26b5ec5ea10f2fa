"""A model evaluated in another type than it is trained in: parameters and buffers are shown in it for a while, masters stay.

`module.to(dtype)` would round what is trained. Here a unit that is gathered shows its parameters cast, one unit at a time;
where whole parameters stay (stages 0 to 2), and in a model that is not sharded, all of them are shown as cast copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .unit import Unit


@contextmanager
def shown_in(
    model: nn.Module, dtype: torch.dtype, units: Sequence[Unit] = (), quiesce: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Inside, everything of `model` that is floating is of this type, as after `model.to(dtype)`. For forwards without a graph.

    Args:
        units: of a sharded model; without them the model is a plain one, whole on this rank.
        quiesce: returns when nothing is gathered. A collective where that is one.
    """
    quiesce()
    owned = {param for unit in units for flat in unit.flats for param in flat.params}
    plain = [(param, param.data) for param in model.parameters() if param not in owned and param.is_floating_point()]
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        for unit in units:
            unit.show_in(dtype)
        for param, data in plain:
            param.data = data.to(dtype)
        for table, buffers in tables:
            table.update({name: _cast(buffer, dtype) for name, buffer in buffers.items()})
        yield
    finally:
        quiesce()
        for unit in units:
            unit.show_in(None)
        for param, data in plain:
            param.data = data
        for table, buffers in tables:
            table.update(buffers)


def _cast(buffer: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return buffer.to(dtype) if buffer is not None and buffer.is_floating_point() else buffer
