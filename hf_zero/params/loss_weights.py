"""Weight the losses of ranks with different numbers of samples, or samples of different weight.

The engine averages gradients over ranks with equal weights. Scaling each loss by weight · ranks / total turns that average into
the weighted mean over all samples. It is exact at every stage and tier, with accumulation, clipping and `step_in_backward`,
because only the loss changes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..comm.process_group import home_device
from ..comm.wire import Wire
from ..errors import ConfigError


def sum_over_ranks(wire: Wire, weight: float | Tensor, problem: str | None = None) -> float:
    """Return the sum of all ranks' weights; one scalar all-reduce. A collective.

    Args:
        problem: an error of this rank, which every rank raises.

    Raises:
        ConfigError: on every rank: a rank's weight is not a finite number of at least 0, or all are 0. Names the rank.
    """
    value = _number(weight)
    if problem is None and not 0 <= value < math.inf:
        problem = f"expected a weight that is a finite number of at least 0, found {weight!r}"
    # A NaN in the sum signals a problem. Only then a second message says which.
    mine = torch.tensor(math.nan if problem else value, dtype=torch.float64, device=home_device())
    total = float(wire.sum_scalar(mine))
    if not math.isfinite(total):
        problems = [(rank, text) for rank, text in enumerate(wire.exchange(problem)) if text]
        rank, text = problems[0] if problems else (0, "the sum of the weights is too large")
        raise ConfigError(f"rank {rank}: {text}")
    if total == 0:
        raise ConfigError(
            "the weights of all ranks are 0, so the step has nothing to learn from. Leave it out on every rank"
        )
    return total


def loss_problem(loss: Tensor) -> str | None:
    """Return the problem of a loss to weigh, or None."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        found = f"shape {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        return f"expected a loss of one floating-point number, the mean over this rank's samples, found {found}"
    return None


def scale_loss(loss: Tensor, weight: float | Tensor, total: float, ranks: int) -> Tensor:
    """Scale `loss` so that the mean over ranks of its gradients is the sum of weight · gradient / total.

    A weight of 0 gives a loss and gradients of 0, even if the loss is NaN, as a mean over no samples is.

    Raises:
        ConfigError: a weight below 0 or above `total`; a total that is not positive.
    """
    value = _number(weight)
    if not 0 < total < math.inf or not 0 <= value <= total * (1 + 1e-9):
        raise ConfigError(
            f"expected a weight from 0 to the total of all ranks in this step, found weight {weight!r} and total {total!r}"
        )
    if value == 0:
        return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)
    return loss * (value * ranks / total)


def _number(weight: object) -> float:
    try:
        return float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return math.nan
