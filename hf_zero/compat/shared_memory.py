"""Refuses parameters that share memory without being the same parameter (`p.data = q.data`): sharding would part them.

They may share it with each other, or with the full parameters of another engine. Columns of one matrix are interleaved and
share nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import source_of
from ..errors import LayoutError

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
"""One table for the process, whose engines may share memory."""


class _Memory(NamedTuple):
    """The memory of one tensor: bytes `start` to `stop` of a device."""

    device: str
    start: int
    stop: int
    name: str
    values: Tensor
    is_own: bool


class SharedMemory(Observer):
    """Checks a model before it is sharded."""

    def check(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        """
        Raises:
            LayoutError: a parameter shares memory with another one, or its memory was released.
        """
        own = [each for name, param in model.named_parameters() for each in _memory_of(name, param)]
        _refuse_shared([*own, *_memory_of_engines()])

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        _ENGINES.add(engine)

    def detach(self) -> None:
        _ENGINES.discard(self._engine)


def _memory_of(name: str, param: nn.Parameter) -> Iterator[_Memory]:
    if nn.parameter.is_lazy(param):
        return
    source = source_of(param)
    values = param.detach() if source is None else source.memory(param)
    if values is None:
        return  # its values are partitioned over the ranks
    if not values.numel() or values.is_meta or values.layout != torch.strided:
        return
    size = values.element_size()
    extent = 1 + sum((count - 1) * stride for count, stride in zip(values.shape, values.stride()))
    if (values.storage_offset() + extent) * size > values.untyped_storage().nbytes():
        raise LayoutError(
            f"parameter {name!r} is a view of memory that was released (of a sharded model, probably). Give it values of its "
            "own: p.data = tensor.clone()"
        )
    start = values.data_ptr()
    yield _Memory(str(values.device), start, start + extent * size, name, values, True)


def _memory_of_engines() -> Iterator[_Memory]:
    for engine in _ENGINES:
        name = f"a parameter of the sharded {type(engine.model).__name__}"
        for span in (span for unit in engine.units for span in unit.spans if span.is_readable):
            start = span.full.data_ptr()
            yield _Memory(str(span.device), start, start + span.full_bytes, name, span.full, False)


def _refuse_shared(memory: Iterable[_Memory]) -> None:
    reaching: list[_Memory] = []  # those that end after the start of the next one
    for each in sorted(memory, key=lambda each: each[:3]):
        reaching = [other for other in reaching if other.device == each.device and other.stop > each.start]
        for other in reaching:
            if (each.is_own or other.is_own) and _overlap(each, other):
                first, second = (each, other) if each.is_own else (other, each)
                raise LayoutError(
                    f"parameter {first.name!r} shares memory with {second.name!r} and is another parameter (as after "
                    "p.data = q.data). Sharding would part them. Tie them by assigning the Parameter itself "
                    "(module.weight = other.weight), or give one a copy (p.data = p.data.clone())"
                )
        reaching.append(each)


def _overlap(one: _Memory, other: _Memory) -> bool:
    if one.values.is_contiguous() and other.values.is_contiguous():
        return True
    low, high = min(one.start, other.start), max(one.stop, other.stop)
    taken = torch.zeros(high - low, dtype=torch.bool, device="cpu")
    _bytes_in(taken, one, low).fill_(True)
    return bool(_bytes_in(taken, other, low).any())


def _bytes_in(space: Tensor, memory: _Memory, low: int) -> Tensor:
    size = memory.values.element_size()
    strides = [stride * size for stride in memory.values.stride()]
    return space.as_strided((*memory.values.shape, size), (*strides, 1), memory.start - low)
