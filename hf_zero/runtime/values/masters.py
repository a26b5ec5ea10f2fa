"""Classes of the tensors in the optimizer's groups: user code that clears their gradients is heard, and, where they are not
on the device, reads and writes of their values.

A step over offloaded state goes on behind `optimizer.step()`, and values on disk are in no tensor at all. Only the class of the
object changes with its tier (`dressed`), so that torch's own step, which is for what is on the device, finds plain parameters.
What is on the device is a `HeardMaster` between backward and step only.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import StateError
from ...tiers.pool import Storage
from ...tiers.tier import Tier
from .reads import AsTheyAre, attribute_set, needs_values, of_kind

RAW_GRAD: Any = torch.Tensor.grad
"""Sets a gradient past `HeardMaster`: `RAW_GRAD.__set__(param, grad)`."""


class HeardMaster(nn.Parameter):
    """Setting its gradient to None clears those of the model's parameters that it stands for. One subclass for each engine.

    Only assignment is overridden: a read costs what it always does. The engine itself assigns while the class is another, or by
    `RAW_GRAD`.
    """

    storage: ClassVar[weakref.ref[Storage]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "grad" and value is None and (storage := type(self).storage()) is not None:
            storage.grad_cleared(self)


class Master(HeardMaster):
    """In host memory or on disk."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (needs_values(func) or attribute_set(func) == "data"):
            with AsTheyAre():
                return func(*args, **kwargs)
        found = [*of_kind(Master, (args, kwargs))]
        for master in found:
            type(master).look()
        # Not `AsTheyAre`: what runs in there must not lose its torch functions.
        own = [type(master) for master in found]
        for master in found:
            master.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            return func(*args, **kwargs)
        finally:
            for master, kind in zip(found, own):
                master.__class__ = kind

    @classmethod
    def look(cls) -> None:
        """Somebody reads or writes values."""
        raise NotImplementedError


class HostMaster(Master):
    """In host memory: a step under way has ended before it is looked at."""

    @classmethod
    def look(cls) -> None:
        if (storage := cls.storage()) is not None:
            storage.settle_step()


class DiskMaster(Master):
    """On disk: one NaN, expanded, which nobody is to compute with."""

    def __repr__(self) -> str:  # type: ignore[override]
        with AsTheyAre():
            return f"Parameter(at rest on disk, shape={tuple(self.shape)})"

    @classmethod
    def look(cls) -> None:
        raise StateError(
            "the tensors of the optimizer's groups have no values where its state rests on disk: read and write "
            "model.parameters(), or zero.full_parameter and zero.set_full_parameter"
        )


def dressed(param: nn.Parameter, tier: Tier, storage: Storage) -> None:
    """It rests in this tier from here on. Frozen ones are in no group."""
    if tier is Tier.DEVICE or not param.requires_grad:
        param.__class__ = nn.Parameter
        return
    param.__class__ = classes(storage)[tier]


def classes(storage: Storage) -> dict[Tier, Any]:
    """By tier, the class of one engine's tensors in the groups. On the device, it is for while they show gradients."""
    if not storage.masters:
        members = {"__module__": nn.Parameter.__module__, "storage": weakref.ref(storage)}
        for place, kind in ((Tier.DEVICE, HeardMaster), (Tier.HOST, HostMaster), (Tier.DISK, DiskMaster)):
            made = types.new_class("Parameter", (kind,), exec_body=lambda body: body.update(members))
            storage.masters[place] = made
    return storage.masters
