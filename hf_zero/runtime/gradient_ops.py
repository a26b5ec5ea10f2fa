"""What the stand-ins of `gradients` stand for: reduced gradients in the ranks' shards, read, written, cleared and replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..errors import StateError
from ..tiers.tier import Tier
from .offload import Offload
from .optimizers.clipping import over_ranks, overflowed, power_sum, power_sum_of, root
from .saved_tensors import in_backward_of_any
from .values.flat_param import Flat
from .values.gradients import Gradient, Handles, is_of
from .values.masters import classes
from .values.reads import AsTheyAre
from .values.sharded import Sharded, gradient_of
from .values.state_shard import Shard

T = TypeVar("T")
_GONE = "this gradient's model is gone"


class Gradients:
    """Of one sharded model. See `gradients` for what its users see.

    All it is given it holds weakly: a graph that the user keeps holds gradients, and they hold this.

    Args:
        flush: reduces what `no_sync` left on this rank, of some spans or of all.
    """

    def __init__(
        self,
        sharded: Sharded,
        offload: Offload,
        flush: Callable[[Sequence[Flat] | None], None],
    ) -> None:
        self._sharded, self._offload = weakref.ref(sharded), weakref.ref(offload)
        self._flush_of = weakref.WeakMethod(flush)
        self._writes = 0  # what was written through stand-ins
        self._norms: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._norms_of: tuple[Any, ...] = ()
        self._slice_norms: dict[int, Tensor] = {}  # by place: answers that nobody has asked for yet
        self._slice_norms_of: tuple[float, int] = (0.0, 0)
        self._overflowed: Tensor | None = None  # by optimizer, since the last backward or step
        self._overflowed_of = 0
        self._heard = classes(offload.storage)[Tier.DEVICE]
        self._parts: dict[int, tuple[Flat, Shard, int | None]] | None = None
        """By `id` of a tensor in the groups: its span, its shard, of a whole the parameter. Made when it is needed."""
        offload.storage.grad_cleared = self.group_cleared

    @property
    def sharded(self) -> Sharded:
        sharded = self._sharded()  # in every step: not by `_there`, which would be another call
        if sharded is None:
            raise StateError(_GONE)
        return sharded

    @property
    def _shows_slices(self) -> bool:
        return self.sharded.layout.shards > 1 or self.sharded.config.offloads

    def _over_ranks(self, local: Tensor, order: float) -> Tensor:
        """The norms from what `power_sum` gives on this rank."""
        sharded = self.sharded
        return root(over_ranks(sharded.wire, local, order) if sharded.layout.shards > 1 else local, order)

    def _flush(self, flats: Sequence[Flat] | None = None) -> None:
        _there(self._flush_of)(flats)

    def show(self) -> None:
        """After a backward: who has a reduced gradient, or one that waits on this rank, shows a stand-in."""
        self._norms.clear()
        updated = self.sharded.config.step_in_backward  # the gradients are used up, or will be: using them is refused
        with AsTheyAre():
            for flat in self.sharded.trained:
                if updated or flat.waits or flat.is_reduced:
                    flat.handles.keeper = self
                    flat.handles.show()
        self.show_slices()

    def show_slices(self) -> None:
        """After a backward, and after a step: the optimizer's groups show stand-ins for what they have not as it is.

        That is where other ranks have slices, in host memory, where gradients may be narrower than their masters, and on disk.
        """
        self._slice_norms.clear()
        self._overflowed = self._parts = None
        if not self.sharded.optimizers:
            return
        shows, heard = self._shows_slices, self._heard
        with AsTheyAre():  # masters in host memory tell whoever looks at them
            for place, flat in enumerate(self.sharded.trained):
                first = place
                for shard in flat.shards:
                    if shows:
                        shard.show_slice(self, first, flat.span.optimizer)
                    elif shard.master.grad is not None:
                        shard.master.__class__ = heard
                    first = -1

    def hide_slices(self) -> None:
        """The optimizer's own step is next."""
        shows = self._shows_slices
        for flat in self.sharded.trained:
            for shard in flat.shards:
                if shows:
                    shard.hide_slice()
                else:
                    shard.master.__class__ = nn.Parameter

    def settle(self, flats: Sequence[Flat] | None = None) -> None:
        """Carry out what was done to `.grad` since: None clears, a tensor replaces. Nothing is under way or unsent."""
        if self.sharded.config.step_in_backward:
            return
        flats = self.sharded.trained if flats is None else flats
        self._follow(flats)
        changed = []
        with AsTheyAre():
            for flat in flats:
                handles = flat.handles
                placed, grads = handles.placed, handles.grads
                for index, param in enumerate(flat.params):
                    shown = param.grad
                    if (shown is not grads[index]) if placed[index] else (shown is not None):
                        changed.append(flat)
                        break
        for flat in changed:
            self._settle(flat)

    def _follow(self, flats: Sequence[Flat]) -> None:
        """As `settle`, what was done to `.grad` of the optimizer's parameters."""
        if self.sharded.config.offloads:
            for flat in flats:
                for shard in flat.shards:
                    if shard.follow_grad():
                        self._writes += 1

    @torch.no_grad()
    def _settle(self, flat: Flat) -> None:
        handles = flat.handles
        found = [param.grad for param in flat.params]
        cleared, replaced = [], []
        for index, grad in enumerate(found):
            if grad is None:
                if handles.placed[index]:
                    cleared.append(index)
            elif not isinstance(grad, Gradient):
                replaced.append(index)
            elif not is_of(grad, handles, index):
                grad = flat.params[index].grad = grad.clone().to(grad.dtype)
                replaced.append(index)
        if cleared:
            flat.clear_reduced(cleared)
        if replaced:
            self._replace(flat, replaced)
        if cleared or replaced:
            self._writes += 1

    def _replace(self, flat: Flat, replaced: list[int]) -> None:
        self.give(flat, replaced)
        for index in replaced:
            value, flat.params[index].grad = flat.params[index].grad, None
            if value is not None:
                self.write(flat.handles, index, value.detach())
        flat.handles.show()

    def give(self, flat: Flat, given: Sequence[int]) -> None:
        """These parameters of the span have a gradient from now on, to be written. The others keep theirs, or have none."""
        had = flat.is_reduced
        flat.some_grad(self.sharded.wire)
        flat.present = [(had and was) or index in given for index, was in enumerate(flat.present)]
        if not flat.waits:
            flat.arrived = list(flat.present)
        flat.handles.keeper = self

    def group_cleared(self, tensor: Tensor) -> None:
        """User code set `grad` of a tensor in the groups to None: as if the parameters that it stands for were cleared."""
        if self._parts is None:
            self._parts = {}
            for flat in self.sharded.trained:
                for shard in flat.shards:
                    self._parts[id(shard.master)] = flat, shard, None
                    for index, whole in (flat.wholes or {}).items():
                        self._parts[id(whole)] = flat, shard, index
        if id(tensor) not in self._parts or in_backward_of_any():
            return
        self._writes += 1
        flat, shard, at = self._parts[id(tensor)]
        with AsTheyAre():
            if at is None:
                shard.drop_grad()
                if not flat.is_reduced:  # it may rest in several tiers
                    self._forget(flat)
                return
            flat.params[at].grad, flat.handles.placed[at] = None, False
            flat.clear_reduced([at])
            rest = [other for other in self.sharded.trained if other.span.optimizer == flat.span.optimizer]
            # Other ranks clear theirs, which are not in this rank's groups.
            if not any(whole.grad is not None for other in rest for whole in reversed((other.wholes or {}).values())):
                for other in rest:
                    if other.span.is_updated:
                        self._forget(other)

    def _forget(self, flat: Flat) -> None:
        flat.drop_grads()
        flat.drop_master_grad()
        if self.sharded.wire.size == 1:
            flat.drop_bucket()

    @torch.no_grad()
    def zero(self, flats: Sequence[Flat]) -> None:
        """Reduced gradients of these are zeros afterwards; what waits on this rank is forgotten."""
        self._writes += 1
        for flat in flats:
            flat.drop_grads(local=flat.is_reduced)
            for shard in flat.shards:
                if shard.has_grad:
                    shard.zero_grad()

    def hide(self) -> None:
        """Before a backward that reduces: autograd need not ask stand-ins to add to them. They come back after it."""
        flats = self.sharded.trained
        if not self.sharded.config.step_in_backward:
            self._follow(flats)
        with AsTheyAre():
            for flat in flats:
                flat.handles.hide()

    # What stand-ins ask ---------------------------------------------------------------------------------------------

    def ready(self, handles: Handles[Flat], index: int, name: str) -> None:
        flat = handles.flat
        what = f"{name} on the gradient of {handles.name(index)!r}"
        if self.sharded.config.step_in_backward:
            raise StateError(
                f"{what}: with step_in_backward parameters are updated in backward, and gradients are not kept: turn it off, "
                "or leave gradients alone"
            )
        _there(self._offload).refuse_while_away(what)
        if not flat.waits or flat.is_reduced:
            self._flush([flat])
        if not flat.waits and not flat.is_reduced:
            raise StateError(
                f"{what}: it has been cleared since it was read. Keep `param.grad.clone()`, or use `.grad` before it is cleared"
            )

    @torch.no_grad()
    def whole(self, handles: Handles[Flat], index: int) -> Tensor:
        flat = handles.flat
        if flat.waits:
            return flat.waiting(index).clone()
        return self.sharded.places[flat.params[index]].whole(gradient_of)

    def empty(self, handles: Handles[Flat], index: int) -> Tensor:
        flat = handles.flat
        dtype = flat.waiting(index).dtype if flat.waits else flat.master_dtype
        return torch.empty(flat.span.slots[index].spec.shape, dtype=dtype, device=flat.device)

    def write(self, handles: Handles[Flat], index: int, whole: Tensor) -> None:
        def run(piece: Tensor, part: Callable[[Any], Any]) -> None:
            piece.copy_(part(whole))

        self.pointwise(handles, index, run)

    @torch.no_grad()
    def pointwise(
        self, handles: Handles[Flat], index: int, run: Callable[[Tensor, Callable[[Any], Any]], None]
    ) -> None:
        """`run(piece, part)` for every piece on this rank; `part` gives the same elements of a whole tensor."""
        self._writes += 1
        flat = handles.flat
        if flat.waits:
            run(flat.waiting(index), lambda whole: whole)
            return
        for shard, piece in flat.pieces(index):
            grad = shard.whole_grad()
            if grad is not None:
                run(grad[piece.here], _slicer(piece.there, grad.device))

    def norm(self, handles: Handles[Flat], index: int, order: float) -> Tensor:
        """As `norms`, for who asks for one after another: the first question is answered for all."""
        sharded = self.sharded
        # auto may have moved a gradient on this rank alone; on one shard a loss scaler's writes are not counted
        if handles.flat.waits or sharded.config.is_auto or sharded.layout.shards == 1:
            return self.norms([(handles, index)], order)[0]
        now, key = (order, self._writes), (id(handles), index)
        value, version = self._norms.pop(key, (None, 0))
        if value is None or now != self._norms_of or version != _version(handles.flat):
            self._flush()
            everyone = [
                (f.handles, i)
                for f in self.sharded.trained
                if f.is_reduced
                for i, is_ in enumerate(f.handles.placed)
                if is_
            ]
            if (handles, index) not in everyone:
                everyone.append((handles, index))
            values = self.norms(everyone, order)
            self._norms = {(id(h), i): (value, _version(h.flat)) for (h, i), value in zip(everyone, values)}
            self._norms_of = (order, self._writes)
            value, _ = self._norms.pop(key)
        return value

    # What the groups' stand-ins ask ---------------------------------------------------------------------------------

    def wrote(self) -> None:
        self._writes += 1

    @torch.no_grad()
    def overflowed(self, optimizer: int) -> Tensor:
        """As `Keeper`. One collective answers for all optimizers, until a backward, a step or a write that is not a scaler's.

        Under 'auto' a scaler may call once on one rank and twice on another: for gradients on the device and in host memory.
        """
        sharded = self.sharded
        if self._overflowed is None or self._overflowed_of != self._writes:
            _there(self._offload).refuse_while_away("a loss scaler's unscale_()")
            self.settle_step()
            self._flush()
            count = len(sharded.optimizers)
            self._overflowed = overflowed(sharded.trained, count, sharded.wire, sharded.device)
        self._writes += 1
        self._overflowed_of = self._writes
        return self._overflowed[optimizer]

    def settle_step(self) -> None:
        _there(self._offload).finish_step()

    @torch.no_grad()
    def slice_norm(self, place: int, order: float, device: torch.device) -> Tensor:
        """A span's, the same on every rank; nothing for who has no `place`.

        Ranks may differ in how they cut a span into shards, and in what tiers those are (`auto`). Which collectives there
        are depends on neither: each holds all spans; what leads to another is a write, or a question for a span that has
        had its answer. Spans as such (`place`) are as many on every rank.
        """
        sharded = self.sharded
        what = "the norm of a gradient in the optimizer's groups"
        _there(self._offload).refuse_clipping(what)
        if place < 0:  # without a collective: another rank may have no such shard, and would not take part
            return power_sum([], order, device)
        flats = self.sharded.trained
        self.settle([flats[place]])
        if place not in self._slice_norms or self._slice_norms_of != (order, self._writes):
            self._flush()
            local = self._power_sums(
                lambda: torch.stack([power_sum_of(flat, order, flat.device).to(sharded.device) for flat in flats])
            )
            norms = self._over_ranks(local, order)
            self._slice_norms = dict(enumerate(norms.unbind()))
            self._slice_norms_of = (order, self._writes)
        return self._slice_norms.pop(place).to(device)

    @torch.no_grad()
    def norm_over_ranks(self, part: Tensor, order: float) -> Tensor:
        """Of what was computed from a slice; one collective each."""
        sharded = self.sharded
        if sharded.config.is_auto and sharded.layout.shards > 1:
            raise StateError(
                "the norm of what was computed from a gradient in the optimizer's groups: under 'auto' ranks may cut their "
                "slices at different places. Use the norm of the gradient itself, or of model.parameters()' gradients"
            )
        local = power_sum([part] if part.numel() else [], order, part.device).to(sharded.device)
        return self._over_ranks(local, order).to(part.device)

    def _power_sums(self, of: Callable[[], Tensor]) -> Tensor:
        """`of()`, on its way into a collective; a gradient that one rank cannot read from disk is an error on all."""
        return read(self.sharded.wire, of, may_fail=self.sharded.storage.uses_disk)

    @torch.no_grad()
    def norms(self, grads: Sequence[tuple[Handles[Flat], int]], order: float) -> list[Tensor]:
        """One collective."""
        sharded = self.sharded
        local = self._power_sums(
            lambda: torch.stack(
                [_local_norm(handles.flat, index, order).to(sharded.device) for handles, index in grads]
            )
        )
        alone = [handles.flat.waits for handles, _ in grads]
        norms = local
        if sharded.layout.shards > 1 and not all(alone):
            norms = over_ranks(sharded.wire, local, order)
            if any(alone):
                norms = torch.where(torch.tensor(alone, device=local.device), local, norms)
        return list(root(norms, order).unbind())


def _there(reference: Callable[[], T | None]) -> T:
    found = reference()
    if found is None:
        raise StateError(_GONE)
    return found


def _version(flat: Flat) -> int:
    """Moves with every write to a gradient of the span, also past the stand-ins."""
    return sum(shard.grad_version for shard in flat.shards)


def _slicer(part: slice, device: torch.device) -> Callable[[Any], Any]:
    return lambda whole: whole.reshape(-1)[part].to(device)


def _local_norm(flat: Flat, index: int, order: float) -> Tensor:
    """Of this rank's elements, what ranks may add up (or compare), float64."""
    if flat.waits:
        parts = [flat.waiting(index).reshape(-1)]
    else:
        parts = []
        for shard, piece in flat.pieces(index):
            grad = shard.grad_to_read()
            if grad is not None:
                parts.append(grad[piece.here])
    return power_sum([part for part in parts if part.numel()], order, flat.device)
