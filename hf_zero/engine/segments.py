"""Segments: the parts of the masters that an optimizer holds in its groups.

A segment is a contiguous part of one span's master slice whose parameters are in the same optimizer group and have a
gradient in the same steps. Spans are never rebuilt: groups that change and gradients that are absent split segments, and a
split makes views of the optimizer's state, with no copy and no communication. Segments are never merged again.

For optimizers that need full matrices (`Span.is_unsliced`) a segment is one parameter of true shape, on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import StateError
from ..tiers.array import OnDisk, Values
from ..tiers.tier import Tier
from .parameter import put_grad, raw_data, raw_grad, reads_no_values, set_raw_data, set_raw_grad

if TYPE_CHECKING:
    from .span import Span


class SegmentTensor(nn.Parameter):
    """The tensor of a group outside of the optimizer's own step, if an observer asked to see access to it.

    Inside the step tensors are plain parameters: torch chooses its fast kernels by their exact class.
    """

    _zero_segment: Segment

    @property
    def grad(self) -> Tensor | None:
        raw = raw_grad(self)
        for event in self._zero_segment.span.events.segment_grad_read:
            return event(self._zero_segment, raw)
        return raw

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        for event in self._zero_segment.span.events.segment_grad_assigned:
            if event(self._zero_segment, value):
                return
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        values = raw_data(self)
        for event in self._zero_segment.span.events.segment_data_read:
            event(self._zero_segment, values)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        set_raw_data(self, values)
        self._zero_segment.was_moved = True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class OffloadedSegmentTensor(SegmentTensor):
    """As `SegmentTensor`, of a master in host memory, whose update may be running, or on disk, where it has no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name != "grad" and not reads_no_values(func):
            for each in _offloaded_in((*args, *(kwargs or {}).values())):
                each._zero_segment.wait_for_values()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _offloaded_in(values: Any) -> list[OffloadedSegmentTensor]:
    found: list[OffloadedSegmentTensor] = []
    for each in values:
        if isinstance(each, OffloadedSegmentTensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            found += _offloaded_in(each)
    return found


class Segment:
    """Elements `start` to `stop` of a span's slice.

    A group of which this rank has no elements holds one segment without members, so that every rank takes part in collectives
    over the group, and sees its flags.

    Attributes:
        members: indices of the parameters that have elements here, in order.
        tensor: the entry in the optimizer's group. It views the master on the device or in host memory. For a master on disk
            it is NaN and never has a gradient, so that the optimizer's own step skips it.
        is_cleared: user code set its gradient to None since the last backward.
        was_moved: user code gave the tensor other memory (`tensor.data = values`) since `return_moved_tensors`.
        trains: one of the parameters requires a gradient. The tensor has the same flag, until user code sets it.
    """

    __slots__ = ("is_cleared", "members", "span", "start", "stop", "tensor", "trains", "was_moved")

    def __init__(self, span: Span, start: int, stop: int, members: Sequence[int]) -> None:
        self.span, self.start, self.stop, self.members = span, start, stop, list(members)
        self.is_cleared = self.was_moved = False
        self.tensor: nn.Parameter
        self.trains: bool
        self.refill()

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def tier(self) -> Tier:
        """Return the tier of its state. A segment without elements is never on disk."""
        is_in_host = not self.numel and self.span.tier is Tier.DISK
        return Tier.HOST if is_in_host else self.span.tier

    @property
    def is_matrix(self) -> bool:
        """Return whether the segment is one parameter of true shape."""
        return bool(self.members) and self.span.layout.is_unsliced

    def _values(self) -> Tensor:
        if not self.members:
            return torch.empty(0, dtype=self.span.master_dtype, device=self.span.device)
        part: Values = self.span.master[self.start : self.stop]
        if isinstance(part, OnDisk):
            return torch.full((), float("nan"), dtype=part.dtype, device="cpu").expand(self.shape)
        return part.view(self.span.layout.slots[self.members[0]].spec.shape) if self.is_matrix else part

    @property
    def has_moved(self) -> bool:
        """Return whether the tensor no longer views the master."""
        span = self.span
        if span.tier is Tier.DISK or self.start == self.stop:
            return False
        master: Any = span.master
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.data_ptr() != master.data_ptr() + self.start * span.master_dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.span.layout.slots[self.members[0]].spec.shape if self.is_matrix else (self.numel,))

    def set_reports_access(self, reports: bool) -> None:
        """Turn events for access to the tensor's `grad` and `data` on or off."""
        if reports:
            self.tensor._zero_segment = self  # type: ignore[attr-defined]
        kind = SegmentTensor if self.span.tier is Tier.DEVICE else OffloadedSegmentTensor
        self.tensor.__class__ = kind if reports else nn.Parameter

    def wait_for_values(self) -> None:
        """Wait for the values of an offloaded segment that user code reads or writes.

        Raises:
            StateError: the master is on disk.
        """
        if isinstance(self.span.master, OnDisk):
            raise StateError(
                "the tensors of the optimizer's groups have no values where its state is on disk. Read and write "
                "model.parameters(), or use zero.full_parameter and zero.set_full_parameter"
            )
        self.span.unit.wait_for_step()

    @property
    def has_grad(self) -> bool:
        """Return whether the next step updates its elements."""
        bucket = self.span.bucket
        if bucket.grad is None or self.is_cleared:
            return False
        for index in self.members:  # noqa: SIM110 -- called for every segment of every step
            if bucket.present[index]:
                return True
        return False

    def sync_requires_grad(self) -> None:
        """Set the tensor's `requires_grad` from its parameters."""
        if self.members:
            self.tensor.requires_grad_(any(self.span.params[index].requires_grad for index in self.members))
        self.trains = self.tensor.requires_grad

    def refill(self) -> None:
        """Rebuild the tensor after its bounds or members changed."""
        values = self._values()
        # By assignment: the tensor needs a version counter of its own, which counts writes of the optimizer and user code only.
        self.tensor = nn.Parameter(torch.empty(0, dtype=values.dtype, device=values.device), requires_grad=False)
        self.tensor.data = values
        self.sync_requires_grad()

    def use_master(self, slice_values: Tensor) -> None:
        """Point the tensor at `slice_values`, the master's new memory."""
        part = slice_values[self.start : self.stop]
        with torch._C.DisableTorchFunctionSubclass():
            set_raw_data(self.tensor, part.view(self.tensor.shape))

    def show_grad(self) -> None:
        """Set the tensor's gradient to the reduced one of its elements; None if no rank has one, or it must be hidden."""
        span, context, shown = self.span, self.span.context, None
        is_hidden = context.states_offloaded or span.tier is Tier.DISK
        is_hidden = is_hidden or (context.hides_host_gradients and span.tier is not Tier.DEVICE)
        if self.has_grad and not is_hidden:
            grad: Any = span.bucket.grad
            shown, shape = grad[self.start : self.stop], self.tensor.shape
            if shown.shape != shape:
                shown = shown.view(shape)
        put_grad(self.tensor, shown)


def first_segments(span: Span, groups: Sequence[object | None]) -> list[Segment]:
    """Return the segments of a span that was just built.

    Args:
        groups: by parameter, the optimizer group that it is in; None for a parameter that no optimizer has.
    """
    found: list[Segment] = []
    for index, part in span.parts():
        if groups[index] is None:
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and not last.is_matrix
            and last.stop == part.start
            and groups[last.members[-1]] == groups[index]
        ):
            last.stop = part.stop
            last.members.append(index)
            last.refill()
        else:
            found.append(Segment(span, part.start, part.stop, [index]))
    if found and not found[-1].is_matrix and span.layout.used_numel < span.layout.numel:
        _take_padding(found[-1])
    # Parameters without elements are on every rank: they have gradients and state like any other.
    empty = [index for index, slot in enumerate(span.layout.slots) if not slot.spec.numel and groups[index] is not None]
    return [*(Segment(span, 0, 0, [index]) for index in empty), *found]


def _take_padding(segment: Segment) -> None:
    """Add the span's padding to the last segment of its last rank, whose length then stays aligned for kernels."""
    span = segment.span
    low, _ = span.layout.bounds(span.rank)
    if low + segment.stop == span.layout.used_numel:
        segment.stop = span.local_numel
        segment.refill()


def runs_of(segment: Segment, key: Callable[[int], object]) -> list[list[int]]:
    """Return a segment's members, divided into runs of equal `key`."""
    runs: list[list[int]] = []
    for index in segment.members:
        if runs and key(runs[-1][0]) == key(index):
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def split(
    segment: Segment, runs: Sequence[Sequence[int]], state: dict[str, Any]
) -> list[tuple[Segment, dict[str, Any]]]:
    """Return a segment for each of these runs of members, with its part of the optimizer's state.

    State tensors become views of the old ones, so optimizers see the same values. Single values (`step`) are copied.
    """
    out = []
    start = segment.start
    for number, run in enumerate(runs):
        part = segment.span.part_of(run[-1])
        if part is None:
            raise StateError("a segment has a parameter of which this rank has no elements")
        stop = segment.stop if number == len(runs) - 1 else part.stop
        new = Segment(segment.span, start, stop, run)
        new.set_reports_access(isinstance(segment.tensor, SegmentTensor))
        cut = slice(start - segment.start, stop - segment.start)
        out.append((new, {name: _part_of_state(value, segment, cut) for name, value in state.items()}))
        start = stop
    return out


def _part_of_state(value: Any, segment: Segment, cut: slice) -> Any:
    if is_elementwise(value, segment):
        return value[cut]
    return value.clone() if isinstance(value, Tensor) else value


def is_elementwise(value: Any, segment: Segment) -> bool:
    """Return whether a state of an optimizer has one value per element of a segment."""
    return (
        isinstance(value, (Tensor, OnDisk))
        and value.dim() == 1
        and value.numel() == segment.numel
        and segment.numel > 1
    )
