"""The precision policy: the dtype in which each parameter is stored, gathered and reduced.

The reference for bf16 and fp16 is plain data parallel under autocast with float32 parameters. Autocast casts the matrices of
linear and convolution layers, attention and experts before use. These are gathered in the compute dtype, which saves traffic
and the cast, and changes no result. All others (norms, biases, embeddings) keep their own dtype, under autocast. So do matrices
that the model itself uses in float32, if `ZeroConfig.full_precision` or a transformers class names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..errors import ConfigError

_MODES: dict[str, torch.dtype | None] = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_CASTABLE: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is not a torch dtype")
    return dtype


@dataclass(frozen=True, slots=True)
class Precision:
    """The policy of one engine.

    Attributes:
        autocast_dtype: None: compute in the parameters' own dtypes.
        reduce_dtype: of gradients in reduces.
        full_precision: patterns (`fnmatch`) of parameters that are always gathered in their own dtype.
        wire: format in which trained matrices are gathered, see `comm.codec`.
    """

    autocast_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    full_precision: tuple[str, ...] = ()
    wire: str = "none"

    @staticmethod
    def of(
        mixed_precision: str | None, reduce_dtype: str | None, full_precision: Sequence[str] = (), wire: str = "none"
    ) -> Precision:
        """Build the policy from accelerate's mode (`no`, `bf16`, `fp16`) and settings of `ZeroConfig`.

        Raises:
            ConfigError: another mode; fp8 is not supported.
        """
        mode = mixed_precision or "no"
        if mode not in _MODES:
            raise ConfigError(f"mixed_precision must be 'no', 'bf16' or 'fp16', found {mixed_precision!r}")
        return Precision(_MODES[mode], dtype_of(reduce_dtype or "float32"), tuple(full_precision), wire)

    def gathered_in(self, names: Sequence[str], shape: Sequence[int], trainable: bool) -> str:
        """Return the wire format of a parameter's values in gathers; `none` for its compute dtype.

        Vectors (norms, biases) are not rounded: they are small, and each element affects every activation. Frozen parameters
        are not, because no update corrects their rounding, and those in `full_precision` are not.
        """
        kept = any(fnmatchcase(name, pattern) for pattern in self.full_precision for name in names)
        return self.wire if trainable and len(shape) > 1 and not kept else "none"

    def compute_dtype(self, param: nn.Parameter, castable: bool) -> torch.dtype:
        if self.autocast_dtype is not None and castable and param.dtype == torch.float32:
            return self.autocast_dtype
        return param.dtype

    @staticmethod
    def master_dtype(param: nn.Parameter) -> torch.dtype:
        """Return the dtype of the owner's slice: at least float32 for trained parameters, unchanged for frozen ones."""
        return Precision.trained_as(param.dtype) if param.requires_grad else param.dtype

    @staticmethod
    def trained_as(dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the owner's slice of a trained parameter."""
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def reduce_dtype_of(self, master: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are reduced; float64 and complex masters are never narrowed."""
        return self.reduce_dtype if master == torch.float32 else master

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    @staticmethod
    def hold_dtype(wire: torch.dtype) -> torch.dtype:
        """Return the dtype in which this rank accumulates gradients that it sends in `wire`: at least float32."""
        return torch.promote_types(wire, torch.float32)

    def __str__(self) -> str:
        reduced = dtype_name(self.reduce_dtype)
        if self.autocast_dtype is None:
            return f"float32 masters, no autocast, reduced in {reduced}"
        return f"float32 masters, {dtype_name(self.autocast_dtype)} under autocast, reduced in {reduced}"


def castable_params(
    model: nn.Module, names: Mapping[nn.Parameter, Sequence[str]], precision: Precision
) -> set[nn.Parameter]:
    """Return the parameters that autocast casts at every use, judged by the modules that hold them.

    Excludes parameters that are also used elsewhere (a tied embedding), and those that `full_precision` or the model's class
    names.

    Raises:
        ConfigError: no parameter matches a pattern of `full_precision`.
    """
    named = _named(names, precision.full_precision)
    if precision.autocast_dtype is None:
        return set()
    cast: set[nn.Parameter] = set()
    kept: set[nn.Parameter] = set()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                (cast if _casts(module, name, param) else kept).add(param)
    return cast - kept - named - _kept_by_class(model, names, precision.autocast_dtype)


def _casts(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    """Return True if autocast casts this parameter at every use, and its gradients sum to the same in the compute dtype."""
    # transformers' Conv1D (GPT-2) is a transposed Linear through addmm, recognized by its name: no import of transformers here.
    # A parametrized or hooked weight is computed from other parameters and never has the name "weight" here.
    if name == "weight" and (isinstance(module, _CASTABLE) or type(module).__name__ == "Conv1D"):
        return True
    if isinstance(module, nn.MultiheadAttention):  # packed or separate, each part in one linear()
        return name.endswith("proj_weight")
    # transformers' experts in one 3-D parameter: `eager` calls one linear() per expert, over its slice. `grouped_mm` is not an
    # autocast function and computes in float32; `batched_mm` sums the gradients of one copy per token. Classes made by
    # transformers' `use_experts_implementation` follow the config's setting.
    is_eager = getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
    return param.dim() == 3 and is_eager and hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _named(names: Mapping[nn.Parameter, Sequence[str]], patterns: Sequence[str]) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for pattern in patterns:
        mine = {param for param, own in names.items() if any(fnmatchcase(name, pattern) for name in own)}
        if not mine:
            some = ", ".join(repr(own[0]) for own in list(names.values())[:3])
            raise ConfigError(
                f"full_precision: no parameter is called {pattern!r}. Patterns are compared with whole names, such as "
                f"{some}; `*` stands for any text: '*.gate.*'"
            )
        found |= mine
    return found


def _kept_by_class(
    model: nn.Module, names: Mapping[nn.Parameter, Sequence[str]], dtype: torch.dtype
) -> set[nn.Parameter]:
    """Return the parameters that a transformers class keeps in float32 under `dtype`; names match as in transformers."""
    texts: set[str] = set()
    for attribute, types in (
        ("_keep_in_fp32_modules", (torch.float16,)),
        ("_keep_in_fp32_modules_strict", (torch.float16, torch.bfloat16)),
    ):
        for module in model.modules() if dtype in types else ():
            words = getattr(module, attribute, None)
            if isinstance(words, (list, tuple, set, frozenset)):
                texts |= {word for word in words if isinstance(word, str)}
    if not texts:
        return set()
    wanted = re.compile("|".join(f"(?:{text.replace('*', '.*')})" for text in sorted(texts)))
    return {param for param, own in names.items() if any(wanted.search(name) for name in own)}
