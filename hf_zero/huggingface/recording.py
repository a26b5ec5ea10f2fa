"""Let stock code save a sharded model: it runs on stand-ins on one rank, and what it would write is noted instead.

Around `save_pretrained` of transformers and PEFT, the Trainer's `_save`, accelerate's `save_model`, a model's own code:
none of it is repeated or changed here. Attributes of modules and instances are others for the length of one call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..checkpoint.weights import Conversion, Drawing, Entry, WeightFile, names_of, persistent_buffers
from ..errors import CheckpointError
from .placement import Trace
from .serving import own_attribute, serving

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
                runs = tuple((self.trace.segments(tensor) if tensor.is_meta else None) or ())
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
        conversions = tuple(Conversion(r.sources, r.targets, r.convert) for r in self.trace.replays(computed))
        return Drawing(tuple(files), values, conversions)


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
    with swapped(_stand_ins(model, record)), serving(model, state), _own_types(model, state), trace:
        with _own_adapters(model, state):
            yield record


def _stand_ins(model: nn.Module, record: Record) -> list[tuple[Any, str, Any]]:
    """`record.save_file` wherever this code could look for the safetensors writer."""
    out: list[tuple[Any, str, Any]] = []
    modules = {
        *_WRITERS,
        *(type(module).__module__ for module in model.modules() if _is_stock(module)),
    }
    for module in [sys.modules[name] for name in modules if name in sys.modules]:
        for name, value in vars(module).items():
            if value is safetensors.torch.save_file:
                out.append((module, name, record.save_file))
    for module_name, name in _SHARING:
        stock = getattr(sys.modules.get(module_name), name, None)
        if stock is not None:
            out.append((sys.modules[module_name], name, _telling(stock)))
    return out


def _is_stock(module: nn.Module) -> bool:
    """A `PreTrainedModel`. transformers is not imported for it: where it is not, there is none."""
    known = sys.modules.get("transformers.modeling_utils")
    return known is not None and isinstance(module, known.PreTrainedModel)


@contextmanager
def swapped(stand_ins: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of modules or classes are others inside."""
    before = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _telling(stock: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def tell(tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return stock(tensor)
        return tensor.device, tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()

    return tell


@contextmanager
def _own_types(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """config.json's `dtype` is that of a model's first parameter, which may be gathered in another type just now."""
    prefixes = {module: name for name, module in model.named_modules() if _is_stock(module)}
    with ExitStack() as stack:
        for module, name in prefixes.items():
            inside = f"{name}." if name else ""
            shown = [_typed(param, state.get(inside + key, param).dtype) for key, param in module.named_parameters()]
            stack.enter_context(own_attribute(module, "parameters", _giving(shown)))
        yield


@contextmanager
def _own_adapters(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Prompt learning saves what its encoder computes: from `state`, and without the hooks that would gather.

    And a model with adapters of its own looks up what it shares under the names that these have in a file.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.startswith("prompt_encoder."):
                params = {key: state.get(f"{name}.{key}", param) for key, param in module._parameters.items()}
                for attribute, value in (("_parameters", params), ("_forward_hooks", {}), ("_forward_pre_hooks", {})):
                    stack.enter_context(own_attribute(module, attribute, value))
        if getattr(model, "_hf_peft_config_loaded", False):
            stack.enter_context(own_attribute(model, "get_parameter_or_buffer", _telling_adapters(model)))
        yield


def _telling_adapters(model: Any) -> Callable[[str], Any]:
    unknown: dict[str, object] = {}

    def get(target: str) -> Any:
        try:
            return type(model).get_parameter_or_buffer(model, target)
        except AttributeError:
            return unknown.setdefault(target, object())

    return get


def _typed(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Something that looks like `param` in another type, without memory."""
    return param if param.dtype == dtype else torch.empty((), dtype=dtype, device=param.device).expand(param.shape)


def _giving(values: Sequence[Any]) -> Callable[..., Iterator[Any]]:
    return lambda recurse=True: iter(values)


def _inside(folder: str | Path, path: Path) -> str:
    try:
        return path.absolute().relative_to(Path(folder).absolute()).as_posix()
    except ValueError:
        raise CheckpointError(f"the model's own code saves to {path}, which is not in {folder}") from None


def stand_in_state(model: nn.Module) -> dict[str, Tensor]:
    """Like `model.state_dict()`, all of it on the meta device and without communication."""
    values = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model).items())
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in values}


__all__ = ["Record", "recording", "stand_in_state", "swapped"]
