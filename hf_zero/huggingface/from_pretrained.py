"""`from_pretrained` inside `zero.Init`: each rank reads only its own elements of every parameter.

The stock loader decides which tensor belongs where (`planned_load`); the bytes are read here. Placed parameters are read as
byte ranges, or stay in the files (`Init(offload_params="disk")`). Computed ones are converted from full tensors, one group
at a time, and sliced at once. Buffers are read in full. The report, missing keys and ties are transformers' own code. Files
that are not safetensors, state dicts and quantized models take the stock path, and `zero.Init` slices each parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.accelerate import get_device

from ..checkpoint.ranges import NamedPiece, RangeReader, ranges_of
from ..checkpoint.safetensors import StoredTensor, check_same_files, read_header, sample_digest
from ..checkpoint.weights import EXTRA_STATE
from ..comm.agreement import on_all_ranks
from ..comm.wire import Wire
from ..core.layout import Extent
from ..core.patching import patched
from ..core.precision import dtype_of
from ..errors import ConfigError, LayoutError
from ..params.deferred import Deferred, closed_parameter, deferred_of, slice_bounds
from ..params.init import Init
from ..tiers.array import FileSource, JoinedSource, OnDisk, Stamp
from ..tiers.tier import Meter
from .weights import PlannedLoad, planned_load


def patched_loading(init: Init) -> AbstractContextManager[object]:
    """Replace transformers' loader inside the block."""
    stock = PreTrainedModel._load_pretrained_model
    finalize = PreTrainedModel._finalize_model_loading
    stock_initialize = PreTrainedModel._initialize_missing_keys
    stock_move: Any = PreTrainedModel._move_missing_keys_from_meta_to_device  # annotated for a list, called with a set
    signature = inspect.signature(stock)

    def load(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        model, files, config = call["model"], call.get("checkpoint_files"), call["load_config"]
        places = {str(place) for place in (config.device_map or {}).values()}
        if len(places) > 1 or "disk" in places:
            raise ConfigError(
                f"device_map places the model on {sorted(places)}, and zero.Init shards it over the ranks: leave device_map "
                "out, or name one device"
            )
        answer: Any
        if call.get("state_dict") is None and files and _readable(model, files, config):
            answer = _load(init, model, files, config), None
        else:
            answer = stock(*args, **kwargs)
        init.align_random_states()  # next, missing weights are initialized
        return answer

    def move(model: Any, missing_keys: Iterable[str], *args: Any, **kwargs: Any) -> None:
        stock_move(model, _SortedSet(missing_keys), *args, **kwargs)

    def initialize(model: Any, *args: Any, **kwargs: Any) -> None:
        missing = {
            name: param
            for name, param in model.named_parameters()
            if param.is_floating_point() and not param.is_meta and not getattr(param, "_is_hf_initialized", False)
        }
        with torch.no_grad():
            for param in missing.values():
                param.fill_(torch.nan)
        stock_initialize(model, *args, **kwargs)
        _check_initialized(init.wire, model, missing)

    def finish(model: Any, *args: Any, **kwargs: Any) -> Any:
        info = finalize(model, *args, **kwargs)
        _refuse_uninitialized(
            model, [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
        )
        return info

    return patched(
        [
            (PreTrainedModel, "_load_pretrained_model", staticmethod(load)),
            (PreTrainedModel, "_finalize_model_loading", staticmethod(finish)),
            (PreTrainedModel, "_initialize_missing_keys", initialize),
            (PreTrainedModel, "_move_missing_keys_from_meta_to_device", move),
        ]
    )


class _SortedSet(set[str]):
    """A set with sorted iteration: the order of a plain set differs between processes, and ranks must register alike."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def __sub__(self, others: AbstractSet[Any]) -> _SortedSet:
        return _SortedSet(super().__sub__(set(others)))


def _check_initialized(wire: Wire, model: Any, missing: Mapping[str, nn.Parameter]) -> None:
    """Raise if a missing parameter is still NaN after the model's own code initialized it."""
    mine = []
    for param in missing.values():
        deferred = deferred_of(param)
        values = param.detach() if deferred is None else deferred.slice_of(param)
        mine.append(bool(values.isnan().all()))
    everyone = zip(*wire.exchange(mine)) if mine else ()
    _refuse_uninitialized(
        model, [name for name, untouched in zip(missing, everyone) if all(untouched) and missing[name].numel()]
    )


def _refuse_uninitialized(model: Any, names: Sequence[str]) -> None:
    if names:
        raise LayoutError(
            f"{type(model).__name__}: {names[0]!r} (first of {len(names)}) has no values after from_pretrained: the files do "
            "not have it, and the model's _init_weights does not initialise it. Add it to either"
        )


def _readable(model: PreTrainedModel, files: Sequence[str], config: Any) -> bool:
    """Return whether the files are safetensors and the model's parameters plain."""
    return (
        all(str(file).endswith(".safetensors") for file in files)
        and config.hf_quantizer is None
        and all(type(param) is nn.Parameter for param in model.parameters())
    )


def _load(init: Init, model: Any, files: Sequence[str], config: Any) -> Any:
    what = f"from_pretrained of {type(model).__name__}"

    stamps: dict[Path, Stamp] = {}
    stored: dict[str, StoredTensor] = {}
    with torch.no_grad(), on_all_ranks(init.wire, what) as report:
        for path in (Path(file).absolute() for file in files):
            stamps[path] = Stamp.of(path)
            header = read_header(path)
            init.bytes_read += header.header_bytes
            stored.update(header.tensors)
        planned = planned_load(model, stored, config, place=True)
        report.local = sample_digest(stored) if init.wire.size > 1 else ""
    check_same_files(report.by_rank, f"{what} ({files[0]})")
    with torch.no_grad():
        wrong = {item[0] for item in planned.info.mismatched_keys}
        filling = _Filling(init.wire, model, stored, config.device_map, stamps if init.leaves_at_rest else None)
        try:
            with on_all_ranks(init.wire, what):
                filling.read(planned, wrong)
        finally:
            init.bytes_read += filling.reader.bytes_read
        _tie(init.wire, model, planned, what)
    return planned.info


class _Filling:
    """Replace the meta tensors of a planned load by deferred parameters, and by buffers with values.

    Args:
        stamps: of the files whose weights stay on disk where possible; None: read everything.
    """

    def __init__(
        self,
        wire: Wire,
        model: Any,
        stored: Mapping[str, StoredTensor],
        device_map: Any,
        stamps: Mapping[Path, Stamp] | None,
    ) -> None:
        self._wire, self._model, self._stored = wire, model, stored
        self._device_map = device_map or {"": "cpu"}
        self._stamps = stamps
        self._own: dict[str, Tensor] = {}
        self._origins: dict[str, OnDisk] = {}
        self.reader = RangeReader(Path(), None)
        self._meter = Meter()

    def read(self, planned: PlannedLoad, wrong: set[str]) -> None:
        """Read without communication. Skips names in `wrong`, whose shapes do not fit."""
        wanted: list[NamedPiece] = []
        places: dict[str, list[Extent[StoredTensor]]] = {}
        computed: dict[str, Tensor] = {}
        for name, result in planned.results.items():
            if name in wrong:
                continue
            pieces = planned.conversions.pieces(result)
            if pieces is None:
                computed[name] = result
                continue
            places[name] = [Extent(self._stored[p.source], p.source_start, p.start, p.numel) for p in pieces]
            origin = self._origin(name, result, places[name])
            if origin is not None:
                self._origins[name] = origin
            else:
                wanted.append(self._allocate(name, result))
        self.reader.read(ranges_of(wanted, places))
        for conversion in dict.fromkeys(planned.conversions.computed(computed).values()):
            values = {key: self.reader.read_tensor(self._stored[key]) for key in conversion.sources}
            for name, value in conversion.convert(values).items():
                _, piece = self._allocate(name, computed[name])
                piece.source.copy_(value.reshape(-1)[piece.as_slice])
        self.reader.close()
        for name in (*self._own, *self._origins):
            self._set_value(name, planned.results[name])

    def _origin(self, name: str, meta: Tensor, places: Sequence[Extent[StoredTensor]]) -> OnDisk | None:
        """Return a parameter's elements in the files; None if they must be read now."""
        if self._stamps is None or not places or not self._is_parameter(name):
            return None
        if any(dtype_of(item.source.dtype) != meta.dtype for item in places):
            return None
        size, parts = meta.element_size(), []
        for item in places:
            stored = item.source
            offset, stamp = stored.start + item.source_start * size, self._stamps[stored.file]
            source = FileSource(stored.file, offset, meta.dtype, item.numel, self._meter, stamp)
            parts.append((item.start, OnDisk(source)))
        if len(parts) == 1:
            return parts[0][1]
        return OnDisk(JoinedSource(meta.numel(), meta.dtype, parts, self._meter))

    def _device_of(self, name: str) -> torch.device:
        return torch.device(get_device(self._device_map, name, valid_torch_device=True))

    def _allocate(self, name: str, meta: Tensor) -> NamedPiece:
        """Return 1-D memory for this rank's elements of a parameter or buffer, and which elements these are."""
        numel = meta.numel()
        low, high = slice_bounds(numel, self._wire.rank, self._wire.size) if self._is_parameter(name) else (0, numel)
        own = self._own[name] = torch.empty(high - low, dtype=meta.dtype, device=self._device_of(name))
        return name, Extent(own, 0, low, high - low)

    def _is_parameter(self, name: str) -> bool:
        path, _, last = name.rpartition(".")
        return last in self._model.get_submodule(path)._parameters

    def _set_value(self, name: str, meta: Tensor) -> None:
        path, _, last = name.rpartition(".")
        module = self._model.get_submodule(path)
        if last == EXTRA_STATE:
            module.set_extra_state(self._own[name].view(meta.shape))
            return
        value: Any
        if last not in module._parameters:
            value = self._own[name].view(meta.shape)
        else:
            own, origin = self._own.get(name), self._origins.get(name)
            device = None if origin is None else self._device_of(name)
            deferred = Deferred(self._wire, own, device=device, files=origin)
            value = closed_parameter(deferred, meta.shape, meta.dtype, module._parameters[last].requires_grad)
        value._is_hf_initialized = True  # keeps transformers from initializing it again
        setattr(module, last, value)


def _tie(wire: Wire, model: Any, planned: PlannedLoad, what: str) -> None:
    """Tie parameters that the files hold under both names if they are equal, as the stock loader does.

    The stock loader would compare full values. If all slices are equal, one name is reported to it as missing; else it
    compares, warns and leaves them untied.
    """
    info = planned.info
    wrong = {item[0] for item in info.mismatched_keys}
    pairs = [
        (target, source)
        for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        if {target, source} <= planned.results.keys() - wrong
    ]
    if not pairs:
        return
    with on_all_ranks(wire, what) as report:
        report.local = [_equal_slices(model.get_parameter(one), model.get_parameter(other)) for one, other in pairs]
    for (target, source), answers in zip(pairs, zip(*report.by_rank)):
        if all(answers):
            path, _, last = target.rpartition(".")
            setattr(model.get_submodule(path), last, model.get_parameter(source))
            info.missing_keys.add(target)


def _equal_slices(one: nn.Parameter, other: nn.Parameter) -> bool:
    first, second = deferred_of(one), deferred_of(other)
    if one.shape != other.shape or first is None or second is None:
        return False
    return torch.equal(first.values(), second.values())
