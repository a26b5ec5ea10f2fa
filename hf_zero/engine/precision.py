"""Autocast around the model's forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..core.precision import Precision


class Autocast:
    """Enters autocast before every outermost forward of a model, and leaves it after, also after an exception."""

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device) -> None:
        self._precision, self._device = precision, device
        self._active: list[AbstractContextManager[object]] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: Any) -> None:
        context = self._precision.autocast(self._device)
        context.__enter__()
        self._active.append(context)

    def _leave(self, *_: Any) -> None:
        if self._active:
            self._active.pop().__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
