"""Compare the step count and the optimizers' options (`lr`, `betas`, …) across ranks, as one number in every backward."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..comm.position import ranks_text
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..errors import RankMismatchError

_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})
_PLAIN = _NUMBERS | {tuple}
_SHORT_NUMEL = 16
"""Tensors of at most so many elements are options (`lr`), compared by value."""
_MASK = (1 << 30) - 1


class OptimizerOptionsCheck(Observer):
    """Compares the number of steps and the options of the optimizers' groups over the ranks.

    Options that are tensors on a GPU are left out: to read them, every backward would wait for the device.
    """

    def attach(self, engine: Engine) -> None:
        self._engine, self._wire = engine, engine.context.wire
        self._seen: list[Any] = []
        self._mark = 0
        self._may_change_in_place = True

    def values_for_max(self) -> list[int]:
        """Return a number that differs where options or the count of steps differ, and its complement."""
        mark = zlib.crc32(b"%d %d" % (self._options(), self._wire.watch.step)) & _MASK
        return [mark, _MASK - mark]

    def check_max_values(self, highest: list[int]) -> None:
        """Compare. The highest number and the highest complement belong together only if all ranks are equal.

        Raises:
            RankMismatchError: with the first difference, on every rank.
        """
        if sum(highest) == _MASK:
            return
        told = self._wire.exchange((self._wire.watch.step, self._named()))
        steps = [step for step, _ in told]
        if len(set(steps)) > 1:
            raise RankMismatchError(
                f"ranks average the gradients of different steps: rank {self._wire.rank} has made {self._wire.watch.step} "
                f"optimizer steps, others from {min(steps)} to {max(steps)}. Call optimizer.step() on every rank or on none, "
                "and use no_sync for the same micro-batches; their parameters may differ, so resume from the last checkpoint"
            )
        refuse_difference([named for _, named in told], self._wire.watch.step)

    def _options(self) -> int:
        groups = [group for binding in self._engine.bindings for group in binding.optimizer.param_groups]
        now = [value for group in groups for value in group.values() if type(value) in _PLAIN]
        if self._may_change_in_place or now != self._seen:
            self._seen, self._may_change_in_place = now, False
            self._mark = zlib.crc32(repr(self._named()).encode())
        return self._mark

    def _named(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        bindings = self._engine.bindings
        for binding in bindings:
            which = f" of optimizer {binding.index}" if len(bindings) > 1 else ""
            for number, group in enumerate(binding.optimizer.param_groups):
                for key, value in group.items():
                    if key in ("params", "param_names") or (isinstance(value, Tensor) and value.device.type != "cpu"):
                        continue
                    self._may_change_in_place = self._may_change_in_place or type(value) not in _PLAIN
                    found = plain(value)
                    if found is not None:
                        out[f"{key!r} of the optimizer's group {number}{which}"] = found[0]
        return out


def plain(value: Any) -> tuple[Any] | None:
    """Return a value that ranks can compare, in a tuple of one; None if there is none."""
    if type(value) in _NUMBERS:
        return (value,)
    if isinstance(value, Tensor):
        return (value.tolist(),) if value.numel() <= _SHORT_NUMEL and not value.is_meta else None
    if isinstance(value, (tuple, list)):
        inner = [plain(each) for each in value]
        return None if None in inner else ([each[0] for each in inner if each is not None],)
    return None


def refuse_difference(everyone: Sequence[Mapping[str, Any]], step: int) -> None:
    """Compare the values that all ranks have for each name; a rank may lack a name. Values are plain, digests are bytes.

    Raises:
        RankMismatchError: two ranks differ; the message has the first difference.
    """
    for name in dict.fromkeys(name for mine in everyone for name in mine):
        found = {rank: mine[name] for rank, mine in enumerate(everyone) if name in mine}
        counted = Counter(map(repr, found.values()))
        if len(counted) == 1:
            continue
        usual = next(rank for rank in found if repr(found[rank]) == counted.most_common(1)[0][0])
        odd = [rank for rank in found if repr(found[rank]) != repr(found[usual])]
        what = f"{name} is not on {ranks_text(odd)} what it is on rank {usual}"
        if isinstance(found[usual], bytes):
            advice = (
                "Write it on every rank alike (torch counts no writes through `.data`), or, a parameter, inside "
                "zero.GatheredParameters(params, modifier_rank=0)"
            )
        else:
            what += f" ({found[usual]!r} on rank {usual}, {found[odd[0]]!r} on rank {odd[0]})"
            advice = (
                "Set it on every rank alike: not by a scheduler or a branch of one rank, nor by a sum over optimizer.state, "
                "which has this rank's slices (zero.full_optimizer_state(param, name) gives whole states)"
            )
        raise RankMismatchError(f"ranks differ in step {step}: {what}. {advice}")
