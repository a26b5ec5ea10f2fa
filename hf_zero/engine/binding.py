"""A torch optimizer over the segments of this rank: the same object, the same `param_groups` dicts.

Only `group["params"]` is replaced, by a few long tensors (`segments`). Schedulers, hooks and wrappers that hold the
optimizer keep working. Full-matrix optimizers get one segment of true shape for each parameter that this rank owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..optimizers.kinds import Kind, moves_without_gradient
from ..optimizers.trials import inner_optimizers
from ..tiers.tier import Tier
from .context import Context
from .optimizer_state import elementwise_of, put_states
from .segment_states import SegmentStates
from .segments import Segment, runs_of, split
from .span import Span

Groups = list[list[nn.Parameter]]
"""By optimizer group, the model's parameters."""


class Binding:
    """One optimizer of one model.

    Args:
        index: its number among the model's optimizers.
        originals: by group, the model's parameters.
        kind: whether it steps over elements or full matrices.

    Attributes:
        segments: by group, the segments in it.
        moves_all: its step changes parameters without a gradient, too.
        param_names: names that user code gave parameters in `group["param_names"]`.
        shared_spans: spans that also have parameters of another optimizer or of none, with the indices of this one's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, index: int, originals: Groups, context: Context, kind: Kind
    ) -> None:
        self.optimizer, self.index, self.originals = optimizer, index, originals
        self.kind, self._context = kind, context
        self._group_of: dict[nn.Parameter, int] = {}
        self._grouped: Groups | None = None
        """The `originals` from which `_group_of` was built."""
        self.segments: list[list[Segment]] = [[] for _ in originals]
        self.spans: list[Span] = []
        self.shared_spans: dict[Span, list[int]] = {}
        self.moves_all = context.config.offloads and moves_without_gradient(optimizer)
        self._shown: list[list[int]] = []
        self.param_names: dict[nn.Parameter, str] = {}
        for group, params in zip(optimizer.param_groups, originals):
            self.param_names |= dict(zip(params, group.get("param_names", ())))

    @property
    def group_of(self) -> dict[nn.Parameter, int]:
        if self._grouped is not self.originals:
            self._grouped = self.originals
            self._group_of = {param: number for number, params in enumerate(self.originals) for param in params}
        return self._group_of

    def show_segments(self) -> None:
        """Put the segments into the optimizer's groups."""
        groups = self.optimizer.param_groups
        for group, mine in zip(groups, self.segments):
            group["params"] = [segment.tensor for segment in mine]
        self._shown = [list(map(id, group["params"])) for group in groups]

    def hide_offloaded(self) -> None:
        """Remove segments that are not on the device from the groups, for the optimizer's own step."""
        if any(span.tier is not Tier.DEVICE for span in self.spans):
            for group, mine in zip(self.optimizer.param_groups, self.segments):
                group["params"] = [each.tensor for each in mine if each.span.tier is Tier.DEVICE]

    def is_current(self) -> bool:
        """Return whether user code has not changed the groups since `show_segments`."""
        groups = self.optimizer.param_groups
        return [list(map(id, group["params"])) for group in groups] == self._shown

    def return_moved_tensors(self) -> None:
        """Make tensors whose memory the optimizer has replaced views of the master again, with their new values."""
        for group in self.segments:
            for segment in group:
                segment.was_moved = False
                if not segment.has_moved:
                    continue
                before: Any = segment.span.master[segment.as_slice]
                values = segment.tensor.detach()
                entries = self.state_of(segment)
                for name, value in entries.items():  # the optimizer may have kept the former memory as state
                    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == _storage_of(before):
                        entries[name] = value.clone()
                before.copy_(values.reshape(-1))
                segment.tensor.data = before.view(segment.tensor.shape)

    def state_of(self, segment: Segment) -> dict[str, Any]:
        found: dict[str, Any] = dict.get(self.optimizer.state, segment.tensor, {})
        return found

    def put_state(self, segment: Segment, entries: dict[str, Any]) -> None:
        """Replace the state of a segment; an empty one is removed."""
        if entries:
            dict.__setitem__(self.optimizer.state, segment.tensor, entries)
        else:
            dict.pop(self.optimizer.state, segment.tensor, None)

    def split(self, span: Span) -> None:
        """Split the segments of a span of this optimizer so that in each all parameters have a gradient, or none."""
        for group in self.segments:
            for segment in [each for each in group if each.span is span]:
                self.divide(segment, span.bucket.present.__getitem__)

    def divide(self, segment: Segment, key: Callable[[int], object]) -> list[Segment]:
        """Split a segment so that in each part all members have the same `key`. Returns the parts."""
        parts = self.parts(segment, key)
        if len(parts) < 2:
            return parts
        for owner in (next(group for group in self.segments if segment in group), segment.span.segments):
            at = owner.index(segment)
            owner[at : at + 1] = parts
        self.show_segments()
        return parts

    def parts(self, segment: Segment, key: Callable[[int], object]) -> list[Segment]:
        """Return the parts of a segment, and divide its state. The caller replaces the segment in `segments` by them."""
        runs = runs_of(segment, key)
        if len(runs) < 2:
            return [segment]
        pieces = split(segment, runs, dict.pop(self.optimizer.state, segment.tensor, {}))
        for new, entries in pieces:
            self.put_state(new, entries)
            new.show_grad()
        for inner in inner_optimizers(self.optimizer).values():
            entries = inner.state.pop(segment.tensor, {})
            for (new, _), (_, part) in zip(pieces, split(segment, runs, entries)) if entries else ():
                inner.state[new.tensor] = part
        return [new for new, _ in pieces]

    # Life -------------------------------------------------------------------------------------------------------------

    def guard_state(self, wait_for_step: Callable[[], None]) -> None:
        """Let access to `optimizer.state` wait for the running step. Called often: user code may assign another dictionary."""
        state = self.optimizer.state
        if not isinstance(state, SegmentStates) or state.wait_for_step != wait_for_step:  # a copy waits for nothing
            self.optimizer.state = SegmentStates(dict, state, wait_for_step)

    def take_state(self) -> None:
        """Move the state that the optimizer has for the model's parameters to the segments."""
        before: Any = self.optimizer.state
        known = {param for params in self.originals for param in params}
        saved = {param: entries for param, entries in before.items() if param in known}
        self.optimizer.state = defaultdict(dict, {key: each for key, each in before.items() if key not in known})
        for span in self.spans:
            put_states(self, span, saved, elementwise_of(self, saved))


def _storage_of(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()
