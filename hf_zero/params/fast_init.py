"""`zero.Init(init="fast")`: each rank draws the initial values of its own part alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .deferred import Deferred

_DRAWS = frozenset(
    {"normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_", "random_"}
)
_SETS = frozenset({"zero_", "fill_"})
_ELEMENTWISE = frozenset(
    {
        *_DRAWS, *_SETS, "mul_", "add_", "sub_", "div_", "clamp_", "clamp_min_", "clamp_max_", "erfinv_", "trunc_", "exp_",
        "log_", "sqrt_", "abs_", "neg_",
    }
)  # fmt: skip
"""Methods that may be called on a part in place of all elements."""


def _kaiming_uniform(tensor: Tensor, a: float, mode: Any, nonlinearity: Any) -> tuple[str, tuple[float, ...]]:
    std = nn.init.calculate_gain(nonlinearity, a) / math.sqrt(nn.init._calculate_correct_fan(tensor, mode))
    return "uniform_", (-math.sqrt(3.0) * std, math.sqrt(3.0) * std)


_INITIALISERS: dict[Callable[..., Any], Callable[..., tuple[str, tuple[float, ...]]]] = {
    nn.init.uniform_: lambda tensor, a, b: ("uniform_", (a, b)),
    nn.init.normal_: lambda tensor, mean, std: ("normal_", (mean, std)),
    nn.init.constant_: lambda tensor, val: ("fill_", (val,)),
    nn.init.kaiming_uniform_: _kaiming_uniform,
}
"""Functions of nn.init that a mode is given as one (of others it is given their methods): the method, and its arguments."""


class FastInit:
    """Initialises closed parameters on each rank's part."""

    def seed(self, rank: int) -> None:
        """Draw other numbers on each rank. The ranks' random states are equal."""
        seed = int(torch.randint(0, 2**62, (), device="cpu").item())
        self._seed = (seed + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63
        self._generators: dict[torch.device, torch.Generator] = {}

    def on_part(
        self,
        func: Callable[..., Any],
        param: nn.Parameter,
        deferred: Deferred,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Call `func` on this rank's part of a closed parameter. Returns False if it is not element by element."""
        name = getattr(func, "__name__", "")
        options = {key: value for key, value in kwargs.items() if value is not param}
        if not param.numel() or options.pop("generator", None) is not None:
            return False
        if func in _INITIALISERS:
            name, rest = _INITIALISERS[func](deferred.stand_in(param), *rest, **options)
            options.clear()
        elif name not in _ELEMENTWISE or any(isinstance(value, Tensor) for value in (*rest, *options.values())):
            return False
        what = f"{name} {rest} {options}"
        before = None if name in _DRAWS | _SETS else deferred.print
        if name in _DRAWS:
            options["generator"] = self._generator(deferred.device)
        deferred.put_own(param, getattr(deferred.values().clone(), name)(*rest, **options))
        # What was done to the parts of all ranks, in place of a digest of the full values.
        deferred.print = zlib.crc32(f"{before} {what}".encode())
        return True

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
