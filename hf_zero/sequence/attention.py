"""Attention over whole sequences whose tokens are divided among ranks: tokens are exchanged for heads, and back.

Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3; Bekman et al., "Arctic Long Sequence Training" (arXiv
2506.13996), section 3.2. Before attention each rank has all heads of its tokens, during attention all tokens of its heads.

The attention is one of transformers' registered implementations, around the one that the user chose: models call it like
any other. It needs the mask of the whole sequence, so a mask function is registered as well, which returns a `SequenceMask`.
A call with any other mask bypassed that function and is refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..core.patching import Attributes, patched
from ..errors import ConfigError
from .all_to_all import SequenceGroup, all_to_all
from .parts import Part

_LAYERS = {"full_attention", "sliding_attention", "dense", "sparse"}
"""Names of layer types in supported models; `dense` and `sparse` say which MLP they have."""
_NUMBERS = count(1)
_HARMLESS = {"position_ids", "labels", "shift_labels", "num_items_in_batch", "cache_position"}
"""Tensors that models pass to attention, which does not read them or gets them for the whole sequence."""


class _Name(str):
    """Names the divided attention in a configuration. Copies, which may outlive the engine, become the user's choice."""

    chosen: str
    model: weakref.ref[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (self.chosen,)


@dataclass(eq=False)
class SequenceMask:
    """The mask of a whole sequence, in the form of the chosen implementation, and this rank's part."""

    part: Part
    mask: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the stock mask, which models read to decide whether to create a mask."""
        return (self.part.rows, 1, self.part.local, self.part.local)

    @property
    def ndim(self) -> int:
        return len(self.shape)


class SequenceAttention:
    """Registers attention and mask for one model. Outside of divided forwards they call the chosen implementation.

    Attributes:
        active: the part that the running forward computes; None: whole sequences.
        calls: attention layers that the running forward has called.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.active: Part | None = None
        self.calls = 0
        self._undo: list[Callable[[], object]] = []

    def register(self, configs: list[Any], model: nn.Module) -> None:
        """Select our attention for every submodule of `model` with one of these configurations."""
        if not configs:  # other models work without transformers
            return
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        number = next(_NUMBERS)
        for config in configs:
            chosen = getattr(config._attn_implementation, "chosen", config._attn_implementation) or "eager"
            name = _Name(f"hf_zero_{number}_{chosen}")
            name.chosen, name.model = chosen, weakref.ref(model)
            for interface, function in (
                (ALL_ATTENTION_FUNCTIONS, torch.compiler.disable(partial(self._attend, chosen))),
                (ALL_MASK_ATTENTION_FUNCTIONS, partial(self._mask, chosen)),
            ):
                if name not in interface:
                    interface.register(name, function)
                    self._undo.append(partial(interface._global_mapping.pop, name, None))
            self._undo.append(partial(setattr, config, "_attn_implementation_internal", chosen))
            config._attn_implementation_internal = name

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _mask(self, chosen: str, *args: Any, **kwargs: Any) -> Any:
        """Return the mask of the whole sequence in a divided forward."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        function, part = ALL_MASK_ATTENTION_FUNCTIONS[chosen], self.active
        if part is None or args:
            return function(*args, **kwargs)
        if isinstance(kwargs.get("attention_mask"), SequenceMask):  # from the model around this one
            if part.tokens < part.length and part.causal_mask is None:
                # Without padding there may be no mask to pass, and this model would create a different one.
                raise ConfigError(
                    f"sp_size={self.group.size} does not divide rows of {part.tokens} tokens. This model passes masks to "
                    "another model, which needs that. Pad the rows to a multiple, and pass attention_mask"
                )
            return kwargs["attention_mask"]
        both_ways = "allow_is_bidirectional_skip" in kwargs
        if kwargs["q_length"] != part.local or kwargs["kv_length"] != part.local:
            _refuse(
                f"attention from {kwargs['q_length']} to {kwargs['kv_length']} tokens", "another sequence or a cache"
            )
        if kwargs.get("use_vmap") or not (both_ways or kwargs.get("allow_is_causal_skip", True)):
            _refuse("a mask that the model adds to", "an attention mask of its own")
        mask_function = kwargs["mask_function"]
        if part.packed is not None and not both_ways:
            mask_function = _separate_packed(mask_function, part.position_ids, part.packed)
            kwargs["allow_is_causal_skip"] = False
        mask = part.full_mask if both_ways else part.causal_mask
        whole = {"q_length": part.length, "kv_length": part.length, "q_offset": 0, "kv_offset": 0}
        attention_mask = None if mask is None else mask.to(kwargs["device"], torch.bool)
        made = function(**{**kwargs, **whole, "mask_function": mask_function, "attention_mask": attention_mask})
        if isinstance(made, Tensor) and made.is_floating_point() and part.tokens < part.length:
            # A query without visible tokens (left padding) averages all tokens, which must exclude those that fill up the rows.
            made = made.clone()
            made[..., part.tokens :] = -torch.inf
        return SequenceMask(part, made)

    def _attend(
        self,
        chosen: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over the whole sequence with this rank's heads. Shapes: rows x heads x tokens x width, as transformers'."""
        function, mask = _implementation(chosen, module), attention_mask
        if not isinstance(mask, SequenceMask):
            if self.active is not None:
                _refuse(f"{type(module).__name__} with a mask of type {type(mask).__name__}", "attention of its own")
            with patched(_patched_attributes(module, chosen)):
                return function(module, query, key, value, mask, *args, **kwargs)
        part, size = mask.part, self.group.size
        self.calls += 1
        _check_arguments(module, query, key, part, size, args, kwargs)
        heads, pairs = query.shape[1], key.shape[1]
        repeats = next(n for n in range(1, heads // pairs + 1) if heads % (pairs * n) == 0 and pairs * n % size == 0)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        query, key, value = all_to_all(self.group, 1, 2, query, key, value)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = part.position_ids
        sinks = _own_sinks(module, self.group)
        if "s_aux" in kwargs:
            kwargs["s_aux"] = sinks
        with patched(_patched_attributes(module, chosen, heads // (pairs * repeats), sinks)):
            out, _ = function(module, query, key, value, mask.mask, **kwargs)
        return all_to_all(self.group, 1, 2, out)[0], None


def _separate_packed(mask_function: Callable[..., Any], position_ids: Tensor, packed: Tensor) -> Callable[..., Any]:
    """Return transformers' mask function that separates packed sequences."""
    from transformers import masking_utils

    made = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if made is None:  # before 5.23 positions are those in the row
        return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(packed))
    return made(mask_function, position_ids, packed)


def _implementation(chosen: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that the module would call; each model's file has its own `eager`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if chosen != "eager":
        return ALL_ATTENTION_FUNCTIONS[chosen]
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ConfigError(
        f"no eager attention of {type(module).__name__} is known. Load the model with attn_implementation='sdpa', or leave "
        "sp_size out"
    )


def _check_arguments(
    module: nn.Module, query: Tensor, key: Tensor, part: Part, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if query.shape[2] != part.local or key.shape[2] != part.local:
        _refuse(f"{name} from {query.shape[2]} to {key.shape[2]} tokens", "attention to another sequence or a cache")
    if query.shape[1] % size:
        raise ConfigError(heads_text(name, query.shape[1], size))
    known = _HARMLESS if getattr(module, "sinks", None) is None else {*_HARMLESS, "s_aux"}
    unknown = [key for key, each in kwargs.items() if isinstance(each, Tensor) and each.dim() and key not in known]
    if args or unknown:
        _refuse(f"{name} with {', '.join(unknown) or 'arguments of its own'}", "biases of its own")


def heads_text(name: str, heads: int, size: int) -> str:
    """Return the message for heads that do not divide evenly among ranks."""
    fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
    return f"sp_size={size} does not divide the {heads} attention heads of {name}. Choose one of {fitting}"


def _refuse(found: str, what: str) -> None:
    raise ConfigError(
        f"sequence parallelism divides self-attention over one sequence, found {found}. A model with {what} is not supported: "
        "leave sp_size out"
    )


def _patched_attributes(module: nn.Module, chosen: str, groups: int = 0, sinks: Tensor | None = None) -> Attributes:
    """Return attributes of a module that the chosen implementation reads, for `replaced`.

    Args:
        chosen: its name, which flash attention reads in the configuration.
        groups: query heads per key-value head, after key-value heads were repeated. 0: no change.
        sinks: one per head of this rank. As an instance attribute they hide the module's parameter.
    """
    found: Attributes = []
    if (config := getattr(module, "config", None)) is not None:
        found.append((config, "_attn_implementation_internal", chosen))
    if groups and hasattr(module, "num_key_value_groups"):
        found.append((module, "num_key_value_groups", groups))
    if sinks is not None:
        found.append((module, "sinks", sinks))
    return found


def _own_sinks(module: nn.Module, group: SequenceGroup) -> Tensor | None:
    sinks: Any = getattr(module, "sinks", None)
    if sinks is not None and (sinks.dim() != 1 or len(sinks) % group.size):
        _refuse(f"{type(module).__name__} with sinks of shape {tuple(sinks.shape)}", "sinks that are not one per head")
    return None if sinks is None else sinks.chunk(group.size)[group.index]


def check_model(model: nn.Module, size: int) -> list[Any]:
    """Return the configurations of the model, whose attention `SequenceAttention` replaces.

    Raises:
        ConfigError: the model cannot be divided along the sequence.
    """
    known = sys.modules.get("transformers.modeling_utils")
    inner = [] if known is None else [each for each in model.modules() if isinstance(each, known.PreTrainedModel)]
    if not inner:
        raise ConfigError(
            f"sp_size={size} divides attention of transformers' models, found {type(model).__name__}, which is none. Leave "
            "sp_size out"
        )
    for each in inner:
        name, config = type(each).__name__, each.config
        kinds = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
        mixing = {type(module).__name__ for module in each.modules() if isinstance(module, (nn.Conv1d, nn.RNNBase))}
        if isinstance(named := config._attn_implementation, _Name) and named.model() is not None:
            raise ConfigError(
                f"sp_size={size} replaces attention in a model's configuration, and {name} shares its own with another "
                "model that has sp_size. Give it its own (copy.deepcopy(config)), or call detach() on the other engine"
            )
        if getattr(each, "_is_stateful", False) or kinds or mixing:
            found = ", ".join(sorted(kinds | mixing)) or "a state along the sequence"
            raise ConfigError(
                f"sp_size={size} divides only attention, and {name} has {found}: tokens of different ranks would not meet "
                "there. Leave sp_size out, or choose a model with full or sliding attention alone"
            )
        if any(getattr(module, "attn_temperature_tuning", False) for module in each.modules()):
            raise ConfigError(
                f"attention of {name} scales queries by positions that it counts itself (attn_temperature_tuning), and under "
                f"sp_size={size} each rank would count from 0. Leave sp_size out"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"sp_size={size} divides one sequence, and {name} has one of the encoder and one of the decoder. Leave sp_size "
                "out"
            )
        if not each._can_set_attn_implementation():
            raise ConfigError(
                f"{name} computes attention without transformers' attention interface, which sp_size={size} needs. Leave "
                "sp_size out"
            )
        if getattr(config, "output_router_logits", False) or getattr(config, "output_attentions", False):
            raise ConfigError(
                f"sp_size={size} with output_router_logits or output_attentions, found in the configuration of {name}: their "
                "values are those of one rank's tokens or heads. Set both to False"
            )
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(heads_text(name, heads, size))
    return list({id(each.config): each.config for each in inner}.values())
