"""Run code that saves a model on meta tensors, and record which safetensors files it would write.

`save_pretrained` of transformers and PEFT and the Trainer's `_save` decide names, files and splits. They run on one rank with
meta tensors; `Conversions` reports which parameters each tensor is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..checkpoint.weights import Conversion, Drawing, Entry, WeightFile, names_of
from ..core.precision import dtype_name
from ..errors import CheckpointError
from .converters import Conversions
from .stock import Attributes, is_pretrained, own_types, replaced, serving

_WRITERS = ("safetensors.torch", "transformers.modeling_utils", "peft.peft_model")
"""Modules that import the safetensors writer."""

_SHARING = (
    ("peft.peft_model", "id_tensor_storage"),
    ("huggingface_hub.serialization._torch", "get_torch_storage_id"),
)
"""Functions that compare addresses to find tensors with shared memory; meta tensors have none."""


@dataclass
class Record:
    """The safetensors files that code would have written."""

    conversions: Conversions = field(default_factory=Conversions)
    files: list[tuple[Path, dict[str, Tensor], dict[str, str]]] = field(default_factory=list)

    def save_file(
        self, tensors: Mapping[str, Tensor], filename: Any, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Stand in for `safetensors.torch.save_file`."""
        self.files.append((Path(filename), dict(tensors), dict(metadata or {})))

    def unknown(self) -> list[str]:
        """Return the keys whose tensors were computed by code other than transformers' weight converters."""
        return [
            key
            for _, tensors, _ in self.files
            for key, tensor in tensors.items()
            if tensor.is_meta and tensor.numel() and not self.conversions.is_known(tensor)
        ]

    def drawing(self, folder: str | Path, compute: Compute | None = None) -> Drawing:
        """Return what was recorded, with file names relative to `folder`.

        Args:
            compute: returns the conversion that computes the values of `unknown` keys.

        Raises:
            CheckpointError: no file was written, a file is outside `folder`, a value is computed by code that
                cannot run on shards, or two files have different values under one key.
        """
        if not self.files:
            raise CheckpointError(
                f"the model's own code wrote no safetensors to {folder}; hf_zero saves no other format"
            )
        others = self.unknown()
        if others and compute is None:
            raise CheckpointError(
                f"the model's own save_pretrained computes {others[0]!r} (first of {len(others)}) from the weights, which "
                "hf_zero cannot do from shards. Save with Trainer.save_model or accelerator.save_model, or inside "
                "`with zero.unsharded(model):`"
            )
        files: list[WeightFile] = []
        values: dict[str, Tensor] = {}
        computed: dict[str, Tensor] = {}
        for path, tensors, metadata in self.files:
            entries = []
            for key, tensor in tensors.items():
                runs = tuple(self.conversions.pieces(tensor) or ()) if tensor.is_meta else ()
                entries.append(Entry(key, dtype_name(tensor.dtype), tuple(tensor.shape), runs))
                if runs:
                    continue
                other = values.get(key, computed.get(key))
                if other is not None and other is not tensor:
                    raise CheckpointError(f"two files have different values under {key!r}: save them to two folders")
                if not tensor.is_meta:
                    values[key] = tensor.detach().cpu()
                elif not tensor.numel():
                    values[key] = torch.empty_like(tensor, device="cpu")
                else:
                    computed[key] = tensor
            files.append(WeightFile(_inside(folder, path), tuple(entries), metadata))
        known = {key: tensor for key, tensor in computed.items() if key not in others}
        conversions = self.conversions.computed(known)
        if others and compute is not None:
            conversions.append(compute(others))
        return Drawing(tuple(files), values, tuple(conversions))


Compute = Callable[[list[str]], Conversion]


@contextmanager
def recording(model: nn.Module, state: Mapping[str, Any]) -> Iterator[Record]:
    """Record the safetensors files that code inside writes of `state`; they are not written.

    Other files (config, index, tokenizer) are written. Not safe from two threads at once.

    Args:
        state: see `WeightFormat.draw`. `state_dict()` of the model and its modules returns it, because that of a
            sharded model is a collective.
    """
    names, record = names_of(model), Record()
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            record.conversions.source(names.get(key, key), value)
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    others = [*_writers(model, record), *serving(model, state), *own_types(model, dtypes), *_own_adapters(model, state)]
    others.append((Tensor, "cpu", _keep_meta(Tensor.cpu)))
    with replaced(others), record.conversions.recording():
        yield record


def _writers(model: nn.Module, record: Record) -> Attributes:
    """For `replaced`: put `record.save_file` wherever this code may find the safetensors writer."""
    out: Attributes = []
    modules = {*_WRITERS, *(type(module).__module__ for module in model.modules() if is_pretrained(module))}
    for module in [sys.modules[name] for name in modules if name in sys.modules]:
        for name, value in vars(module).items():
            if value is safetensors.torch.save_file:
                out.append((module, name, record.save_file))
    for module_name, name in _SHARING:
        stock = getattr(sys.modules.get(module_name), name, None)
        if stock is not None:
            out.append((sys.modules[module_name], name, _storage_id(stock)))
    return out


def _storage_id(stock: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def storage_id(tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return stock(tensor)
        return tensor.device, tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()

    return storage_id


def _keep_meta(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.is_meta else stock(tensor, *args, **kwargs)

    return cpu


def _own_adapters(model: nn.Module, state: Mapping[str, Any]) -> Attributes:
    """For `replaced`: let PEFT save without a gather.

    Prompt learning saves what its encoder computes: it reads `state`, without the module's hooks. A model with
    adapters of its own (`add_adapter`) looks up shared tensors under their names in the file.
    """
    out: Attributes = []
    for name, module in model.named_modules():
        if name.startswith("prompt_encoder."):
            params = {key: state.get(f"{name}.{key}", param) for key, param in module._parameters.items()}
            out += [(module, "_parameters", params), (module, "_forward_hooks", {}), (module, "_forward_pre_hooks", {})]
    if getattr(model, "_hf_peft_config_loaded", False):
        out.append((model, "get_parameter_or_buffer", _lookup_adapters(model)))
    return out


def _lookup_adapters(model: Any) -> Callable[[str], Any]:
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
        raise CheckpointError(f"the model's own code writes {path}, which is outside {folder}") from None
