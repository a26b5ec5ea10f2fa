"""Stock code that saves or loads a model, run without values: what it would write.

Around `save_pretrained` of transformers and PEFT, the Trainer's `_save`, accelerate's `save_model`, transformers' loader, a
model's own code: none of it is repeated or changed here. It runs on meta tensors, whose elements a `trace.Trace` follows, and
attributes of modules, classes and instances are others for the length of one call.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..checkpoint.weights import Drawing, Entry, WeightFile, names_of, persistent_buffers
from ..core.precision import dtype_name
from ..errors import CheckpointError
from .trace import Trace

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer, TrainerCallback

    AcceleratorBase = Accelerator
    TrainerBase = Trainer
    CallbackBase = TrainerCallback
else:
    AcceleratorBase = TrainerBase = CallbackBase = object
"""What a class that is put in front of another (`put_in_front`) has for its base where types are checked."""

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
            shown: list[Tensor] = []
            for key, param in module.named_parameters():
                dtype = dtypes.get(first[inside + key], param.dtype)
                is_own = param.dtype == dtype  # else what looks like it, without memory
                shown.append(param if is_own else torch.empty((), dtype=dtype, device=param.device).expand(param.shape))
            out.append((module, "parameters", lambda recurse=True, shown=shown: iter(shown)))
    return out


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
                entries.append(Entry(key, dtype_name(tensor.dtype), tuple(tensor.shape), runs))
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
