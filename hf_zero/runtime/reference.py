"""The first steps beside plain training, for `debug=True`: a few parameters' gradients and updates, computed a second time.

* Gradients: what each rank has before its unit is reduced is exchanged whole and averaged in float64; the owners' slices must
  have grown by that.
* Updates: values, gradient and optimizer state of a parameter are brought together from the owners' slices, the optimizer's
  own class makes its step over the whole, in true shape; the slices must have the same values after the engine's step, and
  where whole parameters stay, what is computed with must be those values.

It goes around the schedule, the wire's gathers and reduces, spans, tiers and the stepping thread, and changes nothing of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import NumericsError
from .optimizers.shadow_optimizer import Twin, copied
from .values.sharded import Place, Sharded, gradient_of, master_of, state_of
from .values.unit import Unit

STEPS = 3
"""So many steps are compared."""
_PLACES = 4
"""Parameters in each, others each time."""
_NUMEL = 1 << 20
"""Larger parameters are left out: every rank has them whole meanwhile."""
_SHARE = 1e-3
"""Of the largest change in a parameter, what an update may be off by: kernels differ in the last bits of a change."""


@dataclass
class _Expected:
    """What plain training makes of one parameter."""

    place: Place
    before: Tensor
    after: Tensor


class Reference:
    """Of one sharded model."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        self._said: set[str] = set()
        self._grads: dict[str, Tensor] = {}
        """Own slices of sampled gradients before the backward under way has reduced their unit."""
        self._local: dict[str, Tensor] = {}
        """This rank's own gradients in it, whole, float64."""
        self._expected: list[_Expected] = []
        self._why_not: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None  # whose step is compared

    @property
    def is_due(self) -> bool:
        return self._sharded.wire.watch.step < STEPS

    def _sample(self) -> list[Place]:
        """The same on every rank."""
        places = [
            place
            for place in self._sharded.places.values()
            if place.flat.span.is_updated and 0 < place.slot.spec.numel <= _NUMEL
        ]
        stride = max(1, len(places) // _PLACES)
        return places[self._sharded.wire.watch.step % stride :: stride][:_PLACES]

    # Gradients --------------------------------------------------------------------------------------------------------

    def before_reduce(self, unit: Unit) -> None:
        if self._sharded.wire.size == 1 or self._sharded.config.step_in_backward or not self.is_due:
            return
        for place in self._sample():
            if place.unit is not unit:
                continue
            name = place.slot.spec.name
            place.flat.notice_cleared()
            if name not in self._grads:
                self._grads[name] = _wide(place.local(gradient_of))
                self._local[name] = torch.zeros(
                    place.slot.spec.numel, dtype=_wide_of(place.flat.master_dtype), device="cpu"
                )
            for part in place.flat.local_parts(place.at):
                self._local[name] += _wide(part.reshape(-1))

    def broke_off(self) -> None:
        """The backward under way raised: all gradients are gone."""
        self._grads, self._local = {}, {}

    def after_backward(self, *, reduced: bool) -> None:
        """A collective with `reduced`, on the first steps.

        Raises:
            NumericsError: on every rank, where gradients are not the mean of the ranks' own.
        """
        grads, local, self._grads, self._local = self._grads, self._local, {}, {}
        if self._sharded.wire.size == 1 or self._sharded.config.step_in_backward or not (reduced and self.is_due):
            return
        everyone: list[dict[str, Tensor]] = self._sharded.wire.exchange(local)
        problem = None
        for place in self._sample():
            name = place.slot.spec.name
            parts = [theirs[name] for theirs in everyone if name in theirs]
            if name in grads and parts and problem is None:
                problem = self._off_mean(place, grads[name], parts)
        _raise_first(self._sharded.wire.exchange(problem))

    def _off_mean(self, place: Place, before: Tensor, parts: Sequence[Tensor]) -> str | None:
        """`parts`: of the ranks that have a gradient of it."""
        size, now = self._sharded.wire.size, _wide(place.local(gradient_of))
        mean = place.own_part(torch.stack([*parts]).sum(0) / size)
        if not now.numel() or any(kind_of(each) for each in (now, before, *parts)):
            return None  # not finite: that has its own check
        largest = max(float(part.abs().max()) for part in parts)
        kept = max(float(now.abs().max()), float(before.abs().max()))
        allowed = (
            64 * torch.finfo(place.flat.reduce_dtype).eps * largest
            + 8 * torch.finfo(place.flat.master_dtype).eps * kept
        )
        off = (now - before - mean).abs()
        if float(off.max()) <= allowed:
            return None
        at = int(off.argmax())
        return (
            f"the gradient of {_named(place)} is not the mean of the ranks' own gradients: element {at} of this rank's part "
            f"has grown by {_number((now - before)[at])}, the mean is {_number(mean[at])}. Bytes that the network or the "
            "memory changed, a communication hook, or a fault of hf_zero"
        )

    # Updates ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, index: int, why_not: str | None) -> None:
        """Gradients are as the optimizer is to have them. A collective on the first steps.

        Args:
            index: which of the model's optimizers it is.
            why_not: why this step cannot be compared; the same on every rank.
        """
        self._expected, self._why_not, self._optimizer = [], why_not, optimizer
        if not self.is_due:
            return
        if why_not is None:
            if self._sharded.config.step_in_backward:
                why_not = "with step_in_backward updates are made before the step"
            elif any(flat.wholes is not None and flat.span.optimizer == index for flat in self._sharded.trained):
                why_not = "it steps over whole parameters, as in plain training"
            self._why_not = why_not
        for place in self._sample() if why_not is None else ():
            if place.slot.spec.optimizer != index:
                continue
            if not place.flat.present[place.at] or not place.flat.is_reduced:
                continue
            before, grad, state = place.whole(master_of), place.whole(gradient_of), self._state(place, optimizer)
            if kind_of(before) or kind_of(grad):
                continue
            try:
                after = before.clone()  # no random number is drawn, see `supported_optimizers`
                Twin(optimizer, fuse=False).step(place.flat.span.spec.group, after, grad, state)
            except Exception as error:  # whatever a user's optimizer raises over a parameter by itself
                self._why_not = f"its step over one parameter alone failed ({type(error).__name__}: {error})"
                continue
            self._expected.append(_Expected(place, before, after))

    def _state(self, place: Place, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole, in the parameter's shape. A collective."""
        out: dict[str, Any] = {}
        for key, elementwise in sorted(place.flat.state_names(optimizer).items()):
            if elementwise:
                out[key] = place.whole(state_of(optimizer, key))
            else:
                out[key] = copied(place.flat.state(optimizer, key))
        return out

    @torch.no_grad()
    def after_step(self) -> None:
        """All updates are done. A collective on the first steps.

        Raises:
            NumericsError: on every rank, where a parameter is not what plain training makes of it.
        """
        expected, self._expected = self._expected, []
        why_not, self._why_not = self._why_not, None
        if not expected and why_not is None:
            return
        problem: str | None = None
        for each in expected:
            problem = self._off_update(each, each.place.whole(master_of)) or problem
        told = self._sharded.wire.exchange((problem, why_not))
        reason = next((why for _, why in told if why is not None), None)
        if reason is not None:
            self._say(reason)
            return
        _raise_first([found for found, _ in told])

    def _off_update(self, each: _Expected, now: Tensor) -> str | None:
        change = float((each.after - each.before).abs().max())
        allowed = _SHARE * change + 4 * torch.finfo(now.dtype).eps * float(each.before.abs().max())
        off = (now - each.after).abs()
        if not float(off.max()) <= allowed:
            at = int(off.argmax())
            made, wanted = ((values - each.before).reshape(-1)[at] for values in (now, each.after))
            return (
                f"the update of {_named(each.place)} is not what plain training makes of the same gradient: element {at} has "
                f"changed by {_number(made)}, a step of {type(self._optimizer).__name__} over the whole parameter "
                f"changes it by {_number(wanted)}. An optimizer that talks to other ranks in its step, looks at the "
                "whole of a parameter or at other parameters, or a fault of hf_zero; stage 0 runs it as plain training does"
            )
        place = each.place
        if place.unit.policy.keep_full and place.at not in place.flat.pinned:
            shown = place.flat.params[place.at].data
            if not torch.equal(shown, now.to(shown.dtype)):
                return (
                    f"{_named(place)} is computed with other values than the optimizer has made: bytes that the network or the "
                    "memory changed, or a fault of hf_zero"
                )
        return None

    # Both -------------------------------------------------------------------------------------------------------------

    def _say(self, why: str) -> None:
        if why not in self._said and self._sharded.wire.rank == 0:
            self._said.add(why)
            name = type(self._optimizer).__name__
            print(f"hf_zero: debug: updates of {name} are not compared with plain training: {why}", file=sys.stderr)


def _raise_first(problems: Sequence[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise NumericsError(f"found on rank {rank}, the same error on every rank: {problem}")


def _named(place: Place) -> str:
    return f"parameter {place.slot.spec.name!r} of unit {place.unit.name!r}"


def _wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _wide(values: Tensor) -> Tensor:
    return values.detach().to("cpu", _wide_of(values.dtype), copy=True)


def _number(value: Tensor) -> str:
    return f"{value.item():.6g}"


def kind_of(tensor: Tensor) -> str | None:
    """`NaN` or `inf`, where one is in the tensor; None where all is finite, or nobody can look."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        return None  # inside `torch.func`, or of `is_grads_batched=True`: there is no one value
    with torch.no_grad():
        values = tensor.detach()
        if values.layout is torch.sparse_coo:
            values = values.coalesce().values()
        elif values.is_nested:  # `nn.TransformerEncoder` evaluates padded batches as such
            values = values.values()
        if values.layout is not torch.strided or bool(values.isfinite().all()):
            return None
        return "NaN" if bool(values.isnan().any()) else "inf"


def kind_in(tensors: Iterable[Any]) -> str | None:
    return next((kind for each in tensors if isinstance(each, Tensor) and (kind := kind_of(each))), None)
