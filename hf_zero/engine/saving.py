"""Implements `Engine.save` and `Engine.load`.

    folder/  weights and small files as `save_pretrained` writes them (see `checkpoint.weights.WeightFormat`)
             optimizer/STATE.safetensors, optimizer/optimizer.json; of further optimizers optimizer_1/, optimizer_2/, …
             zero_state.json, zero_state.safetensors     see `checkpoint.objects`
             zero_manifest.json                          last: see `checkpoint.manifest`

The files do not depend on the number of ranks, the stage, or the tier of the states.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.cards import adding_to_card
from ..checkpoint.load import CheckpointReader
from ..checkpoint.objects import Stateful, load_objects, save_objects
from ..checkpoint.save import CheckpointWriter, optimizer_folder
from ..checkpoint.weights import Files, WeightFormat, format_of
from ..core.precision import dtype_of
from ..errors import StateError
from ..plan.machine import free_host_bytes
from .context import Context
from .pieces import ParameterPieces

if TYPE_CHECKING:
    from .engine import Engine


def open_saving(engine: Engine, target: str | os.PathLike[str], **facts: Any) -> CheckpointWriter:
    """Finish the running step, and return a `CheckpointWriter` whose manifest has the engine's settings and `facts`."""
    engine.quiesce()
    return CheckpointWriter(engine.wire, target, stage=engine.config.stage, precision=str(engine.precision), **facts)


def save(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    save_optimizer: bool,
    objects: Mapping[str, Stateful] | None,
    in_background: bool,
) -> None:
    """Write a checkpoint. No other save may be running.

    Args:
        in_background: commit behind training.
    """
    with open_saving(engine, folder) as saving:
        put_weights(saving, engine, max_shard_size)
        for index, optimizer in enumerate(engine.optimizers if save_optimizer else ()):
            state = engine.optimizer_state(optimizer)
            saving.optimizer(state, max_shard_size=max_shard_size, folder=optimizer_folder(index))
        save_objects(saving, engine.wire, objects or {})
        engine.saves.commit(saving, in_background=in_background)


def put_weights(
    saving: CheckpointWriter,
    engine: Engine,
    max_shard_size: int | str,
    folder: str = "",
    form: WeightFormat | None = None,
) -> None:
    """Write the model's weights in a folder inside the checkpoint, or in the checkpoint itself.

    Args:
        form: the names in files, for a caller that has written all files but the weights. None: write all files of the
            model's own format.
    """

    def plan_files() -> Files:
        state, place = engine.outline(), saving.folder / folder
        names = form or format_of(engine.model)
        if form is None:
            with adding_to_card(place, saving.target / folder):
                names.write_metadata(state, place)
        return names.plan_files(state, place, max_shard_size)

    saving.weights(ParameterPieces(engine.units), plan_files, folder)


def load(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    load_optimizer: bool | None,
    objects: Mapping[str, Stateful] | None,
    verify: bool,
    strict: bool,
) -> None:
    """Read a checkpoint. No save may be running."""
    wire = engine.wire
    loading = CheckpointReader(wire, folder, verify=verify)
    if loading.manifest is None and wire.rank == 0:
        warnings.warn(
            f"{folder} has no zero_manifest.json: it is a plain model folder. Its weights are loaded without a check of "
            "their bytes, and there is no optimizer state",
            stacklevel=3,
        )
    wanted = loading.has_optimizer() if load_optimizer is None else load_optimizer
    if wanted and not engine.optimizers:
        if load_optimizer:
            raise StateError("load: the engine has no optimizer; call engine.bind(optimizer) first")
        wanted = False
    optimizers = [engine.optimizer_state(each) for each in engine.optimizers] if wanted else []
    with filling(engine, loading):
        # All checks must run before the first load: a checkpoint that does not fit must change nothing.
        loads = [loading.weights(ParameterPieces(engine.units), engine.model, format_of(engine.model), strict=strict)]
        loads += [loading.optimizer(state, folder=optimizer_folder(index)) for index, state in enumerate(optimizers)]
        for each in loads:
            each()
    if wanted or not (engine.optimizers and engine.context.mixes_states):
        engine.forget_failure()
    load_objects(loading, wire, objects or {}, free_host_bytes)


@contextmanager
def filling(engine: Engine, loading: CheckpointReader) -> Iterator[None]:
    """Write masters and an optimizer's states inside; gathered values are refreshed at the end. A collective.

    Call `engine.prepare_load` before. If the block raises half-way, the model is refused until another load completes.
    """
    try:
        yield
    except BaseException as error:
        if loading.written:
            why = f"{loading.folder}: {type(error).__name__}"
            engine.context.fail_load(why, of_states=loading.written == "states")
        raise
    finally:
        engine.refresh()


def outline(context: Context) -> dict[str, Any]:
    """Return `model.state_dict()` without values or communication: parameters as meta tensors, buffers as CPU copies."""
    model = context.model
    with _meta_parameters(context):
        state: dict[str, Any] = model.state_dict()
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) and not value.is_meta else value
        for key, value in state.items()
    }


@contextmanager
def _meta_parameters(context: Context) -> Iterator[None]:
    """Give the model parameters without values inside the block, in the dtypes that files have."""
    meta = {}
    for unit in context.units:
        for span in unit.spans:
            for slot, param in zip(span.layout.slots, span.params):
                values = torch.empty(slot.spec.shape, dtype=dtype_of(slot.spec.dtype), device="meta")
                meta[param] = nn.Parameter(values, requires_grad=False)
    replaced = [
        (module, name, param)
        for module in context.model.modules()
        for name, param in module._parameters.items()
        if param is not None and param in meta
    ]
    try:
        for module, name, param in replaced:
            module._parameters[name] = meta[param]
        yield
    finally:
        for module, name, param in replaced:
            module._parameters[name] = param
