"""Stock code that saves or loads a model, run without values: what it would write, and which elements that is made of.

Around `save_pretrained` of transformers and PEFT, the Trainer's `_save`, accelerate's `save_model`, transformers' loader, a
model's own code: none of it is repeated or changed here. It runs on meta tensors, and attributes of modules, classes and
instances are others for the length of one call.

A `Trace` follows the elements of these meta tensors. Code that only moves them about (views, clones, cat, stack) leaves results
whose elements are runs of the sources; whatever else it did is kept as a tape of operations, to be played again with real
values. So code that renames, merges, splits or computes weights is used as it is, and never copied.
"""

from __future__ import annotations

import itertools
import math
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..checkpoint.weights import Conversion, Drawing, Entry, WeightFile, names_of, persistent_buffers
from ..core.layout import Extent
from ..errors import CheckpointError

# Attributes that are others for a while ------------------------------------------------------------------------------

_ABSENT = object()


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, each (owner, name, value) holds: of a module or class, or of one instance and of no other of its class."""
    before = []
    try:
        for owner, name, value in attributes:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            _set(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _ABSENT:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = value  # not setattr: nn.Module sorts what it is given into registries


Attributes = list[tuple[Any, str, Any]]


def serving(model: nn.Module, state: Mapping[str, Any]) -> Attributes:
    """For `replaced`: `state_dict()` of the model and of its parts answers from `state`, so that one rank alone may write.

    Of a sharded model it is a collective, and library code between here and the file calls it on the writer only.
    """
    return [
        (module, "state_dict", _server(state, f"{name}." if name else "")) for name, module in model.named_modules()
    ]


def _server(state: Mapping[str, Any], inside: str) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        answer: dict[str, Any] = OrderedDict() if destination is None else destination
        answer.update({prefix + key[len(inside) :]: value for key, value in state.items() if key.startswith(inside)})
        return answer

    return state_dict


def own_types(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Attributes:
    """For `replaced`: config.json's `dtype` is the first parameter's, which may be gathered in another type just now.

    Args:
        dtypes: of the file, by the parameter's first name in `model`; the others are shown as they are.
    """
    first, out = names_of(model), Attributes()
    for name, module in model.named_modules():
        if _is_stock(module):
            inside = f"{name}." if name else ""
            shown = [_typed(p, dtypes.get(first[inside + key], p.dtype)) for key, p in module.named_parameters()]
            out.append((module, "parameters", _giving(shown)))
    return out


def _typed(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Something that looks like `param` in another type, without memory."""
    return param if param.dtype == dtype else torch.empty((), dtype=dtype, device=param.device).expand(param.shape)


def _giving(values: Sequence[Any]) -> Callable[..., Iterator[Any]]:
    return lambda recurse=True: iter(values)


def _is_stock(module: nn.Module) -> bool:
    """A `PreTrainedModel`. transformers is not imported for it: where it is not, there is none."""
    known = sys.modules.get("transformers.modeling_utils")
    return known is not None and isinstance(module, known.PreTrainedModel)


def put_in_front(mixin: type[Any], cls: type[Any]) -> type[Any]:
    """The subclass `Zero<cls>` of `mixin` and `cls`, one for each pair; `cls` itself where it has the mixin."""
    if issubclass(cls, mixin):
        return cls
    for made in mixin.__subclasses__():
        if made.__bases__ == (mixin, cls) and "_zero_is_made" in vars(made):  # not one that a user has written
            return made
    return type(f"Zero{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__, "_zero_is_made": True})


# What a save would write ---------------------------------------------------------------------------------------------

_WRITERS = ("safetensors.torch", "transformers.modeling_utils", "peft.peft_model", "accelerate.utils.other")
"""Modules that hold the safetensors writer under a name of their own."""

_SHARING = (
    ("accelerate.utils.other", "id_tensor_storage"),
    ("peft.peft_model", "id_tensor_storage"),
    ("huggingface_hub.serialization._torch", "get_torch_storage_id"),
)
"""Functions that tell which tensors share memory, by addresses: on the meta device there are none."""


@dataclass
class Record:
    """The safetensors files that code would have written."""

    trace: Trace
    files: list[tuple[Path, dict[str, Tensor], dict[str, str]]] = field(default_factory=list)

    def save_file(
        self, tensors: Mapping[str, Tensor], filename: Any, metadata: Mapping[str, str] | None = None
    ) -> None:
        """In the place of `safetensors.torch.save_file`."""
        self.files.append((Path(filename), dict(tensors), dict(metadata or {})))

    def drawing(self, folder: str | Path) -> Drawing:
        """What was noted, with file names relative to `folder`.

        Raises:
            CheckpointError: no file at all, a file outside of the folder, two files with different values under one key.
        """
        if not self.files:
            raise CheckpointError(
                f"the model's own code saved no safetensors to {folder}: hf_zero can save no other format"
            )
        files: list[WeightFile] = []
        values: dict[str, Tensor] = {}
        computed: dict[str, Tensor] = {}
        for path, tensors, metadata in self.files:
            entries = []
            for key, tensor in tensors.items():
                runs = tuple((self.trace.pieces(tensor) if tensor.is_meta else None) or ())
                entries.append(Entry(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), runs))
                if not runs:
                    other = values.get(key, computed.get(key))
                    if other is not None and other is not tensor:
                        raise CheckpointError(f"two files have values of their own under {key!r}: save them apart")
                    if tensor.is_meta and tensor.numel():
                        computed[key] = tensor
                    else:
                        values[key] = (
                            torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()
                        )
            files.append(WeightFile(_inside(folder, path), tuple(entries), metadata))
        return Drawing(tuple(files), values, tuple(self.trace.conversions(computed)))


@contextmanager
def recording(model: nn.Module, state: Mapping[str, Any]) -> Iterator[Record]:
    """Inside, stock code may save `state` as safetensors on this rank: the files are noted, not written.

    Whatever else it writes (config, index, tokenizer) it does write. Works around the code of transformers, PEFT, accelerate
    and a model's own remote code; not from two threads at once.

    Args:
        state: as `WeightFormat.draw` takes it. `state_dict()` of the model and of its parts answers from it: of a sharded
            model it would be a collective.
    """
    names, trace = names_of(model), Trace()
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            trace.source(names.get(key, key), value)
    record = Record(trace)
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    others = [*_writers(model, record), *serving(model, state), *own_types(model, dtypes), *_own_adapters(model, state)]
    with replaced(others), trace:
        yield record


def _writers(model: nn.Module, record: Record) -> Attributes:
    """`record.save_file` wherever this code could look for the safetensors writer."""
    out: Attributes = []
    modules = {*_WRITERS, *(type(module).__module__ for module in model.modules() if _is_stock(module))}
    for module in [sys.modules[name] for name in modules if name in sys.modules]:
        for name, value in vars(module).items():
            if value is safetensors.torch.save_file:
                out.append((module, name, record.save_file))
    for module_name, name in _SHARING:
        stock = getattr(sys.modules.get(module_name), name, None)
        if stock is not None:
            out.append((sys.modules[module_name], name, _telling(stock)))
    return out


def _telling(stock: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def tell(tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return stock(tensor)
        return tensor.device, tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()

    return tell


def _own_adapters(model: nn.Module, state: Mapping[str, Any]) -> Attributes:
    """Prompt learning saves what its encoder computes: from `state`, and without the hooks that would gather.

    And a model with adapters of its own looks up what it shares under the names that these have in a file.
    """
    out: Attributes = []
    for name, module in model.named_modules():
        if name.startswith("prompt_encoder."):
            params = {key: state.get(f"{name}.{key}", param) for key, param in module._parameters.items()}
            out += [(module, "_parameters", params), (module, "_forward_hooks", {}), (module, "_forward_pre_hooks", {})]
    if getattr(model, "_hf_peft_config_loaded", False):
        out.append((model, "get_parameter_or_buffer", _telling_adapters(model)))
    return out


def _telling_adapters(model: Any) -> Callable[[str], Any]:
    unknown: dict[str, object] = {}

    def get(target: str) -> Any:
        try:
            return type(model).get_parameter_or_buffer(model, target)
        except AttributeError:
            return unknown.setdefault(target, object())

    return get


def _inside(folder: str | Path, path: Path) -> str:
    try:
        return path.absolute().relative_to(Path(folder).absolute()).as_posix()
    except ValueError:
        raise CheckpointError(f"the model's own code saves to {path}, which is not in {folder}") from None


def stand_in_state(model: nn.Module) -> dict[str, Tensor]:
    """Like `model.state_dict()`, all of it on the meta device and without communication."""
    values = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model).items())
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in values}


# Which elements of which source ended up where -----------------------------------------------------------------------

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
        self._paused = False

    def stand_in(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new source."""
        self._paused = True
        try:
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        finally:
            self._paused = False
        self.source(name, tensor)
        return tensor

    def source(self, name: str, tensor: Tensor) -> None:
        """`tensor`, contiguous on the meta device and the only one of its storage, is called `name` from now on."""
        key = _storage(tensor)
        if key not in self._contents:
            self._contents[key] = _Content(tensor, name, [Extent(name, 0, 0, tensor.numel())])

    def pieces(self, tensor: Tensor) -> list[Extent[str]] | None:
        """`tensor`'s elements in row-major order, without gaps; None if they are not all moved ones."""
        found = self._lines(tensor, _row_major(tensor.shape))
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
            out.append(Conversion(tuple(sources), tuple(wanted), _Player(sources, tape, wanted)))
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
        if self._paused:
            return out
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


class _Player:
    """Plays a tape with real values in place of the sources."""

    def __init__(self, sources: dict[str, Tensor], tape: list[_Operation], results: dict[str, Tensor]) -> None:
        self._sources, self._tape, self._results = sources, tape, results

    def __call__(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results, contiguous CPU tensors, from the sources' values in any type."""
        flats = {
            _storage(stand_in): values[name].to(device="cpu", dtype=stand_in.dtype).reshape(-1)
            for name, stand_in in self._sources.items()
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
            for step in self._tape:
                out = step.func(*tree_map(real, step.args), **tree_map(real, step.kwargs))
                for stand_in, value in zip(tree_leaves(step.out), tree_leaves(out)):
                    if isinstance(stand_in, Tensor) and _storage(stand_in) not in step.reads:
                        flats[_storage(stand_in)] = _as_stored(value, stand_in)
            return {name: real(stand_in).contiguous() for name, stand_in in self._results.items()}


def _as_stored(value: Tensor, stand_in: Tensor) -> Tensor:
    """`value` as the 1-D content of a storage like that of `stand_in`: kernels may choose other strides on the CPU."""
    numel = stand_in.untyped_storage().nbytes() // stand_in.element_size()
    if value.is_contiguous() and stand_in.is_contiguous() and numel == value.numel():
        return value.reshape(-1)
    flat = torch.empty(numel, dtype=value.dtype)
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


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


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


__all__ = [
    "Attributes",
    "Record",
    "Trace",
    "own_types",
    "put_in_front",
    "recording",
    "replaced",
    "serving",
    "stand_in_state",
]
