"""`torch.compile` of a sharded model: block by block, with gathers and releases outside the graphs.

Only the `forward` of each block is compiled. The hooks around it run in plain Python, so the parameters are full when the
graph's guards check them. Code between blocks runs uncompiled. Blocks that torch finds equal share graphs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.patching import Patches
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..errors import ConfigError

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

_logger = logging.getLogger(__name__)


class Compiling(Observer):
    """Makes `model.compile()` compile block by block.

    Attributes:
        compiled: the blocks that are compiled.
    """

    def attach(self, engine: Engine) -> None:
        self._engine, self._patches = engine, Patches()
        hosts = (host for unit in engine.units for host in unit.hosts)
        self._blocks = blocks_of(engine.model, hosts)
        self.compiled: set[nn.Module] = set()
        _stay_out_of_graphs()
        self._patches.method(engine.model, "compile", lambda stock: self._compile)

    def detach(self) -> None:
        self._patches.restore()

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """
        Raises:
            ConfigError: `module.compile()` was called for the model or a part of it, or a part is of `torch.jit`.
        """
        for name, module in model.named_modules():
            what = f"{name or type(model).__name__!r}"
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError(
                    f"{what} is a {type(module).__name__} of torch.jit, which takes no hooks of Python. Shard the module that "
                    "it was made of"
                )
            if module.__dict__.get("_compiled_call_impl") is not None:
                raise ConfigError(
                    f"{what} was compiled by module.compile() before the model was sharded: its graphs would have the "
                    "engine's hooks inside. Call model.compile(...) after zero.shard or prepare()"
                )

    def _compile(self, *args: Any, **options: Any) -> None:
        self.compile(partial(torch.compile, *args, **options))

    def compile(self, using: Compile) -> None:
        """Compile each block that is not compiled yet. A block that cannot be compiled runs uncompiled. No communication."""
        failed: list[str] = []
        for module in self._blocks:
            if module not in self.compiled:
                self._patches.method(module, "forward", partial(Block, type(module).__name__, using, failed))
                self.compiled.add(module)
        if self._engine.rank == 0:
            _logger.info("torch.compile: %d blocks, each by itself", len(self._blocks))


class Block:
    """The compiled `forward` of one block; after a failure the plain one."""

    def __init__(self, name: str, compile_: Compile, failed: list[str], plain: Callable[..., Any]) -> None:
        self._name, self._plain, self._failed = name, plain, failed
        self._compiled: Callable[..., Any] | None = compile_(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A mode that sees every function would be traced into the graph.
        if self._compiled is None or torch._C._len_torch_function_stack():
            return self._plain(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self._compiled = None
            # The second paragraph of torch's message is advice on its own flags.
            why = f"{type(error).__name__}: {' '.join(str(error).strip().partition(chr(10) * 2)[0].split())}"
            if not self._failed:
                _logger.warning("%s could not be compiled and runs as it is (%s)", self._name, why)
            self._failed.append(why)
        return self._plain(*args, **kwargs)


def blocks_of(model: nn.Module, hosts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the hosts that have parts, none of which is a host itself: transformer blocks."""
    known = set(hosts)
    found = []
    for module in model.modules():
        parts = set(module.modules()) - {module}
        if module in known and module is not model and parts and not parts & known:
            found.append(module)
    return found


def _stay_out_of_graphs() -> None:
    """Keep dynamo out of this package: where user code compiles a sharded model, hooks run between graphs."""
    from torch._dynamo import trace_rules

    package = __name__.partition(".")[0]
    folder = os.path.dirname(sys.modules[package].__file__ or "")
    if not any(each.rstrip("/\\") == folder for each in trace_rules.SKIP_DIRS):
        trace_rules.add(package)
