"""Which type each parameter is kept, gathered and reduced in.

The reference for bf16 and fp16 is plain data parallel under autocast with float32 parameters. Autocast casts the
matrices of linear and convolution layers, of attention and of experts before use: those are gathered in the compute dtype,
which saves the wire and the cast and changes no result. Everything else (norms, biases, embeddings) stays in its own type,
and autocast stays on (`autocast`). A matrix that the model itself uses in float32 is named by `ZeroConfig.full_precision`,
or by the class in transformers' way, and stays in its own type, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
    """The policy of one engine."""

    autocast_dtype: torch.dtype | None
    """None: compute in the parameters' own types."""
    reduce_dtype: torch.dtype
    full_precision: tuple[str, ...] = ()
    """Patterns of names (as in `fnmatch`) of parameters that are gathered in their own type whatever uses them."""
    wire: str = "none"
    """Format of codes in which matrices that are trained travel to be gathered, see `comm.codec`."""

    @staticmethod
    def of(
        mixed_precision: str | None, reduce_dtype: str | None, full_precision: Sequence[str] = (), wire: str = "none"
    ) -> Precision:
        """From accelerate's words (`no`, `bf16`, `fp16`) and what `ZeroConfig` says.

        Raises:
            ConfigError: any other word; fp8 is not supported.
        """
        mode = mixed_precision or "no"
        if mode not in _MODES:
            raise ConfigError(f"mixed_precision must be 'no', 'bf16' or 'fp16', found {mixed_precision!r}")
        return Precision(_MODES[mode], dtype_of(reduce_dtype or "float32"), tuple(full_precision), wire)

    def gathered_in(self, names: Sequence[str], shape: Sequence[int], trainable: bool) -> str:
        """Format of codes in which a parameter's values travel to be gathered; none: as they are.

        Vectors (norms, biases) go as they are: few bytes, each of which counts in every activation. So do frozen parameters, in
        which nothing makes up for the rounding, and those named in `full_precision`.
        """
        kept = any(fnmatchcase(name, pattern) for pattern in self.full_precision for name in names)
        return self.wire if trainable and len(shape) > 1 and not kept else "none"

    def compute_dtype(self, param: nn.Parameter, castable: bool) -> torch.dtype:
        if self.autocast_dtype is not None and castable and param.dtype == torch.float32:
            return self.autocast_dtype
        return param.dtype

    @staticmethod
    def master_dtype(param: nn.Parameter) -> torch.dtype:
        """The owner's slice: at least float32 for what is trained, untouched for what is frozen."""
        return Precision.trained_as(param.dtype) if param.requires_grad else param.dtype

    @staticmethod
    def trained_as(dtype: torch.dtype) -> torch.dtype:
        """The type of the owner's slice of what is trained and is of this type."""
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def reduce_dtype_of(self, master: torch.dtype) -> torch.dtype:
        """The wire type of a span's gradients; float64 and complex masters are never narrowed."""
        return self.reduce_dtype if master == torch.float32 else master

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    @staticmethod
    def hold_dtype(wire: torch.dtype) -> torch.dtype:
        """The type in which gradients add up on this rank before they are sent in `wire`: float32 at least."""
        return torch.promote_types(wire, torch.float32)

    @property
    def short(self) -> str:
        """For a table: `str` has it in full."""
        reduced = dtype_name(self.reduce_dtype)
        if self.autocast_dtype is None:
            return f"float32 masters, no autocast, reduced in {reduced}"
        return f"float32 masters, {dtype_name(self.autocast_dtype)} under autocast, reduced in {reduced}"

    def __str__(self) -> str:
        if self.autocast_dtype is None:
            compute = "parameters gathered and used in their own type"
        else:
            name = dtype_name(self.autocast_dtype)
            compute = f"matrices gathered and used in {name}, norms, biases and embeddings in float32 under autocast"
        return f"precision: float32 masters; {compute}; gradients reduced in {dtype_name(self.reduce_dtype)}"


def castable_params(
    model: nn.Module, names: Mapping[nn.Parameter, Sequence[str]], precision: Precision
) -> set[nn.Parameter]:
    """Parameters that autocast casts at every use, as far as the modules that hold them tell.

    One that is also used elsewhere (a tied embedding) is not, nor what `full_precision` or the model's class names.

    Raises:
        ConfigError: a pattern of `full_precision` that no parameter has.
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
    """Whether autocast casts this parameter at every use, and the sum of its gradients is the same in the compute dtype."""
    # transformers' Conv1D (GPT-2) is a transposed Linear through addmm; known by name, this layer imports no transformers.
    # A parametrized or hooked weight is computed from other parameters; it never reaches here under the name "weight".
    if name == "weight" and (isinstance(module, _CASTABLE) or type(module).__name__ == "Conv1D"):
        return True
    if isinstance(module, nn.MultiheadAttention):  # packed or apart, each part in one linear()
        return name.endswith("proj_weight")
    # transformers' experts in one 3-D parameter: `eager` has one linear() per expert, over its slice. `grouped_mm` is none of
    # autocast's functions and computes in float32; `batched_mm` adds up the gradients of a copy per token.
    is_eager = getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
    # What transformers' `use_experts_implementation` has made goes by the config's word.
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
    """What a transformers class keeps in float32 when it is loaded in `dtype`; compared with names as transformers does."""
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


def patterns_of(names: Iterable[str]) -> list[str]:
    """Names with their numbers replaced by `*`, each once: what a person reads, and may pass as `full_precision`."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name) for name in names))


def gathered_as(names: Sequence[str], total: int, dtype: torch.dtype) -> str:
    """One line: which parameters are gathered in the compute dtype."""
    patterns = patterns_of(names)
    shown = ", ".join(patterns[:4]) + (f" and {len(patterns) - 4} patterns more" if len(patterns) > 4 else "")
    return f"{len(names)} of {total} parameters in {dtype_name(dtype)}" + (f" ({shown})" if shown else "")
