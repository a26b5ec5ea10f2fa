"""Methods of transformers and PEFT models that a sharded instance needs to do a little differently.

Apart from what knows the Trainer, which brings datasets, pandas and PEFT with it: a plain loop needs none of them.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from functools import partial
from types import MethodType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..runtime.engine import Engine, engine_of


def adopt_model(model: nn.Module, engine: Engine) -> None:
    """Methods of transformers and PEFT models that a sharded instance needs to do a little differently."""
    specs = [slot.spec for unit in engine.layout.units for span in unit.spans for slot in span.slots]
    if engine.world_size > 1 and (not engine.config.policy.keep_full or engine.buffers.watched):
        for module in model.modules():
            if callable(getattr(type(module), "generate", None)):
                module.__dict__["generate"] = MethodType(partial(_generate, weakref.ref(model)), module)
    if any(spec.compute_dtype != spec.dtype for spec in specs):
        names = dict(model.named_parameters(remove_duplicate=False))
        own = {names[spec.name]: getattr(torch, spec.dtype) for spec in specs}
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                types = [own.get(param, param.dtype) for param in module.parameters()]
                module.__dict__["save_pretrained"] = MethodType(partial(_save_in_own_types, types), module)
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            model.__dict__["load_adapter"] = MethodType(_load_adapter_in_place, model)


def _generate(root: weakref.ref[nn.Module], self: Any, *args: Any, **kwargs: Any) -> Any:
    """As of a model that is not wrapped in DDP, which has no `generate`: buffers are each rank's own.

    At stage 3 a rank that stops generating early would leave the others waiting for its parts of the parameters.
    """
    model = root()
    engine = None if model is None else engine_of(model)
    if engine is None:
        return type(self).generate(self, *args, **kwargs)
    if not engine.config.policy.keep_full:
        kwargs["synced_gpus"] = True  # also where Seq2SeqTrainer passes the False that is right for unsharded models
    with engine.buffers.apart():
        return type(self).generate(self, *args, **kwargs)


def _save_in_own_types(types: list[torch.dtype], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """config.json's `dtype` is the first parameter's, which may be bfloat16 just now; the file holds its own type."""
    typed = [torch.empty(param.shape, dtype=dtype, device="meta") for param, dtype in zip(self.parameters(), types)]
    before = {name: value for name, value in self.__dict__.items() if name == "parameters"}
    self.__dict__["parameters"] = lambda recurse=True: iter(typed)
    try:
        return type(self).save_pretrained(self, *args, **kwargs)
    finally:
        del self.__dict__["parameters"]
        self.__dict__.update(before)


def _load_adapter_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT casts an adapter after loading by replacing its parameters; the engine would lose sight of them."""
    method = type(self).load_adapter
    call = inspect.signature(method).bind(self, *args, **kwargs)
    name = call.arguments["adapter_name"]
    if name in self.peft_config:
        call.arguments["autocast_adapter_dtype"] = False
    elif call.arguments.get("is_trainable", False):
        raise ConfigError(f"adapter {name!r} is new and to be trained: add it before the model is sharded")
    return method(*call.args, **call.kwargs)


def empty_model(name_or_path: str) -> nn.Module:
    """The architecture of a Hub id or local folder on the meta device: names, shapes and ties, no weights are read."""
    config = transformers.AutoConfig.from_pretrained(name_or_path)
    for kind in config.architectures or []:
        cls = getattr(transformers, kind, None)
        if cls is not None:
            with torch.device("meta"):
                return cls(config)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)
