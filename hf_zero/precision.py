"""Which type each parameter is kept, gathered and reduced in; autocast.

The reference for bf16 and fp16 is plain data parallel under autocast with float32 parameters. Autocast casts the
matrices of linear and convolution layers before use: those are gathered in the compute dtype, which saves the wire and
the cast and changes no result. Everything else (norms, biases, embeddings) stays in its own type, and autocast stays on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .errors import ConfigError

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

    @staticmethod
    def of(mixed_precision: str | None, reduce_dtype: str | None) -> Precision:
        """From accelerate's words (`no`, `bf16`, `fp16`) and `ZeroConfig.reduce_dtype`.

        Raises:
            ConfigError: any other word; fp8 is not supported.
        """
        mode = mixed_precision or "no"
        if mode not in _MODES:
            raise ConfigError(f"mixed_precision must be 'no', 'bf16' or 'fp16', found {mixed_precision!r}")
        return Precision(_MODES[mode], dtype_of(reduce_dtype or "float32"))

    def compute_dtype(self, param: nn.Parameter, castable: bool) -> torch.dtype:
        if self.autocast_dtype is not None and castable and param.dtype == torch.float32:
            return self.autocast_dtype
        return param.dtype

    @staticmethod
    def master_dtype(param: nn.Parameter) -> torch.dtype:
        """The owner's slice: at least float32 for what is trained, untouched for what is frozen."""
        if param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
            return torch.float32
        return param.dtype

    def reduce_dtype_of(self, master: torch.dtype) -> torch.dtype:
        """The wire type of a span's gradients; float64 and complex masters are never narrowed."""
        return self.reduce_dtype if master == torch.float32 else master

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    def __str__(self) -> str:
        if self.autocast_dtype is None:
            compute = "parameters gathered and used in their own type"
        else:
            name = dtype_name(self.autocast_dtype)
            compute = f"matrices gathered and used in {name}, norms, biases and embeddings in float32 under autocast"
        return f"precision: float32 masters; {compute}; gradients reduced in {dtype_name(self.reduce_dtype)}"


def castable_params(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that autocast casts at every use. One that is also used elsewhere (a tied embedding) is not."""
    cast: set[nn.Parameter] = set()
    kept: set[nn.Parameter] = set()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                (cast if name == "weight" and _casts(module) else kept).add(param)
    return cast - kept


def _casts(module: nn.Module) -> bool:
    # transformers' Conv1D (GPT-2) is a transposed Linear through addmm; known by name, this layer imports no transformers.
    # A parametrized or hooked weight is computed from other parameters; it never reaches here under the name "weight".
    return isinstance(module, _CASTABLE) or type(module).__name__ == "Conv1D"


class Autocast:
    """A model's forward under autocast: hooks on it, with the open regions of nested forwards between them."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision, self._device = precision, device
        self._open: list[AbstractContextManager[object]] = []

    def around(self, model: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on; hooks that come later run inside."""
        return [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: object) -> None:
        context = self._precision.autocast(self._device)
        context.__enter__()
        self._open.append(context)

    def _leave(self, *_: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
