"""Which elements of which meta tensors ended up where, while code runs that saves or loads a model.

Code that only moves elements about (views, clones, cat, stack) leaves results whose elements are runs of the sources;
whatever else it did is kept as a tape of operations, to be played again with real values. So code that renames, merges, splits
or computes weights is used as it is, and never copied.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..checkpoint.weights import Conversion
from ..core.layout import Extent

_MIN_CHUNK_BYTES = 4096
_FREE_CHUNKS = 64
"""A result in more pieces than `_FREE_CHUNKS`, each shorter than `_MIN_CHUNK_BYTES`, is played, not placed."""

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)


@dataclass(slots=True)
class _Content:
    """What one storage holds. `pieces` is None once it holds more than moved elements."""

    keep: Tensor  # so that the storage's identity is not given to another
    name: str | None = None
    pieces: list[Extent[str]] | None = None


@dataclass(frozen=True, slots=True)
class _Operation:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    reads: frozenset[int]
    writes: frozenset[int]


class Trace(TorchDispatchMode):
    """Notes what happens to meta tensors on this thread, between its enter and its exit."""

    def __init__(self) -> None:
        super().__init__()
        self._contents: dict[int, _Content] = {}
        self._tape: list[_Operation] = []

    def stand_in(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new source."""
        with no_dispatch():  # on the tape, it would be empty once more when that is played
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.source(name, tensor)
        return tensor

    def source(self, name: str, tensor: Tensor) -> None:
        """`tensor`, contiguous on the meta device and the only one of its storage, is called `name` from now on."""
        key = _storage(tensor)
        if key not in self._contents:
            self._contents[key] = _Content(tensor, name, [Extent(name, 0, 0, tensor.numel())])

    def pieces(self, tensor: Tensor) -> list[Extent[str]] | None:
        """`tensor`'s elements in row-major order, without gaps; None if they are not all moved ones."""
        found = self._lines(tensor, [math.prod(tensor.shape[i + 1 :]) for i in range(tensor.dim())])  # row-major
        return None if found is None else _merged(found)

    def conversions(self, results: Mapping[str, Tensor]) -> list[Conversion]:
        """Ways to work out results that have no pieces; those that share a source are worked out together."""
        groups: list[tuple[set[int], list[str]]] = []
        for target, tensor in results.items():
            needs, names = self._needs({_storage(tensor)}), [target]
            for group in [group for group in groups if group[0] & needs]:
                groups.remove(group)
                needs, names = needs | group[0], group[1] + names
            groups.append((needs, names))
        out = []
        for needs, names in groups:
            wanted = {name: results[name] for name in names}
            tape = [step for step in self._tape if step.writes & needs]
            sources = {
                content.name: content.keep
                for key, content in self._contents.items()
                if key in needs and content.name is not None
            }
            out.append(Conversion(tuple(sources), tuple(wanted), partial(_play, sources, tape, wanted)))
        return out

    def _needs(self, storages: set[int]) -> set[int]:
        """The storages that values of `storages` descend from, themselves included."""
        needs = set(storages)
        for step in reversed(self._tape):
            if step.writes & needs:
                needs |= step.reads | step.writes
        return needs

    # Watching -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._to_copy.default and args[0].is_meta:
            kwargs = {**kwargs, "device": torch.device("meta")}  # `.cpu()`: stand-ins stay where they are
        out = func(*args, **kwargs)
        inputs = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor) and item.is_meta]
        results = [item for item in tree_leaves(out) if isinstance(item, Tensor) and item.is_meta]
        if not inputs and not results:
            return out
        reads = {_storage(item) for item in inputs}
        fresh = [item for item in results if _storage(item) not in reads]
        changed = _changed(func, args, kwargs)
        if not fresh and not changed:
            return out  # a view, or a question
        writes = {_storage(item) for item in (*fresh, *changed)}
        self._tape.append(_Operation(func, args, kwargs, out, frozenset(reads), frozenset(writes)))
        for item in fresh:
            self._contents[_storage(item)] = _Content(item)
        if not self._follow(func, args, kwargs, fresh):
            for item in (*fresh, *changed):
                self._contents.setdefault(_storage(item), _Content(item)).pieces = None
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, fresh: list[Tensor]) -> bool:
        """True if the operation moved elements and nothing else, and its result's pieces are known now."""
        if len(fresh) != 1:
            return False
        out = fresh[0]
        if func in _COPIES:
            pairs = [(out, args[0])]
        elif func is _aten.cat.default:
            pairs = list(zip(out.split([part.size(_dim(args)) for part in args[0]], _dim(args)), args[0]))
        elif func is _aten.stack.default:
            pairs = list(zip(out.unbind(_dim(args)), args[0]))
        else:
            return False
        found: list[Extent[str]] = []
        for target, part in pairs:
            # A cast is arithmetic; parts of equal size only, so that nothing was broadcast.
            lines = (
                None if part.dtype != out.dtype else self._lines(part, target.stride(), int(target.storage_offset()))
            )
            if lines is None:
                return False
            found += lines
        self._contents[_storage(out)].pieces = _merged(found)
        return True

    def _lines(self, tensor: Tensor, strides: Sequence[int], offset: int = 0) -> list[Extent[str]] | None:
        """Where `tensor`'s elements come from, each at its place in a storage with `strides` and `offset`."""
        content = self._contents.get(_storage(tensor)) if tensor.is_meta else None
        if content is None or content.pieces is None or content.keep.dtype != tensor.dtype:
            return None
        if tensor.numel() == 0:
            return []
        # Widest steps of the target first, so that its inner dimensions are the consecutive ones.
        dims = sorted(
            ((int(here), int(there), extent) for extent, here, there in zip(tensor.shape, strides, tensor.stride())),
            reverse=True,
        )
        dims = [item for item in dims if item[2] != 1]
        chunk = 1
        while dims and dims[-1][0] == dims[-1][1] == chunk:
            chunk *= dims.pop()[2]
        if tensor.numel() // chunk > _FREE_CHUNKS and chunk * tensor.element_size() < _MIN_CHUNK_BYTES:
            return None
        out: list[Extent[str]] = []
        for place in itertools.product(*(range(extent) for _, _, extent in dims)):
            here = offset + sum(i * dim[0] for i, dim in zip(place, dims))
            there = int(tensor.storage_offset()) + sum(i * dim[1] for i, dim in zip(place, dims))
            lines = _cut(content.pieces, there, chunk, here - there)
            if lines is None:
                return None
            out += lines
        return out


def _play(
    sources: dict[str, Tensor], tape: list[_Operation], results: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The results, contiguous CPU tensors, of a tape with the sources' values, in any type, in place of the sources."""
    flats = {
        _storage(stand_in): values[name].to(device="cpu", dtype=stand_in.dtype).reshape(-1)
        for name, stand_in in sources.items()
    }

    def real(item: Any) -> Any:
        if isinstance(item, torch.device) and item.type == "meta":
            return torch.device("cpu")
        if not isinstance(item, Tensor) or not item.is_meta:
            return item
        flat = flats[_storage(item)]
        flat = flat if flat.dtype == item.dtype else flat.view(item.dtype)
        return flat.as_strided(item.shape, item.stride(), flat.storage_offset() + item.storage_offset())

    with torch.no_grad():
        for step in tape:
            out = step.func(*tree_map(real, step.args), **tree_map(real, step.kwargs))
            for stand_in, value in zip(tree_leaves(step.out), tree_leaves(out)):
                if isinstance(stand_in, Tensor) and _storage(stand_in) not in step.reads:
                    flats[_storage(stand_in)] = _as_stored(value, stand_in)
        return {name: real(stand_in).contiguous() for name, stand_in in results.items()}


def _as_stored(value: Tensor, stand_in: Tensor) -> Tensor:
    """`value` as the 1-D content of a storage like that of `stand_in`: kernels may choose other strides on the CPU."""
    numel = stand_in.untyped_storage().nbytes() // stand_in.element_size()
    if value.is_contiguous() and stand_in.is_contiguous() and numel == value.numel():
        return value.reshape(-1)
    flat = torch.empty(numel, dtype=value.dtype, device="cpu")
    flat.as_strided(stand_in.shape, stand_in.stride(), stand_in.storage_offset()).copy_(value)
    return flat


def _storage(tensor: Tensor) -> int:
    """Tells storages apart; on the meta device they have no addresses."""
    return int(tensor.untyped_storage()._cdata)


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The meta tensors that an operation writes to."""
    out = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            out += [item for item in tree_leaves(given) if isinstance(item, Tensor) and item.is_meta]
    return out


def _dim(args: Any) -> int:
    return int(args[1]) if len(args) > 1 else 0


def _cut(pieces: list[Extent[str]], start: int, numel: int, shift: int) -> list[Extent[str]] | None:
    """`numel` elements from `start`, moved by `shift`; None if some of them have no source."""
    out: list[Extent[str]] = []
    at = bisect_right(pieces, start, key=lambda piece: piece.start) - 1
    stop = start + numel
    while start < stop:
        part = pieces[at].cut(start, stop) if 0 <= at < len(pieces) else None
        if part is None or part.start != start:  # a gap behind the piece or before it
            return None
        out.append(part.moved(shift))
        start, at = part.stop, at + 1
    return out


def _merged(pieces: Iterable[Extent[str]]) -> list[Extent[str]]:
    """In order of place, neighbours joined where they are neighbours in the source too."""
    out: list[Extent[str]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        last = out[-1] if out else None
        ends = None if last is None else (last.source, last.there.stop, last.stop)
        if last is not None and ends == (piece.source, piece.source_start, piece.start):
            out[-1] = replace(last, numel=last.numel + piece.numel)
        else:
            out.append(piece)
    return out
