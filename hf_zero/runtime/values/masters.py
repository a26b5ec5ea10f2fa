"""What the optimizer's groups hold of state that is not on the device: parameters that know that they may be looked at.

A step over offloaded state goes on behind `optimizer.step()`, and values on disk are in no tensor at all. Only the class of the
object changes with its tier (`dressed`), so that torch's own step, which is for what is on the device, finds plain parameters.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, ClassVar

from torch import nn

from ...errors import StateError
from ...tiers.pool import Storage
from ...tiers.tier import Tier
from .reads import AsTheyAre, attribute_set, needs_values, of_kind


class Master(nn.Parameter):
    """One subclass for each engine."""

    storage: ClassVar[weakref.ref[Storage]]

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
    if not storage.masters:
        members = {"__module__": nn.Parameter.__module__, "storage": weakref.ref(storage)}
        for place, kind in ((Tier.HOST, HostMaster), (Tier.DISK, DiskMaster)):
            made = types.new_class("Parameter", (kind,), exec_body=lambda body: body.update(members))
            storage.masters[place] = made
    param.__class__ = storage.masters[tier]
