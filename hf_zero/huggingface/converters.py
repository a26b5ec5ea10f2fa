"""Record the work of transformers' weight converters on meta tensors, so that only converted weights are gathered.

transformers stores some weights in another arrangement than a model holds them (experts merged, projections split).
`WeightConverter.convert` is the one function that computes them, in both directions. While a `Conversions` is recording,
each call's input and output tensors are recorded. An output made of full rows of its sources is placed by byte ranges; any
other is computed from full tensors, one group at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import transformers.core_model_loading as core_loading
from torch import Tensor

from ..checkpoint.weights import Conversion
from ..core.layout import Extent
from ..core.patching import patched
from ..errors import CheckpointError

_MIN_RUN_BYTES = 4096
_FREE_RUNS = 64
"""A tensor in more than `_FREE_RUNS` runs of less than `_MIN_RUN_BYTES` each is computed instead of placed."""


@dataclass(frozen=True, eq=False)
class _Group:
    """One call of `WeightConverter.convert`."""

    converter: Any  # without tensors
    layer: str
    settings: Mapping[str, Any]  # the call's keyword arguments
    sources: Mapping[str, list[str]]  # pattern -> names
    meta: Mapping[str, Tensor]  # name -> input meta tensor
    shapes: Mapping[str, torch.Size]  # of the outputs

    def convert(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.copy(self.converter)
        converter.collected_tensors = {
            pattern: [values[name] for name in names] for pattern, names in self.sources.items()
        }
        return _single(converter.convert(self.layer, **self.settings))

    @cached_property
    def placed(self) -> dict[str, list[Extent[str]]]:
        """The outputs made of full rows of the sources, as runs; `{}` for all other converters.

        Runs the converter on row numbers instead of rows, which is exact because of `_moves_rows`.
        """
        widths = {tensor.shape[-1] if tensor.dim() else 0 for tensor in self.meta.values()}
        if len(widths) != 1 or 0 in widths or not self._moves_rows():
            return {}
        (width,) = widths
        rows, starts, names, at = {}, [], [], 0
        for name, tensor in self.meta.items():
            count = math.prod(tensor.shape[:-1])
            rows[name] = torch.arange(at, at + count, device="cpu").reshape(*tensor.shape[:-1], 1)
            starts.append(at)
            names.append(name)
            at += count + 1  # so that row numbers of neighbouring sources are never consecutive
        first = torch.tensor(starts, device="cpu")
        found = {}
        for key, result in self.convert(rows).items():
            if result.numel() * width != self.shapes[key].numel() or self.shapes[key][-1] != width:
                continue
            flat = result.reshape(-1)
            cuts = [0, *((flat.diff() != 1).nonzero().reshape(-1) + 1).tolist(), flat.numel()]
            item = next(iter(self.meta.values())).element_size()
            if len(cuts) - 1 > _FREE_RUNS and flat.numel() * width * item < _MIN_RUN_BYTES * (len(cuts) - 1):
                continue
            runs = []
            for start, stop in zip(cuts, cuts[1:]):
                row = int(flat[start])
                source = int(torch.searchsorted(first, row, right=True)) - 1
                there = (row - starts[source]) * width
                runs.append(Extent(names[source], there, start * width, (stop - start) * width))
            found[key] = runs
        return found

    def _moves_rows(self) -> bool:
        """Return whether no operation moves elements along the last dimension."""
        depths = {tensor.dim() for tensor in self.meta.values()}
        depth = min(depths)
        for operation in self.converter.operations:
            if type(operation) is core_loading.MergeModulelist and operation.dim == 0:
                depth += 1
            elif type(operation) is core_loading.SplitModulelist and operation.dim == 0 and depth > 1:
                depth -= 1
            elif (
                type(operation) not in (core_loading.Chunk, core_loading.Concatenate)
                or not 0 <= operation.dim < depth - 1
            ):
                return False
        return len(depths) == 1


class Conversions:
    """Records the sources of meta tensors while transformers converts weights."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[str, Tensor]] = {}
        self._made: dict[tuple[int, int, int], tuple[_Group, str, Tensor]] = {}

    def source(self, name: str, tensor: Tensor) -> None:
        """Name a contiguous meta tensor with its own storage; the first name wins."""
        self._sources.setdefault(_storage(tensor), (name, tensor))

    def recording(self) -> AbstractContextManager[None]:
        """Record every conversion inside. Replaces `WeightConverter.convert`."""
        converters = core_loading.WeightConverter
        stock = converters.convert

        def convert(converter: Any, layer_name: str, **settings: Any) -> Any:
            tensors: dict[str, list[Any]] = {
                pattern: [item() if callable(item) else item for item in items]
                for pattern, items in converter.collected_tensors.items()
            }
            sources = {pattern: [self._name_of(item) for item in items] for pattern, items in tensors.items()}
            converter.collected_tensors.update(tensors)
            blank = copy.copy(converter)
            blank.collected_tensors = {}
            made = _single(stock(converter, layer_name, **settings))
            if all(name is not None for names in sources.values() for name in names):
                known = {name: item for pattern in sources for name, item in zip(sources[pattern], tensors[pattern])}
                shapes = {key: value.shape for key, value in made.items()}
                group = _Group(blank, layer_name, settings, sources, known, shapes)  # type: ignore[arg-type]
                for key, value in made.items():
                    if value.is_meta:
                        self._made[_identity(value)] = group, key, value
            return made

        return patched([(converters, "convert", convert)])

    def pieces(self, tensor: Tensor) -> list[Extent[str]] | None:
        """Return the elements of `tensor` in row-major order; None if they are computed or unknown."""
        known = self._sources.get(_storage(tensor)) if tensor.is_meta else None
        if known is not None and tensor.is_contiguous() and tensor.dtype == known[1].dtype:
            return [Extent(known[0], int(tensor.storage_offset()), 0, tensor.numel())] if tensor.numel() else []
        made = self._made.get(_identity(tensor)) if tensor.is_meta and tensor.is_contiguous() else None
        if made is None or made[2].dtype != tensor.dtype:
            return None
        group, key, _ = made
        return group.placed.get(key)

    def computed(self, results: Mapping[str, Tensor]) -> dict[str, Conversion]:
        """Return the conversions that compute `results`, which have no pieces: one object for each recorded call.

        Raises:
            CheckpointError: other code has made one of them.
        """
        groups: dict[_Group, dict[str, str]] = {}
        for target, tensor in results.items():
            if _identity(tensor) not in self._made:
                raise CheckpointError(
                    f"{target!r} is not made by transformers' weight converters, and hf_zero cannot compute it from shards. "
                    "Save inside `with zero.unsharded(model):`"
                )
            group, key, _ = self._made[_identity(tensor)]
            groups.setdefault(group, {})[key] = target
        out: dict[str, Conversion] = {}
        for group, targets in groups.items():
            out |= dict.fromkeys(targets.values(), Conversion(tuple(group.meta), partial(_compute, group, targets)))
        return out

    def _name_of(self, tensor: Any) -> str | None:
        known = self._sources.get(_storage(tensor)) if isinstance(tensor, Tensor) and tensor.is_meta else None
        is_whole = known is not None and tensor.numel() == known[1].numel() and tensor.is_contiguous()
        return known[0] if known is not None and is_whole else None


def _compute(group: _Group, targets: Mapping[str, str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = {
        name: values[name].to(device="cpu", dtype=meta.dtype).reshape(meta.shape) for name, meta in group.meta.items()
    }
    made = group.convert(whole)
    return {target: made[key] for key, target in targets.items()}


def _single(made: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a converter's only tensor, contiguous, so that code after it copies nothing."""
    return {key: (value[0] if isinstance(value, list) else value).contiguous() for key, value in made.items()}


def _storage(tensor: Tensor) -> int:
    """Return a key that tells storages apart; on the meta device they have no addresses."""
    return int(tensor.untyped_storage()._cdata)


def _identity(tensor: Tensor) -> tuple[int, int, int]:
    return _storage(tensor), int(tensor.storage_offset()), tensor.numel()
