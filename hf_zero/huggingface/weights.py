"""What the weights of transformers and PEFT models are called at rest: exactly what their own code says, whatever version.

Nothing of it is repeated here. To draw a save, the stock `save_pretrained` runs while its files are noted (`stock`).
To locate a load, the stock loader runs on stand-ins for the stored tensors while the function that would set a parameter
only notes what it is given. A `Trace` tells which elements of which tensor each of these is made of.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.core_model_loading as core_loading
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from ..checkpoint.safetensors import Stored
from ..checkpoint.weights import Drawing, Located, locate_by_name, names_of, persistent_buffers
from ..core.layout import Extent
from ..errors import CheckpointError
from .stock import Attributes, recording, replaced, serving, stand_in_state
from .trace import Trace

EXTRA_STATE = "_extra_state"  # the last part of the key of a module's own state


def hub_format(model: nn.Module) -> HubFormat | AdapterFormat | None:
    """The format of a transformers or PEFT model; None for other models."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return AdapterFormat(model)
    if not isinstance(model, PreTrainedModel):
        return None
    return InjectedFormat(model) if getattr(model, "_hf_peft_config_loaded", False) else HubFormat(model)


class HubFormat:
    """Of a `PreTrainedModel`: the names and files of `save_pretrained`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.stems = {"model": ""}

    def draw(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Drawing:
        """See `WeightFormat`. Writes config.json, the index and whatever else `save_pretrained` writes."""
        model = self._model
        with recording(model, state) as record:
            type(model).save_pretrained(
                model, folder, state_dict=dict(state), max_shard_size=max_shard_size, is_main_process=True
            )
        return record.drawing(folder)

    def locate(self, stored: Mapping[str, Stored]) -> Located:
        """See `WeightFormat`. What `from_pretrained` would find in files with these tensors."""
        first = self._locate(stored, get_model_conversion_mapping(self._model))
        used = getattr(self._model, "_weight_conversions", None)
        if not first.missing or not used:
            return first
        # It was loaded with conversions of its own (`key_mapping=`), and saved with their reverse.
        second = self._locate(stored, [_fresh(conversion) for conversion in used])
        return second if len(second.missing) < len(first.missing) else first

    def _locate(self, stored: Mapping[str, Stored], mapping: list[Any]) -> Located:
        model = self._model
        names, buffers = names_of(model), persistent_buffers(model)
        state = stand_in_state(model)
        with replaced([(model, "_weight_conversions", getattr(model, "_weight_conversions", None))]):
            plan = planned_load(model, stored, LoadStateDictConfig(weight_mapping=mapping), place=False)
        wrong = [(name, tuple(found), tuple(shape)) for name, found, shape in plan.info.mismatched_keys]
        results = {name: result for name, result in plan.results.items() if name not in {item[0] for item in wrong}}
        located = _located(plan.trace, results, names, buffers)
        lacking = set(plan.info.missing_keys)
        model._adjust_missing_and_unexpected_keys(plan.info)
        # A tied parameter is there if one of its names is. A save leaves some out; the patterns of what a load may lack are
        # wide, and taken for buffers only.
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        ignored |= {name for name in lacking - plan.info.missing_keys if name in buffers}
        there = {names.get(name, name) for name in results} | {names.get(item[0], item[0]) for item in wrong}
        lost = [names.get(name, name) for name in state if name in lacking - ignored]
        missing = tuple(name for name in dict.fromkeys(lost) if name not in there)
        return dataclasses.replace(
            located,
            missing=missing,
            unexpected=tuple(sorted(plan.info.unexpected_keys)),
            mismatched=tuple(sorted(wrong)),
        )


class AdapterFormat:
    """Of a `PeftModel`: adapters only, `adapter_model.safetensors` each, those not called "default" in subfolders."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def stems(self) -> Mapping[str, str]:
        """See `WeightFormat`."""
        return {f"{prefix}adapter_model": prefix for prefix in map(self._prefix, self._adapters())}

    def draw(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Drawing:
        """See `WeightFormat`. Writes adapter_config.json and the model card; adapters are never split over files."""
        with recording(self._model, state) as record:
            type(self._model).save_pretrained(self._model, folder, state_dict=dict(state), is_main_process=True)
        return record.drawing(folder)

    def locate(self, stored: Mapping[str, Stored]) -> Located:
        """See `WeightFormat`. Keys of an adapter in a subfolder begin with its name and a slash."""
        known: dict[str, str] = {}
        optional: set[str] = set()
        for adapter in self._adapters():
            prefix = self._prefix(adapter)
            wanted, every = (self._keys(adapter, embeddings=also) for also in (False, True))
            known |= {prefix + key: name for key, name in (every | wanted).items()}
            optional |= {prefix + key for key in every.keys() - wanted.keys()}
        return locate_by_name(self._model, known, stored, optional)

    def _adapters(self) -> list[str]:
        return list(self._model.peft_config)

    def _prefix(self, adapter: str) -> str:
        return "" if adapter == "default" else f"{adapter}/"

    def _keys(self, adapter: str, embeddings: bool) -> dict[str, str]:
        """Key in the adapter's file -> name in the model, as PEFT itself would save it."""
        from peft import get_peft_model_state_dict

        model = self._model
        if getattr(model.peft_config[adapter], "is_prompt_learning", False):
            return {"prompt_embeddings": f"prompt_encoder.{adapter}.embedding.weight"}  # all that PEFT loads
        state = stand_in_state(model)
        with replaced(serving(model, state)):
            kept = get_peft_model_state_dict(model, dict(state), adapter_name=adapter, save_embedding_layers=embeddings)
        owners = {id(value): name for name, value in state.items()}
        unknown = [key for key, value in kept.items() if id(value) not in owners]
        if unknown:
            raise CheckpointError(
                f"adapter {adapter!r}: PEFT computes {unknown[0]!r} from the model when it saves, and has no way to load it "
                "back into its parts: save and load this adapter with PEFT's own methods on an unsharded model"
            )
        return {key: owners[id(value)] for key, value in kept.items()}


class InjectedFormat(AdapterFormat):
    """Of a `PreTrainedModel` with adapters of its own (`add_adapter`): the active one, as its `save_pretrained` writes it."""

    def draw(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Drawing:
        """See `WeightFormat`."""
        return HubFormat(self._model).draw(state, folder, max_shard_size)

    def _adapters(self) -> list[str]:
        return list(self._model.active_adapters()[:1])

    def _prefix(self, adapter: str) -> str:
        return ""

    def _keys(self, adapter: str, embeddings: bool) -> dict[str, str]:
        return {f"base_model.model.{key}": name for key, name in super()._keys(adapter, embeddings).items()}


# Loading ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedLoad:
    """What the stock loader would set, without a byte read."""

    trace: Trace
    results: dict[str, Tensor]
    """Name in the model (every name of a tied parameter that the files have) -> its stand-in, on the meta device."""
    info: Any
    """transformers' LoadStateDictInfo."""


def planned_load(
    model: PreTrainedModel, stored: Mapping[str, Stored], load_config: LoadStateDictConfig, *, place: bool
) -> PlannedLoad:
    """Run the stock loader on stand-ins for `stored`.

    Args:
        place: let it set the stand-ins as the model's parameters and buffers, cast first as the stock loader casts; else the
            model is only looked at, and the stand-ins keep their own types.
    """
    trace = Trace()
    results: dict[str, Tensor] = {}
    stock_set = core_loading.set_param_for_module

    def materialize(pool: Any, tensor: Stored, device: Any = None, dtype: Any = None, **_: Any) -> Callable[[], Tensor]:
        kept = dtype if place and dtype is not None else getattr(torch, tensor.dtype)
        stand_in = trace.stand_in(keys[id(tensor)], tensor.shape, kept)
        return lambda: stand_in

    def set_param(model: Any, name: str, value: Tensor, info: Any, quantizer: Any) -> None:
        results[name] = value
        extra = name.rpartition(".")[2] == EXTRA_STATE
        if place and not extra:
            stock_set(model, name, value, info, quantizer)
            if name in info.unexpected_keys:  # the model has None there
                del results[name]
            return
        info.missing_keys.discard(name)
        if extra:
            return
        expected = model.get_parameter_or_buffer(name).shape
        if value.shape != expected:
            info.mismatched_keys.add((name, value.shape, expected))

    keys = {id(tensor): key for key, tensor in stored.items()}
    others: Attributes = [
        (core_loading, "spawn_materialize", materialize),
        (core_loading, "set_param_for_module", set_param),
        (core_loading, "tqdm", lambda items, *args, **kwargs: items),  # nothing is loaded yet
    ]
    if not place or not all(param.is_meta for param in model.parameters()):
        known = stand_in_state(model)  # asking a sharded model is a collective, and gathers it
        others.append((model, "state_dict", lambda *args, **kwargs: dict(known)))
    with replaced(others), trace:
        info, _ = core_loading.convert_and_load_state_dict_in_model(
            model=model,
            state_dict=dict(stored),
            load_config=dataclasses.replace(load_config, device_map={"": torch.device("meta")}),
        )
    return PlannedLoad(trace, results, info)


def _located(
    trace: Trace, results: Mapping[str, Tensor], names: Mapping[str, str], buffers: Mapping[str, Tensor]
) -> Located:
    pieces: dict[str, Sequence[Extent[str]]] = {}
    found_buffers: dict[str, str] = {}
    computed: dict[str, Tensor] = {}
    for name, result in results.items():
        found = trace.pieces(result)
        if name in buffers and found is not None and len({piece.source for piece in found}) == 1:
            found_buffers[name] = found[0].source
        elif found is None or name in buffers:
            computed.setdefault(names.get(name, name), result)
        else:
            pieces.setdefault(names[name], found)
    computed = {name: result for name, result in computed.items() if name not in pieces}
    return Located(pieces, found_buffers, tuple(trace.conversions(computed)))


def _fresh(conversion: Any) -> Any:
    """A transform as it was before it matched anything."""
    fresh = copy.deepcopy(conversion)
    if hasattr(fresh, "_active"):  # a group of renamings that begins with its first match
        fresh._active = None
    return fresh
