"""`debug=True`: compare values that must be equal on all ranks around each step; refuse steps with NaN or infinity."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.position import ranks_text
from ..engine.engine import Engine
from ..engine.graph import backward_id, tensors_in
from ..engine.observer import Observer
from ..engine.parameter import raw_data
from ..engine.span import Span
from ..engine.unit import Unit
from ..errors import NumericsError
from ..tiers.fingerprint import fingerprint
from .optimizer_options import plain, refuse_difference

CLOSE, EVERY = 10, 10
"""Weights and buffers are compared in the first `CLOSE` steps, and in one of `EVERY` afterwards."""


class Debug(Observer):
    """Compares values of one model across ranks by fingerprints, and finds values that are not finite.

    The search is local. Ranks exchange findings only in `before_step` and `after_step`, which every rank reaches in every step,
    so errors are equal on all ranks. Numbers of forwards may differ.
    """

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._wire = engine, engine.context, engine.context.wire
        self._step = 0
        self._in_pass: dict[str, bytes] = {}
        """Digests of buffers and gathered weights, which were equal when they were sent."""
        self._first_found: str | None = None
        """Place of the first value that is not finite on this rank, if the next step has a gradient of it."""
        self._is_used = False
        """A backward has ended since: `zero_grad` discards the value with the gradients."""
        hosts = [(unit, host) for unit in engine.units for host in unit.hosts]
        self._handles = [
            host.register_forward_hook(partial(self._after_unit, unit), with_kwargs=True) for unit, host in hosts
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    # Passes -----------------------------------------------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        step = self._wire.watch.step
        return step < CLOSE or step % EVERY == 0

    @property
    def _checks_now(self) -> bool:
        return self._is_due and torch.is_grad_enabled() and backward_id() < 0

    def before_forward(self, args: Any, kwargs: Any) -> None:
        for name, buffer in self._context.model.named_buffers() if self._checks_now else ():
            if not buffer.is_meta and buffer.layout is torch.strided:
                key = f"buffer {name!r} ({str(buffer.dtype).removeprefix('torch.')} {tuple(buffer.shape)})"
                if key not in self._in_pass:
                    self._in_pass[key] = _fingerprint(buffer)
        self._check_finite("the model's inputs (this rank's batch) have", tensors_in((args, kwargs)))

    def after_forward(self, output: Any) -> None:
        self._check_finite("the model's output (its loss, where it has one) is", tensors_in(output))

    def unit_gathered(self, unit: Unit) -> None:
        if self._context.reshards and self._checks_now:
            for name, span, index in _parameters([unit]):
                if name not in self._in_pass:
                    self._in_pass[name] = _fingerprint(span.view(index))

    def _after_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if backward_id() < 0:
            self._check_finite(f"the inputs of unit {unit.name!r} have", tensors_in((args, kwargs)))
            self._check_finite(f"the output of unit {unit.name!r}, of finite inputs, is", tensors_in(output))

    def before_reduce(self, unit: Unit) -> None:
        for span in unit.trained:
            for index in range(len(span.params)):
                what = f"this rank's own gradient of {span.name_of(index)!r} of unit {unit.name!r} is"
                self._check_finite(what, [span.bucket.local(index)])

    def _check_finite(self, what: str, tensors: Iterable[Any]) -> None:
        if self._first_found is None and (kind := _kind_in(tensors)) is not None:
            self._first_found = f"{what} {kind}"

    def after_backward(self) -> None:
        self._is_used = self._first_found is not None

    def after_zero_grad(self) -> None:
        if self._is_used:  # keeps a finding whose backward is still to come
            self._forget()

    def _forget(self) -> None:
        self._first_found, self._is_used = None, False

    # Steps ------------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare values of the passes and of now; check the gradients that the optimizer gets. A collective.

        Raises:
            RankMismatchError: with the first difference, on every rank.
            NumericsError: a gradient is not finite; says where the value was first found.
        """
        self._engine.wait_for_host_steps()
        self._step = self._wire.watch.step
        found = dict(self._values_to_compare())
        self._in_pass = {}
        digest = zlib.crc32(repr(sorted((name, repr(value)) for name, value in found.items())).encode())
        if len(set(self._wire.exchange(digest))) > 1:
            refuse_difference(self._wire.exchange(found), self._step)
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(found_inf.sum()):  # a loss scaler's: the optimizer skips this step
            return
        spans = [span for each in self._engine.bindings if each.optimizer is optimizer for span in each.spans]
        parts = ((span, *part) for span in spans if span.trainable for part in span.bucket.parts())
        unseen = (
            "Every rank's own gradients were finite: their sum overflowed (use a wider reduce_dtype), or the program changed "
            "gradients after the reduction"
        )
        self._refuse(
            _first_not_finite(parts, "the gradient of "), lambda seen: f"No weight was changed. {seen or unseen}"
        )

    def _values_to_compare(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values that must be equal on all ranks: plain values, digests of weights and buffers."""
        for binding in self._engine.bindings:
            for segment in (each for group in binding.segments for each in group):
                if segment.is_matrix and segment.span.layout.shards > 1:
                    continue  # has one owner: nothing to compare
                (count,) = plain(binding.state_of(segment).get("step")) or (None,)
                for index in segment.members:
                    yield f"the optimizer's 'step' of {_name(segment.span, index)}", count
        # With `step_in_backward` owners have new slices already.
        if self._is_due and not self._context.reshards and not self._context.config.step_in_backward:
            for name, span, index in _parameters(self._engine.units):
                yield name, _fingerprint(raw_data(span.params[index]))
        yield from self._in_pass.items()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the values that the optimizer wrote. A collective.

        Raises:
            NumericsError: one is not finite.
        """
        self._engine.wait_for_host_steps()
        unseen = (
            f"Its gradient was finite: the step of {type(optimizer).__name__} made it (lr, eps, an overflowed state)"
        )
        masters = ((span, 0, span.master) for span in self._engine.trained)
        resume = "Weights have it now: resume from the last checkpoint"
        self._refuse(_first_not_finite(masters, ""), lambda seen: f"{seen or unseen}. {resume}")
        self._forget()

    def _refuse(self, mine: str | None, why: Callable[[str], str]) -> None:
        told = self._wire.exchange((mine, self._first_found))
        for rank, (what, _) in enumerate(told):
            if what is not None:
                self._forget()
                seen = why(_first_of([first for _, first in told]))
                raise NumericsError(f"step {self._step}, on rank {rank}: {what}. {seen}")


def _first_of(everyone: list[str | None]) -> str:
    """Return where each rank found a non-finite value first; empty if none has."""
    parts = [f"rank {rank}: {seen}" for rank, seen in enumerate(everyone) if seen is not None]
    clean = [rank for rank, seen in enumerate(everyone) if seen is None]
    others = f"; on {ranks_text(clean)} all was finite until gradients were averaged" if clean else ""
    return f"First seen on {'; on '.join(parts)}{others}" if parts else ""


def _parameters(units: Iterable[Unit]) -> Iterator[tuple[str, Span, int]]:
    """Yield the parameters of units: a name for messages, the span and the index there."""
    for unit in units:
        for span in unit.spans:
            for index in range(len(span.params)):
                yield _name(span, index), span, index


def _name(span: Span, index: int) -> str:
    return f"parameter {span.name_of(index)!r} of unit {span.unit.name!r}"


def _fingerprint(values: Tensor) -> bytes:
    with torch.no_grad():
        return repr(fingerprint(values.detach()).tolist()).encode() if values.numel() else b""


def _first_not_finite(parts: Iterable[tuple[Span, int, Any]], what: str) -> str | None:
    """Return the first part of this rank's slices that is not finite; values on disk are not read."""
    for span, start, values in parts:
        kind = _kind_in([values])
        if kind is not None:
            at = span.layout.bounds(span.rank)[0] + start + int((~values.isfinite()).nonzero()[0, 0])
            index = max((number for number, slot in enumerate(span.layout.slots) if slot.offset <= at), default=0)
            return f"{what}{span.name_of(index)!r} of unit {span.unit.name!r} is {kind}"
    return None


def _kind_in(tensors: Iterable[Any]) -> str | None:
    """Return `NaN` or `inf` if a dense tensor that can be read has it; the first one decides."""
    functorch = torch._C._functorch
    for each in tensors:
        if not isinstance(each, Tensor) or not (each.is_floating_point() or each.is_complex()) or each.is_meta:
            continue
        if each.is_nested or each.layout is not torch.strided:
            continue
        if functorch.is_functorch_wrapped_tensor(each) or functorch.is_legacy_batchedtensor(each):
            continue  # inside `torch.func`, or of `is_grads_batched=True`: has no single value
        with torch.no_grad():
            values = each.detach()
            if not bool(values.isfinite().all()):
                return "NaN" if bool(values.isnan().any()) else "inf"
    return None
