"""For tests of offloading: small blocks and records, values that are equal."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.transports import SMALL, Roads

SMALL_ROADS = Roads(sizes=SMALL)


def same(mine: Any, theirs: Any) -> bool:
    """Equal values, and of tensors equal types and shapes; on the meta device there are no values."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(mine == theirs)
    if (mine.dtype, mine.shape, mine.device) != (theirs.dtype, theirs.shape, theirs.device):
        return False
    return mine.is_meta or torch.equal(mine, theirs)


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a run ends with: weights, and the optimizer's state in the order of its keys."""
    state = optimizer.state_dict()["state"]
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(state[i][key] for i in state for key in sorted(state[i])),
    ]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs))
