"""The language-model loss in chunks of tokens: logits of sequence x vocabulary never exist.

Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), describe the memory; here chunks are
computed in the forward and again in the backward. The head returns `LazyLogits`, which record the hidden states
and the model's element-wise operations on logits (a cap, a scale, a cast). Their cross entropy is computed in chunks. Any other
operation computes all of them, as the stock head does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only

from ..compat.copies import is_ours
from ..config import ZeroConfig
from ..core.patching import patched
from ..engine.engine import Engine
from ..engine.graph import backward_id
from ..engine.observer import Observer
from ..errors import ConfigError, StateError
from ..plan.activations import LOSS_BYTES, chunk_tokens

Step = Callable[[Tensor], Tensor]

_METADATA = frozenset(
    {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta",
     "requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_quantized", "is_nested", "is_mkldnn",
     "_base", "_version", "grad", "is_sparse_csr")}
    | {getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "is_floating_point",
       "is_complex", "__len__", "stride", "is_contiguous", "__hash__")}
)  # fmt: skip
_POINTWISE = frozenset(
    {getattr(Tensor, name) for name in ("float", "half", "bfloat16", "double", "to", "type", "mul", "__mul__", "__rmul__",
     "multiply", "div", "__truediv__", "divide", "true_divide", "tanh")}
    | {torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.tanh}
)  # fmt: skip
_SUMS = frozenset({Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add})
_SHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape})


@dataclass(eq=False)
class LogitsSource:
    """Origin of logits.

    Attributes:
        autocast: the arguments of `torch.autocast` in this forward.
        number: that of the next optimizer step.
    """

    loss: ChunkedLoss
    head: nn.Linear
    autocast: tuple[str, torch.dtype, bool]
    number: int


class LazyLogits(Tensor):
    """Logits of a head that are computed on demand.

    Attributes:
        source: their head and forward.
        hidden: the head's input.
        steps: the model's element-wise operations since.
        value: the logits, once they are computed.
        has_graph: whether they were computed with gradients enabled.
    """

    source: LogitsSource
    hidden: Tensor
    steps: tuple[Step, ...]
    value: Tensor | None
    has_graph: bool

    @staticmethod
    def of(source: LogitsSource, hidden: Tensor, steps: tuple[Step, ...], dtype: torch.dtype) -> LazyLogits:
        shape = (*hidden.shape[:-1], source.head.out_features)
        made: LazyLogits = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=hidden.device)
        made.source, made.hidden, made.steps, made.value, made.has_graph = source, hidden, steps, None, False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Released parameters are gathered through their `__torch_function__`, which must work where a head's weight is read.
        with nullcontext() if func is F.cross_entropy else torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            found = _apply_lazily(func, args, kwargs)
            if found is not None:
                return found
        name = getattr(func, "__name__", str(func))
        if name in ("retain_grad", "register_hook"):
            raise ConfigError(
                f"{name}() waits for the gradient of logits, which chunked_loss does not compute. Leave chunked_loss out"
            )
        args, kwargs = tree_map_only(LazyLogits, partial(_value_of, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(LazyLogits, partial(_value_of, str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)


def _value_of(name: str, logits: LazyLogits) -> Tensor:
    return logits.source.loss.value_of(logits, name)


def _apply_lazily(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the result of `func` without computing the logits; None if it needs them."""
    logits = args[0] if args else kwargs.get("input")
    if not isinstance(logits, LazyLogits) or logits.value is not None:
        return None
    rest = args[1:]
    if func in _SUMS and len(rest) == 1 and not kwargs and _is_row(rest[0], logits):
        row = rest[0].flatten()
        steps = (*logits.steps, lambda values: values + row)
        return _derive(logits, logits.hidden, steps, torch.promote_types(logits.dtype, row.dtype))
    if func is F.cross_entropy:
        return logits.source.loss.cross_entropy(
            logits, *rest, **{key: each for key, each in kwargs.items() if key != "input"}
        )
    if any(isinstance(each, Tensor) for each in tree_leaves((rest, kwargs))):
        return None
    hidden, width = logits.hidden, logits.source.head.in_features
    if func is Tensor.contiguous:
        return logits
    if func in _POINTWISE:
        result = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *rest, **kwargs)
        if not isinstance(result, Tensor) or result.device != logits.device:
            return None
        steps = (*logits.steps, lambda values: func(values, *rest, **kwargs))
        return _derive(logits, hidden, steps, result.dtype)
    if func in _SHAPES and not kwargs:
        shape = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        if all(isinstance(each, int) for each in shape) and shape[-1] == logits.shape[-1]:
            return _derive(logits, hidden.reshape(*shape[:-1], width))
    if func is Tensor.__getitem__ and not kwargs:
        wanted = torch.empty(logits.shape, device="meta")[rest[0]]
        # A view with the whole vocabulary. Token ids cannot index hidden states.
        if wanted._base is not None and wanted.dim() and (wanted.shape[-1], wanted.stride(-1)) == (logits.shape[-1], 1):
            part = hidden[rest[0]]
            return _derive(logits, part) if part.shape[-1] == width else None
    return None


def _is_row(value: Any, logits: LazyLogits) -> bool:
    """Return whether a value is a constant per vocabulary entry, such as the bias of BART's logits."""
    if not isinstance(value, Tensor) or value.requires_grad or not value.dim():
        return False
    return value.numel() == value.shape[-1] == logits.shape[-1]


def _derive(logits: LazyLogits, hidden: Tensor, steps: tuple[Step, ...] | None = None, dtype: Any = None) -> LazyLogits:
    return LazyLogits.of(logits.source, hidden, logits.steps if steps is None else steps, dtype or logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Loss of each token from hidden states and the head's weight. The backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, losses: Any, size: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.losses, ctx.size = losses, size
        parts = [
            losses(F.linear(some, weight, bias), wanted) for some, wanted in zip(hidden.split(size), target.split(size))
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a backward with create_graph=True needs second derivatives, which chunked_loss does not have. Leave it out"
            )
        hidden, weight, bias, target = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if needs_hidden else None
        # At least float32: sums over many chunks would lose bits in a narrower type.
        wide = torch.promote_types(weight.dtype, torch.float32)
        by_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        by_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for start in range(0, len(hidden), ctx.size):
            part = slice(start, start + ctx.size)
            with torch.enable_grad():
                logits = F.linear(hidden[part].detach().requires_grad_(), weight.detach(), bias)
                edge = get_gradient_edge(logits)
                losses = ctx.losses(logits, target[part])
            del logits  # the gradient of a cross entropy does not need them
            (by_logits,) = torch.autograd.grad(losses, edge, gradient[part])
            del losses
            if by_hidden is not None:
                by_hidden[part] = by_logits @ weight
            if by_weight is not None and by_logits.dtype == wide:
                by_weight.addmm_(by_logits.t(), hidden[part])
            elif by_weight is not None:
                by_weight += by_logits.t() @ hidden[part]
            if by_bias is not None:
                by_bias += by_logits.sum(0, dtype=wide)
            del by_logits  # the next chunk reuses its memory
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _in_chunks(*args: Any) -> Tensor:
    """Apply `ChunkedCrossEntropy` to parameters that may be released: the parent's hooks that gathered them have ended."""
    found: Tensor = (
        handle_torch_function(_in_chunks, args, *args) if has_torch_function(args) else ChunkedCrossEntropy.apply(*args)
    )
    return found


class ChunkedLoss(Observer):
    """Makes heads of language models return `LazyLogits` in forwards with labels."""

    def __init__(self, config: ZeroConfig) -> None:
        self._mode = config.chunked_loss
        self._handles: list[Any] = []
        self._heads: list[nn.Linear] = []
        self._is_active = self._is_chunked = False
        """A forward with labels runs; its cross entropy was computed in chunks."""
        self._number = 0
        """Number of optimizer steps: logits of earlier weights can no longer be computed."""

    def check(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        """
        Raises:
            ConfigError: no head of the model can be computed in chunks.
        """
        self._owners = [each for each in model.modules() if hasattr(each, "get_output_embeddings")]
        heads = [(each, head) for each in self._owners if (head := _head_of(each)) is not None]
        plain = [(owner, head) for owner, head in heads if type(head) is nn.Linear and "forward" not in vars(head)]
        self._owners = [owner for owner, _ in plain]
        self._heads = list(dict.fromkeys(head for _, head in plain))
        if self._mode is True and not self._heads:
            found = ", ".join(sorted({type(head).__name__ for _, head in heads})) or "no output embedding"
            raise ConfigError(
                f"chunked_loss=True computes logits of a torch.nn.Linear in chunks, and {type(model).__name__} has {found}. "
                "Keep adapters off its head (lm_head), or leave chunked_loss out"
            )

    def attach(self, engine: Engine) -> None:
        for head in self._heads:
            vars(head)["_compiled_call_impl"] = torch.compiler.disable(partial(self._call, head))
        for owner in self._owners:
            self._handles.append(owner.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(owner.register_forward_hook(self._after, prepend=True, always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for head in self._heads:
            vars(head).pop("_compiled_call_impl", None)

    def before_step(self, optimizer: Any) -> None:
        self._number += 1

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if backward_id() < 0:
            named = {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}
            self._is_active = any(named.get(name) is not None for name in ("labels", "shift_labels"))
            self._is_chunked = False

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if backward_id() >= 0:
            return
        lacks = self._is_active and self._mode is True and not self._is_chunked and output is not None
        self._is_active = False
        if lacks:
            raise ConfigError(
                f"{type(module).__name__} computes its loss without the cross entropy of its head's logits: chunked_loss=True "
                "has no effect. Leave chunked_loss out"
            )

    def _call(self, head: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        """Replace `head(hidden)`, before any hook of the head."""
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not self._is_active or not isinstance(hidden, Tensor) or backward_id() >= 0 or not hidden.numel():
            return head._call_impl(*args, **kwargs)
        tokens = hidden.numel() // head.in_features
        if self._mode == "auto" and tokens * head.out_features * 4 <= LOSS_BYTES:
            return head._call_impl(*args, **kwargs)
        hooks = head._forward_hooks, head._backward_hooks, head._backward_pre_hooks
        if not all(is_ours(hook) for table in hooks for hook in table.values()):
            if self._mode == "auto":
                return head._call_impl(*args, **kwargs)
            raise ConfigError(
                "the model's head has hooks of user code, which wait for logits and their gradients, and chunked_loss=True "
                "does not compute these. Remove the hooks, or leave chunked_loss out"
            )
        state = _autocast_of(hidden)
        dtype = state[1] if state[2] else torch.promote_types(hidden.dtype, head.weight.dtype)
        return LazyLogits.of(LogitsSource(self, head, state, self._number), hidden, (), dtype)

    def value_of(self, logits: LazyLogits, name: str) -> Tensor:
        """Return the logits, computed as the stock head does; at stage 3 a collective.

        Raises:
            ConfigError: the model's own forward needs them.
            StateError: an optimizer step has changed the weights.
        """
        is_late = logits.source.number != self._number
        if logits.value is not None and (logits.has_graph or is_late or not torch.is_grad_enabled()):
            return logits.value
        if self._is_active and self._mode is True:
            raise ConfigError(
                f"the model calls {name}() on its logits before their cross entropy, which chunked_loss=True cannot compute in "
                "chunks. Set chunked_loss to 'auto' or leave it out"
            )
        if is_late:
            raise StateError(
                f"{name}() needs logits of a forward before the optimizer's step: with chunked_loss they are computed when "
                "they are read, and the weights are others now. Read them before optimizer.step()"
            )
        with torch.autocast(*logits.source.autocast):
            values: Tensor = logits.source.head._call_impl(logits.hidden)
            for step in logits.steps:
                values = step(values)
        logits.value, logits.has_graph = values, torch.is_grad_enabled()
        return values

    def cross_entropy(
        self,
        logits: LazyLogits,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Return the cross entropy, computed in chunks; None if these arguments need all logits."""
        if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
            return None
        if logits.dim() != 2 or target.dim() != 1:
            return None
        if logits.source.number != self._number:
            _value_of("cross_entropy", logits)  # raises
        autocast, steps = logits.source.autocast, logits.steps

        def losses(values: Tensor, wanted: Tensor) -> Tensor:
            with torch.autocast(*autocast):
                for step in steps:
                    values = step(values)
                return F.cross_entropy(
                    values, wanted, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
                )

        head = logits.source.head

        def forward(hidden: Tensor) -> Tensor:
            given: list[Tensor | None] = [hidden, head.weight, head.bias]
            if autocast[2]:
                given = [None if each is None else each.to(autocast[1]) for each in given]
            size = chunk_tokens(head.out_features)
            return _in_chunks(*given, target.to(hidden.device), losses, size)

        with patched([(head, "forward", forward)]):  # the engine's hooks around it gather the weight
            found: Tensor = head._call_impl(logits.hidden)
        self._is_chunked = True
        if reduction == "none":
            return found
        total = found.sum()
        return total if reduction == "sum" else total / (target != ignore_index).sum()


def _head_of(module: Any) -> nn.Module | None:
    try:
        head = module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def _autocast_of(values: Tensor) -> tuple[str, torch.dtype, bool]:
    kind = values.device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def observers(config: ZeroConfig) -> Sequence[Observer]:
    """Return the observer of one engine if it computes the loss in chunks."""
    return [] if config.chunked_loss is False else [ChunkedLoss(config)]
