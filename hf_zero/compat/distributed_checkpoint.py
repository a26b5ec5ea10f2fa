"""Refuses `torch.distributed.checkpoint.state_dict` for optimizers of sharded models; for the models it works.

Its functions look up the model's parameters in `optimizer.param_groups`, which has segments of masters instead. If the
optimizer has no state, each of them first makes a step with zero gradients, so the check must run before. torch's function
`_init_optim_state` is replaced permanently once the module is imported; other optimizers are not affected.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..errors import StateError

_MODULE = "torch.distributed.checkpoint.state_dict"
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class DistributedCheckpoint(Observer):
    """Refuses optimizers of this engine."""

    def attach(self, engine: Engine) -> None:
        _engines.add(engine)
        _guard()

    def before_forward(self, args: Any, kwargs: Any) -> None:
        _guard()  # importing the module takes a second: user code may do so later


def _guard() -> None:
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module, "_hf_zero_guards"):
        return
    stock = module._init_optim_state

    @functools.wraps(stock)
    def init_optim_state(optim: Any, *args: Any, **kwargs: Any) -> Any:
        if any(optim is each for engine in _engines for each in engine.optimizers):
            raise StateError(
                f"{_MODULE} cannot read or write the optimizer of a sharded model: its param_groups have this rank's part of "
                "the parameters. Use engine.save(folder) and engine.load(folder), or optimizer.state_dict() and "
                "load_state_dict() on every rank, or zero.full_optimizer_state(param, key). get_model_state_dict and "
                "set_model_state_dict work"
            )
        return stock(optim, *args, **kwargs)

    module._init_optim_state, module._hf_zero_guards = init_optim_state, True
