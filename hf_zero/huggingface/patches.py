"""Temporarily replace attributes of transformers, accelerate and PEFT objects.

docs/DESIGN.md, "What is replaced in other libraries", lists every name that is passed to `replaced`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor, nn

from ..checkpoint.weights import names_of, persistent_buffers
from ..core.patching import Attributes

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

    AcceleratorBase = Accelerator
    TrainerBase = Trainer
else:
    AcceleratorBase = TrainerBase = object
"""Bases of mixins (`with_mixin`) for type checkers only."""


def patched_state_dict(model: nn.Module, state: Mapping[str, Any]) -> Attributes:
    """Return patches, for `replaced`, that make `state_dict()` of the model and its modules return `state`.

    `state_dict()` of a sharded model is a collective, and library code calls it on the writing rank only.
    """
    return [
        (module, "state_dict", _state_dict_returning(state, f"{name}." if name else ""))
        for name, module in model.named_modules()
    ]


def _state_dict_returning(state: Mapping[str, Any], inside: str) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        answer: dict[str, Any] = OrderedDict() if destination is None else destination
        answer.update({prefix + key[len(inside) :]: value for key, value in state.items() if key.startswith(inside)})
        return answer

    return state_dict


def patched_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Attributes:
    """Return patches, for `replaced`, that show parameters in the file's dtype: config.json gets the first one's.

    A parameter may currently be gathered in the compute dtype.

    Args:
        dtypes: first name in `model` -> dtype in the file; other parameters are not changed.
    """
    first, out = names_of(model), Attributes()
    for name, module in model.named_modules():
        if is_pretrained(module):
            inside = f"{name}." if name else ""
            shown: list[Tensor] = []
            for key, param in module.named_parameters():
                dtype = dtypes.get(first[inside + key], param.dtype)
                is_own = param.dtype == dtype  # else show a tensor of that dtype without memory
                shown.append(param if is_own else torch.empty((), dtype=dtype, device=param.device).expand(param.shape))
            out.append((module, "parameters", lambda recurse=True, shown=shown: iter(shown)))
    return out


def is_pretrained(module: nn.Module) -> bool:
    """Return whether `module` is a `PreTrainedModel`, without importing transformers."""
    known = sys.modules.get("transformers.modeling_utils")
    return known is not None and isinstance(module, known.PreTrainedModel)


def with_mixin(mixin: type[Any], cls: type[Any]) -> type[Any]:
    """Return the subclass `Zero<cls>` of `mixin` and `cls`, one for each pair; `cls` itself if it has the mixin."""
    if issubclass(cls, mixin):
        return cls
    for made in mixin.__subclasses__():
        if made.__bases__ == (mixin, cls) and "_zero_is_made" in vars(made):  # not a user's class
            return made
    return type(f"Zero{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__, "_zero_is_made": True})


def meta_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return `model.state_dict()` with every tensor on the meta device, without communication."""
    values = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model).items())
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in values}


def show(text: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream` (standard output), above the progress bars of the Trainer."""
    from tqdm.auto import tqdm

    out = sys.stdout if stream is None else stream
    tqdm.write(text, file=out)
    out.flush()
