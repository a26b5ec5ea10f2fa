"""`torch.compile` for a sharded model: block by block, and no hook inside a graph.

What is compiled is a block's own `forward`: the hooks around it, which gather and release, run outside, in plain Python, and
the parameters are whole when the graph's guards look at them. What lies between blocks runs as it is. Equal blocks share
their graphs, as far as torch finds them equal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, StateError

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def blocks_of(model: nn.Module, hosts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Hosts that have parts, none of which is a host itself: transformer blocks."""
    known = set(hosts)
    for module in model.modules():
        parts = set(module.modules()) - {module}
        if module in known and module is not model and parts and not parts & known:
            yield module


def stay_out_of_graphs() -> None:
    """dynamo does not look into this package: where somebody compiles a sharded model, its hooks run between graphs."""
    from torch._dynamo import trace_rules

    package = __name__.partition(".")[0]
    folder = os.path.dirname(sys.modules[package].__file__ or "")
    if not any(each.rstrip("/\\") == folder for each in trace_rules.SKIP_DIRS):
        trace_rules.add(package)


def refuse_transformed() -> None:
    """
    Raises:
        StateError: a forward is differentiated by `torch.func`, which wraps every tensor that is made meanwhile.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    for transform in stack:
        if transform.key() != torch._C._functorch.TransformType.Vmap:
            raise StateError(
                f"a sharded model is called inside torch.func.{transform.key().name.lower()}, where its parameters cannot be "
                "gathered. Differentiate by torch.autograd.grad(..., create_graph=True) or torch.autograd.functional"
            )


def refuse_compiled(model: nn.Module) -> None:
    """
    Raises:
        ConfigError: `module.compile()` was called, here or on a part: hooks would be inside of its graphs. Or a part is a
            `torch.jit.ScriptModule`, which takes no hooks.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or type(model).__name__!r} is a {type(module).__name__} of torch.jit, which takes no hooks of Python: "
                "shard the module that it was made of"
            )
        if module.__dict__.get("_compiled_call_impl") is not None:
            raise ConfigError(
                f"{name or type(model).__name__!r} was compiled by module.compile() before the model was sharded, and its "
                "graphs would have the engine's hooks inside: call model.compile(...) after zero.shard or prepare() instead"
            )


def take_wrapper_off(model: nn.Module) -> tuple[nn.Module, Compile | None]:
    """Of `torch.compile(model)`: the module, and what compiles with the same settings. The wrapper is a plain one then."""
    inner, compile_ = getattr(model, "_orig_mod", None), getattr(model, "dynamo_ctx", None)
    if not isinstance(inner, nn.Module) or compile_ is None:
        return model, None
    model.__dict__["forward"] = inner.__call__
    return inner, compile_


class Block:
    """One block's `forward`, compiled; as it was where that fails, from then on.

    Args:
        failed: told why, once.
    """

    def __init__(self, module: nn.Module, compile_: Compile, failed: list[str]) -> None:
        self._module, self._plain, self._failed = module, module.forward, failed
        self._compiled: Callable[..., Any] | None = compile_(self._plain)
        update_wrapper(self, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A mode that looks at every function (`autocast.Uses`, in the first forward) would be traced into the graph.
        if self._compiled is None or torch._C._len_torch_function_stack():
            return self._plain(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self._compiled = None
            self._tell(error)
        return self._plain(*args, **kwargs)

    def _tell(self, error: Exception) -> None:
        # What follows is advice on torch's own flags.
        why = f"{type(error).__name__}: {' '.join(str(error).strip().partition(chr(10) * 2)[0].split())}"
        if not self._failed:
            kind = type(self._module).__name__
            print(f"hf_zero: {kind} could not be compiled and runs as it is ({why})", file=sys.stderr, flush=True)
        self._failed.append(why)
