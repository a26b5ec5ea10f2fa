"""Names and files of transformers and PEFT models, computed by their own code.

A save runs the functions of `save_pretrained` that compute names, on meta tensors; `save_pretrained` itself, without weights,
writes all other files. A load runs the stock loader on meta tensors, with a function that records the tensors that it would
set. `Conversions` reports the sources of each tensor.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.core_model_loading as core_loading
import transformers.utils.logging
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig, remove_tied_weights_from_state_dict

from ..checkpoint.safetensors import StoredTensor
from ..checkpoint.weights import (
    EXTRA_STATE,
    Conversion,
    Entry,
    Files,
    WeightLocations,
    extra_states,
    locate_by_name,
    names_of,
    persistent_buffers,
    write_index,
)
from ..core.layout import Extent
from ..core.patching import Attributes, patched
from ..core.precision import dtype_name
from ..errors import CheckpointError
from .converters import Conversions
from .patches import meta_state_dict, patched_dtypes, patched_state_dict


def hub_format(model: nn.Module) -> HubFormat | AdapterFormat | None:
    """Return the format of a transformers or PEFT model; None for other models."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return AdapterFormat(model)
    if not isinstance(model, PreTrainedModel):
        return None
    return InjectedFormat(model) if getattr(model, "_hf_peft_config_loaded", False) else HubFormat(model)


class HubFormat:
    """The names and files that `save_pretrained` writes for a `PreTrainedModel`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.stems = {"model": ""}

    def write_metadata(self, state: dict[str, Tensor], folder: Path) -> None:
        """Write config.json and the other files of `save_pretrained`; see `WeightFormat`."""
        model, stock, calls = self._model, PreTrainedModel.save_pretrained, list[Any]()

        def save(self: Any, place: Any, *args: Any, state_dict: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
            changed = [key for key, value in (state_dict or {}).items() if value is not state.get(key)]
            if changed or calls:
                what = (
                    f"computes {changed[0]!r} (first of {len(changed)}) from the weights" if changed else "saves twice"
                )
                raise CheckpointError(
                    f"the model's own save_pretrained {what}, which hf_zero cannot do from shards. Save with "
                    "Trainer.save_model or accelerator.save_model, or inside `with zero.unsharded(model):`"
                )
            calls.append(place)
            with patched(without_weights(model, state)):
                stock(self, place, state_dict={})

        with patched([*patched_state_dict(model, state), (PreTrainedModel, "save_pretrained", save)]):
            type(model).save_pretrained(model, folder, state_dict=dict(state))

    def plan_files(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Files:
        """See `WeightFormat`."""
        model = self._model
        ignored = model._keys_to_ignore_on_save or ()
        kept = {key: value for key, value in state.items() if key not in ignored}
        conversions = _known(model, state)
        with conversions.recording():
            kept = core_loading.revert_weight_conversion(model, remove_tied_weights_from_state_dict(kept, model))
        storages = {key: tensor.untyped_storage() for key, tensor in kept.items()}
        entries = _entries(kept, conversions, conversions.computed)
        return write_index(model, entries, max_shard_size, folder, storages)

    def locate(self, stored: Mapping[str, StoredTensor]) -> WeightLocations:
        """Find what `from_pretrained` would find; see `WeightFormat`."""
        first = self._locate(stored, get_model_conversion_mapping(self._model))
        used = getattr(self._model, "_weight_conversions", None)
        if not first.missing or not used:
            return first
        # The model was loaded with `key_mapping=`, and is saved with the reverse conversions.
        second = self._locate(stored, [_fresh(conversion) for conversion in used])
        return second if len(second.missing) < len(first.missing) else first

    def _locate(self, stored: Mapping[str, StoredTensor], mapping: list[Any]) -> WeightLocations:
        model = self._model
        names, buffers = names_of(model), {**persistent_buffers(model), **extra_states(model)}
        state = meta_state_dict(model)
        with patched([(model, "_weight_conversions", getattr(model, "_weight_conversions", None))]):
            plan = planned_load(model, stored, LoadStateDictConfig(weight_mapping=mapping), place=False)
        wrong = [(name, tuple(found), tuple(shape)) for name, found, shape in plan.info.mismatched_keys]
        results = {name: result for name, result in plan.results.items() if name not in {item[0] for item in wrong}}
        located = _located(plan.conversions, results, names, buffers)
        lacking = set(plan.info.missing_keys)
        model._adjust_missing_and_unexpected_keys(plan.info)
        # A tied parameter is present if one of its names is. A save omits some names. The patterns for what a load may
        # lack are wide, so they apply to buffers only.
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        ignored |= {name for name in lacking - plan.info.missing_keys if name in buffers}
        present = {names.get(name, name) for name in results} | {names.get(item[0], item[0]) for item in wrong}
        lost = [names.get(name, name) for name in state if name in lacking - ignored]
        missing = tuple(name for name in dict.fromkeys(lost) if name not in present)
        return dataclasses.replace(
            located,
            missing=missing,
            unexpected=tuple(sorted(plan.info.unexpected_keys)),
            mismatched=tuple(sorted(wrong)),
        )


class AdapterFormat:
    """The adapters of a `PeftModel`, one `adapter_model.safetensors` each; all but "default" in subfolders."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def stems(self) -> Mapping[str, str]:
        """See `WeightFormat`."""
        return {f"{prefix}adapter_model": prefix for prefix in map(self._prefix, self._adapters())}

    def write_metadata(self, state: dict[str, Tensor], folder: Path) -> None:
        """Write adapter_config.json and the model card; see `WeightFormat`."""
        with patched(without_weights(self._model, state)):
            type(self._model).save_pretrained(self._model, folder, state_dict={})

    def plan_files(self, state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> Files:
        """Plan one file: adapters are never split; see `WeightFormat`."""
        conversions = _known(self._model, state)
        return {
            f"{self._prefix(adapter)}adapter_model.safetensors": _entries(
                self._kept(adapter, state, "auto"), conversions, partial(self._computed, adapter, state)
            )
            for adapter in self._adapters()
        }

    def _kept(self, adapter: str, state: Mapping[str, Any], embeddings: Any) -> dict[str, Any]:
        """Return what PEFT saves of `state` for one adapter, with the keys of the file."""
        from peft import get_peft_model_state_dict

        model, config = self._model, self._model.peft_config[adapter]
        shown = [*patched_state_dict(model, state), *_prompt_encoder(model, state)]
        shown += [(config, "rank_pattern", masks) for masks in [_rank_masks(model, adapter)] if masks]
        with torch.no_grad(), patched(shown):
            kept = get_peft_model_state_dict(model, dict(state), adapter_name=adapter, save_embedding_layers=embeddings)
        params = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
        return {key: state[params[id(value)]] if id(value) in params else value for key, value in kept.items()}

    def _computed(self, adapter: str, state: Mapping[str, Tensor], keys: Iterable[str]) -> dict[str, Conversion]:
        """Return entries that PEFT computes from the adapter's parameters, for example a prompt's embeddings."""
        model, names = self._model, names_of(self._model)
        prefix = getattr(getattr(model, "base_model", None), "prefix", None)
        sources = tuple(
            name
            for name in dict.fromkeys(names.values())
            if name.startswith("prompt_encoder.") or (prefix and prefix in name)
        )

        def convert(values: dict[str, Tensor]) -> dict[str, Tensor]:
            known = {key: values.get(names.get(key, key), value) for key, value in state.items()}
            made = self._kept(adapter, known, "auto")
            lost = [key for key in keys if made[key].is_meta]
            if lost:
                raise CheckpointError(
                    f"PEFT computes {lost[0]!r} from weights of the base model: save this adapter with PEFT's own "
                    "save_pretrained inside `with zero.unsharded(model):`"
                )
            return {key: made[key].detach().contiguous() for key in keys}

        return dict.fromkeys(keys, Conversion(sources, convert))

    def locate(self, stored: Mapping[str, StoredTensor]) -> WeightLocations:
        """Find the adapter's file; see `WeightFormat`. Keys of an adapter in a subfolder begin with its name and a slash."""
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
        """Map keys in the adapter's file to names in the model, as PEFT itself would save them."""
        model = self._model
        if getattr(model.peft_config[adapter], "is_prompt_learning", False):
            return {"prompt_embeddings": f"prompt_encoder.{adapter}.embedding.weight"}  # PEFT loads nothing else
        state = meta_state_dict(model)
        kept = self._kept(adapter, state, embeddings)
        owners = {id(value): name for name, value in state.items()}
        unknown = [key for key, value in kept.items() if id(value) not in owners]
        if unknown:
            raise CheckpointError(
                f"adapter {adapter!r}: PEFT computes {unknown[0]!r} from the model when it saves, and has no way to load it "
                "back into its parts: save and load this adapter with PEFT's own methods on an unsharded model"
            )
        return {key: owners[id(value)] for key, value in kept.items()}


class InjectedFormat(AdapterFormat):
    """The active adapter of a `PreTrainedModel` (`add_adapter`), as its `save_pretrained` writes it."""

    def _adapters(self) -> list[str]:
        return list(self._model.active_adapters()[:1])

    def _prefix(self, adapter: str) -> str:
        return ""

    def _kept(self, adapter: str, state: Mapping[str, Any], embeddings: Any) -> dict[str, Any]:
        kept = super()._kept(adapter, state, embeddings)
        return {f"base_model.model.{key}": value for key, value in kept.items()}


def has_custom_save(model: nn.Module) -> bool:
    """Return whether a model overrides `save_pretrained`, which may then save other values than the weights."""
    method = getattr(type(model), "save_pretrained", None)
    is_stock = str(getattr(method, "__module__", "")).partition(".")[0] in ("transformers", "peft")
    is_injected = getattr(model, "_hf_peft_config_loaded", False)  # some classes then save the base, too
    return hub_format(model) is not None and not (
        method is PreTrainedModel.save_pretrained or (is_stock and not is_injected)
    )


def without_weights(model: nn.Module, state: Mapping[str, Any]) -> Attributes:
    """Return patches, for `replaced`, with which `save_pretrained(state_dict={})` writes all files but the weights on one rank.

    Args:
        model: the model.
        state: see `WeightFormat.plan_files`; its dtypes are written to config.json.
    """
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    out = [*patched_state_dict(model, {}), *patched_dtypes(model, dtypes)]
    out.append((transformers.utils.logging, "_tqdm_active", False))  # else it would show an empty progress bar
    if getattr(model, "_hf_peft_config_loaded", False):
        out.append((model, "get_adapter_state_dict", lambda **_: {}))
    if "peft.peft_model" in sys.modules:

        def none(model: Any, *_: Any, adapter_name: str = "default", **__: Any) -> dict[str, Any]:
            _rank_masks(model, adapter_name)
            return {}

        out.append((sys.modules["peft.peft_model"], "get_peft_model_state_dict", none))
    return out


def _rank_masks(model: Any, adapter: str) -> dict[str, Tensor]:
    """Return AdaLoRA's masks as tensors, since lists do not index meta tensors; rename them as PEFT does when it saves."""
    config = model.peft_config[adapter]
    ranks = getattr(config, "rank_pattern", None) or {}
    if not any(isinstance(rank, list) for rank in ranks.values()):  # LoRA's are numbers
        return {}
    config.rank_pattern = {name.replace(f".{adapter}", ""): rank for name, rank in ranks.items()}
    return {name: torch.tensor(rank, device="cpu") for name, rank in config.rank_pattern.items()}


def _known(model: nn.Module, state: Mapping[str, Any]) -> Conversions:
    """Return new `Conversions` with the meta tensors of `state`, named by their parameters."""
    names, conversions = names_of(model), Conversions()
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            conversions.source(names.get(key, key), value)
    return conversions


def _entries(
    kept: Mapping[str, Tensor],
    conversions: Conversions,
    computed: Callable[[dict[str, Tensor]], Mapping[str, Conversion]],
) -> list[Entry]:
    """Return the tensors of a file. `computed` finds the conversions of those that are not made of runs."""
    runs = {key: tuple(conversions.pieces(tensor) or ()) for key, tensor in kept.items() if tensor.is_meta}
    values: dict[str, Any] = {key: tensor.detach().cpu() for key, tensor in kept.items() if not tensor.is_meta}
    values |= computed({key: kept[key] for key, found in runs.items() if not found and kept[key].numel()})
    return [
        Entry(key, dtype_name(tensor.dtype), tuple(tensor.shape), runs.get(key, ()), values.get(key))
        for key, tensor in kept.items()
    ]


def _prompt_encoder(model: Any, state: Mapping[str, Any]) -> Attributes:
    """Return patches, for `replaced`, that make prompt encoders, whose results PEFT saves, read `state` without hooks.

    On meta tensors the result has the right shape only.
    """
    out: Attributes = []
    shapes_only = False
    for name, module in model.named_modules():
        if name.startswith("prompt_encoder."):
            params = {key: state.get(f"{name}.{key}", param) for key, param in module._parameters.items()}
            shapes_only |= any(value is not None and value.is_meta for value in params.values())
            if shapes_only:
                params = {
                    key: None if each is None else torch.zeros_like(each, device="cpu") for key, each in params.items()
                }
            out += [(module, "_parameters", params), (module, "_forward_hooks", {}), (module, "_forward_pre_hooks", {})]
    if shapes_only:
        stock = model.get_prompt_embedding_to_save
        out.append((model, "get_prompt_embedding_to_save", lambda name: torch.empty_like(stock(name), device="meta")))
    return out


# Loading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedLoad:
    """The parameters and buffers that the stock loader would set."""

    conversions: Conversions
    results: dict[str, Tensor]
    """Name in the model (every name of a tied parameter that the files have) -> meta tensor."""
    info: Any
    """transformers' LoadStateDictInfo."""


def planned_load(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], load_config: LoadStateDictConfig, *, place: bool
) -> PlannedLoad:
    """Run the stock loader on meta tensors for `stored`, without reading a byte.

    Args:
        place: set the meta tensors as the model's parameters and buffers, in the dtypes of the stock loader. Else the
            model does not change, and the meta tensors keep the dtypes of the files.
    """
    conversions = Conversions()
    results: dict[str, Tensor] = {}
    stock_set = core_loading.set_param_for_module

    def materialize(
        pool: Any, tensor: StoredTensor, device: Any = None, dtype: Any = None, **_: Any
    ) -> Callable[[], Tensor]:
        kept = dtype if place and dtype is not None else getattr(torch, tensor.dtype)
        meta = torch.empty(tensor.shape, dtype=kept, device="meta")
        conversions.source(keys[id(tensor)], meta)
        return lambda: meta

    def set_param(model: Any, name: str, value: Tensor, info: Any, quantizer: Any) -> None:
        results[name] = value
        extra = name.rpartition(".")[2] == EXTRA_STATE
        if place and not extra:
            stock_set(model, name, value, info, quantizer)
            if name in info.unexpected_keys:  # the model has None under this name
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
        # `state_dict()` of a sharded model is a collective, and gathers it.
        known = meta_state_dict(model) | dict.fromkeys(extra_states(model), torch.empty(0, device="meta"))
        others.append((model, "state_dict", lambda *args, **kwargs: dict(known)))
    with patched(others), conversions.recording():
        info, _ = core_loading.convert_and_load_state_dict_in_model(
            model=model,
            state_dict=dict(stored),
            load_config=dataclasses.replace(load_config, device_map={"": torch.device("meta")}),
        )
    return PlannedLoad(conversions, results, info)


def _located(
    conversions: Conversions, results: Mapping[str, Tensor], names: Mapping[str, str], buffers: Collection[str]
) -> WeightLocations:
    pieces: dict[str, Sequence[Extent[str]]] = {}
    found_buffers: dict[str, str] = {}
    computed: dict[str, Tensor] = {}
    for name, result in results.items():
        found = conversions.pieces(result)
        if name in buffers and found is not None and len({piece.source for piece in found}) == 1:
            found_buffers[name] = found[0].source
        elif found is None or name in buffers:
            computed.setdefault(names.get(name, name), result)
        else:
            pieces.setdefault(names[name], found)
    computed = {name: result for name, result in computed.items() if name not in pieces}
    return WeightLocations(pieces, found_buffers, tuple(dict.fromkeys(conversions.computed(computed).values())))


def _fresh(conversion: Any) -> Any:
    """Return a copy of a transform as it was before its first match."""
    fresh = copy.deepcopy(conversion)
    if hasattr(fresh, "_active"):  # a group of renamings that begins with its first match
        fresh._active = None
    return fresh
