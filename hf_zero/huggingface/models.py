"""Replace methods of transformers and PEFT models on a sharded model.

This file must not import the Trainer, which imports datasets, pandas and PEFT: a plain loop needs none of them.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..core.patching import patched
from ..errors import ConfigError, needs
from ..params.engine import Engine
from ..params.gathered import unsharded
from ..plan.shapes import Config
from .patches import patched_dtypes


def adopt_model(model: nn.Module, engine: Engine) -> None:
    """Replace methods on the instances of a model that an Accelerator has sharded."""
    specs = [slot.spec for unit in engine.layout.units for span in unit.spans for slot in span.slots]
    root = weakref.ref(model)
    if any(spec.compute_dtype != spec.dtype for spec in specs):
        own = {spec.name: getattr(torch, spec.dtype) for spec in specs}
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.__dict__["save_pretrained"] = MethodType(partial(_save_in_own_types, root, own), module)
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            model.__dict__["load_adapter"] = MethodType(_load_adapter_in_place, model)
            for module in model.modules():
                for name in _WRITE_WHOLE_WEIGHTS:
                    method = getattr(type(module), name, None)
                    if callable(method):
                        module.__dict__[name] = MethodType(partial(_unsharded, root, method), module)


_WRITE_WHOLE_WEIGHTS = ("merge_and_unload", "merge_adapter", "unmerge_adapter")
"""Methods of PEFT's tuners that read and write full weights."""


def _unsharded(root: weakref.ref[nn.Module], method: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run `method` on the unsharded model and keep what it writes. A collective."""
    model = root()
    with nullcontext() if model is None else unsharded(model):
        return method(self, *args, **kwargs)


def _save_in_own_types(
    root: weakref.ref[nn.Module], dtypes: Mapping[str, torch.dtype], self: PreTrainedModel, *args: Any, **kwargs: Any
) -> Any:
    """Save with the file's dtype in config.json: the first parameter may be gathered in bfloat16 now."""
    model = root()
    shown: AbstractContextManager[None] = nullcontext() if model is None else patched(patched_dtypes(model, dtypes))
    with shown:
        return type(self).save_pretrained(self, *args, **kwargs)


def _load_adapter_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter without PEFT's cast, which replaces parameters that the engine must keep."""
    method = type(self).load_adapter
    call = inspect.signature(method).bind(self, *args, **kwargs)
    name = call.arguments["adapter_name"]
    if name in self.peft_config:
        call.arguments["autocast_adapter_dtype"] = False
    elif call.arguments.get("is_trainable", False):
        raise ConfigError(f"adapter {name!r} is new and to be trained: add it before the model is sharded")
    return method(*call.args, **call.kwargs)


def empty_model(what: Path | Config) -> nn.Module:
    """Build the model of a configuration, or of a folder or file with one, on the meta device, without weights.

    Its dtype is that of the configuration, as with `from_pretrained`.
    """
    config: Any
    if isinstance(what, Path):
        # Without False transformers asks the terminal whether to run code of the folder.
        config = transformers.AutoConfig.from_pretrained(str(what.absolute()), trust_remote_code=False)
    else:
        config = transformers.AutoConfig.for_model(what.kind, **what.settings, architectures=[what.architecture])
    for kind in config.architectures or []:
        cls = getattr(transformers, kind, None)
        if cls is not None:
            with torch.device("meta"):
                return cls._from_config(config)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config, trust_remote_code=False)


def empty_adapter(folder: str, base: nn.Module) -> nn.Module:
    """Add the PEFT adapter that a folder configures to a model on the meta device, without weights.

    Raises:
        ConfigError: PEFT is missing.
    """
    with needs("examples"):
        from peft import PeftConfig, get_peft_model
    config: Any = PeftConfig.from_pretrained(folder)
    config.inference_mode = False  # with trainable parameters
    if isinstance(getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = True  # other methods read the base's values
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about training
        model: nn.Module = get_peft_model(base, config)
    return model
