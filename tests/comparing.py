"""How the oracle compares: tolerances, in one place, and what differs between two runs of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.settings import Setting

if TYPE_CHECKING:
    from tests.oracle import Program

# A weight is compared by how far training moved it: |ours - reference| may be this share of the farthest that any element
# of the tensor moved, plus rounding of its magnitude. So a gradient that is off by one part in a thousand is seen in fp32.
SHARE_OF_MOVE: Mapping[str, float] = {"fp32": 2e-4, "bf16": 4e-2, "fp16": 1e-2, "int8": 2e-1}
ROUNDING: Mapping[str, float] = {"fp32": 2e-6, "bf16": 4e-6, "fp16": 4e-6, "int8": 4e-6}
"""Share of a tensor's largest magnitude: masters are float32 in every precision."""
SEEN: Mapping[str, float] = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3, "int8": 1e-1}
"""Relative, of losses and of what a program looked at, by the largest magnitude of the value."""


def _gap(ours: Any, theirs: Any, scale: float, share: float) -> str:
    """What is wrong with one value; `scale`: what the allowed share is of."""
    if isinstance(ours, Tensor) != isinstance(theirs, Tensor):
        return f"{ours!r} instead of {theirs!r}"
    if not isinstance(ours, Tensor):
        if isinstance(ours, float) and isinstance(theirs, float):
            ours, theirs = torch.tensor(ours, dtype=torch.double), torch.tensor(theirs, dtype=torch.double)
        else:
            return "" if ours == theirs else f"{ours!r} instead of {theirs!r}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    if not ours.numel():
        return ""
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return "" if torch.equal(ours, theirs) else f"{ours} instead of {theirs}"
    gap = (ours - theirs).abs().double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    gap = torch.where(same, 0.0, gap)
    worst = gap.max().item()
    if worst <= share * scale:  # NaN is not
        return ""
    at = int(gap.nan_to_num(torch.inf).argmax())
    return (
        f"off by {worst:.2e}, allowed {share * scale:.2e} (at element {at}: {ours.flatten()[at].item()} instead of "
        f"{theirs.flatten()[at].item()})"
    )


def _size(value: Any) -> float:
    if not isinstance(value, Tensor):
        return abs(value) if isinstance(value, float) else 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = value[value.isfinite()].abs().double()
    return finite.max().item() if finite.numel() else 0.0


def compare(program: Program, setting: Setting, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return what differs, one line each."""
    kind = "int8" if setting.wire != "none" else setting.precision
    wrong = []
    if [what for what, _ in ours["seen"]] != [what for what, _ in theirs["seen"]]:
        wrong.append(f"looked at {[what for what, _ in ours['seen']]} instead of {[w for w, _ in theirs['seen']]}")
    for at, ((what, mine), (_, other)) in enumerate(zip(ours["seen"], theirs["seen"])):
        if gap := _gap(mine, other, _size(other) + 1e-6, program.loose * SEEN[kind]):
            wrong.append(f"{what} (look {at}): {gap}")
    for key in (key for key in theirs if key.startswith(("weights", "state"))):
        if key not in ours:
            continue  # of rank 0 alone
        mine, other = ours[key], theirs[key]
        if mine.keys() != other.keys():
            wrong.append(f"{key}: {sorted({*mine} ^ {*other})} on one side only")
        before = theirs.get("before" + key.removeprefix("weights"), {}) if key.startswith("weights") else {}
        for name in mine.keys() & other.keys():
            value, share = other[name], program.loose * SHARE_OF_MOVE[kind]
            was = before.get(name)
            is_moved = was is not None and was.shape == value.shape and value.is_floating_point()
            moved = _size(value - was) if is_moved else _size(value)
            allowed = share * moved + ROUNDING[kind] * _size(value) + 1e-9
            if program.exact and kind == "fp32" and setting.ranks < 3:
                allowed = 0.0
            if gap := _gap(mine[name], value, 1.0, allowed):
                wrong.append(f"{key} {name}: {gap}")
    return wrong
