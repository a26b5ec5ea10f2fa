"""All parameters of a sharded model whole at once, and kept so: forwards gather nothing (`zero.unsharded`).

A span whose parameters are not whole in the wanted type anyway gets one buffer, gathered from the masters once, and its
parameters are *pinned* to views of it, as `GatheredParameters` pins them: gathers and releases leave them alone. What is
written to them is carried into the masters by every rank for its own elements, before anybody reads those and at the end. So
edits have to be the same on every rank, as all writes between steps have; the end compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..comm import agree
from ..config import size_text
from ..core.precision import dtype_of
from ..errors import OutOfMemoryError, RankMismatchError, StateError
from ..tiers.fingerprint import digest
from .values.carrying import put
from .values.flat_param import Flat
from .values.sharded import Sharded
from .values.unit import State, Unit


@dataclass(eq=False)
class _Whole:
    """One span's parameters.

    Attributes:
        buffer: 1-D, the whole span; `known`: its digest as the masters have it.
        views: it, cut into parameters' shapes. `mine`: which of them (places in `params`) are shown; somebody else has others.
    """

    unit: Unit
    flat: Flat
    buffer: Tensor
    views: list[Tensor]
    mine: list[int]
    known: int

    def replaced(self) -> list[tuple[int, Tensor]]:
        """What was put in a parameter's place (`param.data = x`), by place in `params`."""
        found = []
        for index in self.mine:
            if index in self.flat.casts:  # an evaluation in another type
                continue
            view, value = self.views[index], self.flat.params[index].data
            same_place = value.data_ptr() == view.data_ptr() and value.stride() == view.stride()
            if not (same_place and value.dtype == view.dtype and value.shape == view.shape):
                found.append((index, value))
        return found

    def collect(self, index: int, value: Tensor) -> None:
        """A value, as `replaced` has it, is in the buffer, and its parameter shows it there.

        Raises:
            StateError: of another shape.
        """
        param, view = self.flat.params[index], self.views[index]
        param.data = view
        if value.shape != view.shape:
            raise StateError(
                f"parameter {self.flat.span.slots[index].spec.name!r} was given `.data` of {tuple(value.shape)} inside "
                f"zero.unsharded, expected {tuple(view.shape)}: a sharded parameter keeps its shape"
            )
        view.copy_(value)


class Unsharded:
    """Of one model, from `begin` to `end`."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        self._wholes: dict[Flat, _Whole] = {}

    @torch.no_grad()
    def begin(self, *, in_compute_dtype: bool, free_bytes: int) -> None:
        """Nothing is gathered for a pass, masters are those of one step. A collective.

        Args:
            in_compute_dtype: in the types that forwards use, and not in the parameters' own.
            free_bytes: of the device, on this rank.

        Raises:
            OutOfMemoryError: on every rank, where one has not got the memory.
        """
        wire, keeps = self._sharded.wire, self._sharded.policy.keep_full
        wanted: list[tuple[Unit, Flat, torch.dtype]] = []
        for unit in self._sharded.units:
            for flat in unit.flats:
                dtype = flat.compute_dtype if in_compute_dtype else dtype_of(flat.span.spec.dtype)
                is_there = keeps and flat.codec is None and dtype == flat.compute_dtype
                if flat.shown_dtype is not None:
                    dtype, is_there = flat.shown_dtype, keeps
                if not is_there:
                    wanted.append((unit, flat, dtype))
        needed = sum(flat.span.numel * dtype.itemsize for _, flat, dtype in wanted)
        with agree.on_all_ranks(wire, "zero.unsharded", kind=OutOfMemoryError):
            missing = needed - free_bytes if wanted else 0
            if missing > 0:
                raise OutOfMemoryError(
                    f"zero.unsharded: whole weights take {size_text(needed)} of {self._sharded.device} beside what is there, "
                    f"{size_text(missing)} more than is free on rank {wire.rank}. Pass in_compute_dtype=True under bf16 or "
                    "fp16, offload optimizer state, raise device_memory, or make a part whole by zero.GatheredParameters"
                )
        with wire.watch.doing("zero.unsharded"):
            try:
                with agree.on_all_ranks(wire, "zero.unsharded", kind=OutOfMemoryError):
                    for unit, flat, dtype in wanted:
                        self._wholes[flat] = self._allocate(unit, flat, dtype)
                for whole in self._wholes.values():
                    self._fill(whole)
            except BaseException:
                self._leave()
                raise
        for unit in self._sharded.units:
            unit.show_whole(not unit.policy.keep_full)

    @staticmethod
    def _allocate(unit: Unit, flat: Flat, dtype: torch.dtype) -> _Whole:
        numel = flat.span.numel
        buffer = flat.storage.allocate(
            "gathered",
            f"unit {unit.name!r} in zero.unsharded",
            numel * dtype.itemsize,
            partial(torch.empty, numel, dtype=dtype, device=flat.device),
        )
        return _Whole(
            unit, flat, buffer, flat.cut_up(buffer), [i for i in range(len(flat.params)) if i not in flat.pinned], 0
        )

    def _fill(self, whole: _Whole) -> None:
        flat, wire = whole.flat, self._sharded.wire
        own = agree.read(wire, flat.values, may_fail=flat.storage.uses_disk).detach().to(whole.buffer.dtype)
        if flat.span.shards == 1:
            whole.buffer.copy_(own)
        else:
            wire.gather(whole.buffer, own, flat.span.index, flat.span.cuts).close()
        whole.known = digest(whole.buffer)
        flat.pinned.update(whole.mine)
        for index in whole.mine:
            flat.show(index, whole.views[index])
            flat.cast(index)

    @torch.no_grad()
    def refill(self, flats: Iterable[Flat]) -> None:
        """The optimizer's tensors of these spans were written (`optimizer.eval()`): parameters follow. A collective."""
        for flat in flats:
            if flat in self._wholes:
                self._fill(self._wholes[flat])

    @torch.no_grad()
    def carry(self, flats: Iterable[Flat] | None = None) -> None:
        """The masters have what was written to the parameters. Without communication.

        Args:
            flats: spans that matter; None: all.

        Raises:
            StateError: it cannot be carried over; names the parameter.
        """
        asked = self._wholes if flats is None else flats
        wholes = [whole for flat in asked if (whole := self._wholes.get(flat)) is not None]
        if any(whole.replaced() for whole in wholes):
            # Of all: two parameters may have changed places, so each is read before any is written over.
            wholes = [*self._wholes.values()]
            buffers = {whole.buffer.untyped_storage()._cdata for whole in wholes}
            found = [
                (whole, at, value.clone() if value.untyped_storage()._cdata in buffers else value)
                for whole in wholes
                for at, value in whole.replaced()
            ]
            for whole, at, value in found:
                whole.collect(at, value)
        for whole in wholes:
            now = digest(whole.buffer)
            if now == whole.known:
                continue
            whole.known = now
            unit, flat = whole.unit, whole.flat
            if flat.in_files:
                raise StateError(
                    f"parameter {flat.span.spec.name!r} of unit {unit.name!r}, or one beside it, was written inside "
                    "zero.unsharded: its values stay in the model's own files, which are not written. Load the model without "
                    "offload_params='disk' to change it"
                )
            if any(shard.edited(False) for shard in flat.shards):
                raise StateError(
                    f"parameters of unit {unit.name!r} ({flat.span.spec.name!r}, …) and the optimizer's own tensors of them "
                    "were both written inside zero.unsharded: there is no telling which counts. Call the optimizer's methods "
                    "(eval(), train()) before it, or after"
                )
            unit.close()
            for index in whole.mine:
                put(flat, index, whole.views[index])
                if unit.policy.keep_full:
                    flat.views[index].copy_(whole.views[index])
            flat.note_place()

    def end(self, settle: Callable[[], None], *, compare: bool) -> None:
        """Parameters show what they did before, with what was written to them.

        Args:
            settle: calls `carry`, and carries over what was written elsewhere.
            compare: whether ranks have made the same edits. A collective then.

        Raises:
            RankMismatchError: they have not; on every rank, names the first. What each rank wrote counts for its own elements.
        """
        try:
            if compare:
                with agree.on_all_ranks(self._sharded.wire, "zero.unsharded", kind=RankMismatchError) as report:
                    settle()
                    report.mine = [*self._shown()]
                for rank, found in enumerate(report.everyone):
                    for (name, theirs), (_, first) in zip(found, report.everyone[0]):
                        if theirs != first:
                            raise RankMismatchError(
                                f"the parameters of the span of {name!r} were written inside "
                                f"zero.unsharded with other values on rank {rank} than on rank 0: make the same edit on every "
                                "rank, or edit inside zero.GatheredParameters(params, modifier_rank=0)"
                            )
            else:
                settle()
        finally:
            self._leave()

    def _shown(self) -> Iterator[tuple[str, int]]:
        for flat in self._sharded.flats:
            whole = self._wholes.get(flat)
            yield flat.span.spec.name, digest(flat.full[: flat.span.used_numel]) if whole is None else whole.known

    def _leave(self) -> None:
        for unit in self._sharded.units:
            unit.show_whole(False)
        for flat, whole in self._wholes.items():
            flat.pinned.difference_update(whole.mine)
            for index in whole.mine:
                is_whole = whole.unit.policy.keep_full or whole.unit.state is State.GATHERED
                flat.unshow(index, gathered=is_whole)
            flat.account.add("gathered", -whole.buffer.nbytes)
        self._wholes.clear()
