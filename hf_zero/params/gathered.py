"""Whole values of sharded parameters for a while: of some (`GatheredParameters`), of a model's (`unsharded`).

They work alike for parameters of an engine, at every stage and precision, and for those born under `zero.Init` that no
engine has yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..comm.wire import SoloWire
from ..core.precision import dtype_of
from ..errors import ConfigError, StateError
from ..runtime.engine import engine_of
from ..runtime.values.carrying import put
from ..runtime.values.deferred import Birth
from ..runtime.values.ownership import owner_of
from ..runtime.values.sharded import Place, master_of
from ..runtime.values.unit import State
from ..tiers.fingerprint import fingerprint
from .access import HeldParameter, holder_of


class GatheredParameters:
    """`with zero.GatheredParameters(params, modifier_rank=0):` whole values in `param.data` inside, on every rank.

    In the parameters' own types, from the masters. A collective at entry and exit. Contexts inside one another are fine: the
    outer one decides for the parameters that it has. Plain parameters are left alone.

    Args:
        params: a parameter, several, or a module for all of its own.
        modifier_rank: whose edits are kept, on every rank. None: nobody may edit.
        enabled: False to do nothing.

    Raises:
        StateError: at exit, on every rank: a parameter was edited without `modifier_rank`, or has another shape or type. All
            values are then as they were, as after any exception inside.
    """

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        found: Iterable[nn.Parameter]
        match params:
            case nn.Module():
                found = params.parameters()
            case nn.Parameter():
                found = [params]
            case _:
                found = params
        self._params = list({id(param): param for param in found}.values()) if enabled else []
        self._modifier_rank = modifier_rank
        self._gathered: list[_Gathered] = []
        self._shared: list[tuple[nn.Parameter, SoloWire]] = []
        """Whole by `unsharded`, on every rank: `modifier_rank`'s values are everybody's at the end."""

    def __enter__(self) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                for param in self._params:
                    holder = holder_of(param)
                    if holder is not None and not _is_gathered(holder):
                        rank, most = self._modifier_rank, holder.wire.size - 1
                        if rank is not None and not 0 <= rank <= most:
                            raise ConfigError(f"modifier_rank must be None or one of 0 to {most}, found {rank}")
                        with holder.wire.watch.doing("GatheredParameters"):
                            self._gathered.append(_Gathered(param, holder))
                    elif isinstance(holder, HeldParameter) and holder.engine.sharded.is_unsharded:
                        self._shared.append((param, holder.wire))
            except BaseException:
                self._discard()
                raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            shared, self._shared = self._shared, []
            if kind is None and self._modifier_rank is not None:
                for param, wire in shared:
                    param.data = param.data.contiguous()
                    wire.broadcast(param.data.view(-1).view(torch.uint8), self._modifier_rank)
            if kind is not None or not self._gathered:
                self._discard()
                return
            try:
                self._keep_edits()
            finally:
                self._discard()

    def _discard(self) -> None:
        for gathered in self._gathered:
            gathered.discard()
        self._gathered.clear()

    def _keep_edits(self) -> None:
        wire = max((gathered.holder.wire for gathered in self._gathered), key=lambda w: w.size)
        with wire.watch.doing("GatheredParameters"):
            everyone: list[list[str]] = wire.exchange([gathered.edit() for gathered in self._gathered])
        allowed = self._modifier_rank
        for rank, edits in enumerate(everyone):
            for gathered, edit in zip(self._gathered, edits):
                if edit and (allowed is None or (rank == allowed and edit != _VALUES)):
                    advice = (
                        "pass modifier_rank to keep one rank's edits"
                        if allowed is None
                        else "edit values in place only"
                    )
                    raise StateError(
                        f"{gathered.name} was edited inside GatheredParameters on rank {rank} ({edit}); the edit is "
                        f"discarded: {advice}"
                    )
        if allowed is None:
            return
        written: dict[int, Place] = {}
        for gathered, edit in zip(self._gathered, everyone[allowed]):
            if edit:
                gathered.keep(allowed)
                if isinstance(gathered.holder, HeldParameter):
                    written[id(gathered.holder.place.unit)] = gathered.holder.place
        for place in written.values():
            place.written()


_VALUES = "other values"


class _Gathered:
    """One parameter that a `GatheredParameters` has made whole."""

    def __init__(self, param: nn.Parameter, holder: HeldParameter | Birth) -> None:
        self.param = param
        self.holder = holder
        self.done = False
        if isinstance(holder, Birth):
            self.name = f"a parameter of shape {tuple(param.shape)}"
            holder.close(param)  # the values to come back to, if it is open just now
            whole = holder.whole(param)
            holder.open(param, whole=whole)
            holder.pins += 1
        else:
            self.name = f"parameter {holder.name!r}"
            holder.settle()
            place = holder.place
            whole = place.whole(master_of).to(dtype_of(place.slot.spec.dtype))
            place.flat.pinned.add(place.at)
            place.flat.show(place.at, whole)
        self._shape, self._dtype = whole.shape, whole.dtype
        self._print = fingerprint(whole)

    def edit(self) -> str:
        """How this rank's value differs from what was gathered; empty if it does not."""
        value = self.param.data
        if value.shape != self._shape or value.dtype != self._dtype:
            return f"{value.dtype} {tuple(value.shape)} instead of {self._dtype} {tuple(self._shape)}"
        return "" if torch.equal(fingerprint(value), self._print) else _VALUES

    def keep(self, rank: int) -> None:
        """Rank `rank`'s value, on every rank; a collective."""
        holder = self.holder
        if self.param.data.shape == self._shape and self.param.data.dtype == self._dtype:
            value = self.param.data.contiguous()
        else:
            value = torch.empty(self._shape, dtype=self._dtype, device=self.param.device)
        if holder.wire.size > 1:
            holder.wire.broadcast(value.view(-1).view(torch.uint8), rank)
        if isinstance(holder, Birth):
            self.param.data = value
            holder.pins -= 1
            holder.close(self.param)
            self.done = True
            return
        place = holder.place
        place.unit.release()
        place.unit.close()
        put(place.flat, place.at, value)

    def discard(self) -> None:
        """Back to what the parameter was, with what has been kept."""
        if self.done:
            return
        self.done = True
        holder = self.holder
        if isinstance(holder, Birth):
            holder.pins -= 1
            holder.close(self.param, keep=False)
            return
        unit, flat, index = holder.place
        flat.pinned.discard(index)
        flat.unshow(index, gathered=unit.policy.keep_full or unit.state is State.GATHERED)


@contextmanager
def unsharded(model: nn.Module, *, in_compute_dtype: bool = False) -> Iterator[None]:
    """`with zero.unsharded(model):` all weights are whole inside, on every rank: forwards and `generate` gather nothing.

    For phases of generation, averages of weights, `merge_and_unload`, whatever reads `named_parameters()`. Gathered once,
    from the masters. What is written to parameters inside counts from then on, as anywhere between steps and also after an
    exception: the same edit on every rank. `state_dict()`, saving and the accessors inside see it. Backwards, optimizer steps
    and loads are refused. In a context of the same model nothing more happens, and `GatheredParameters` inside gathers
    nothing. A model without an engine is left alone. A collective at its beginning and its end.

    Args:
        in_compute_dtype: weights as forwards use them, under bf16 and fp16 half the memory and no cast in each forward: for
            generation. False: in their own types, as they are saved.

    Raises:
        OutOfMemoryError: on every rank, at the beginning: how much is missing where.
        StateError: the model was born under zero.Init and has no engine yet; what was written has another shape, or belongs to
            values that stay in the model's own files.
        RankMismatchError: at the end, on every rank: the ranks have made different edits.
    """
    engine = engine_of(model)
    if engine is None:
        if any(isinstance(owner_of(param), Birth) for param in model.parameters()):
            raise StateError(
                "zero.unsharded: the model was born under zero.Init and is not sharded yet: shard it first, or use "
                "zero.GatheredParameters(model)"
            )
        yield
        return
    with engine.unsharded(in_compute_dtype=in_compute_dtype):
        yield


def _is_gathered(holder: HeldParameter | Birth) -> bool:
    if isinstance(holder, Birth):
        return holder.pins > 0
    return holder.engine.sharded.is_unsharded or holder.place.at in holder.place.flat.pinned
