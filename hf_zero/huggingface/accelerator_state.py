"""`save_state`, `load_state` and `save_model` of an Accelerator with sharded models.

    folder/  model.safetensors, config.json, …      the first model, as `save_pretrained` writes it (PEFT: adapters only)
             model_1/                               the second
             optimizer/, optimizer_1/
             scheduler.bin, random_states_0.pkl, …  accelerate's own
             zero_manifest.json                     last

One `CheckpointWriter`: accelerate's code writes small files into the staged folder, and every rank writes its own ranges there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import save as save_plain
from safetensors.torch import load_file
from torch import nn

from ..checkpoint.load import CheckpointReader
from ..checkpoint.ranges import NamedPiece
from ..checkpoint.save import CheckpointWriter, is_hf_zero_checkpoint, optimizer_folder
from ..checkpoint.series import CheckpointSeries
from ..checkpoint.weights import StateDictFormat, format_of
from ..comm.agreement import on_all_ranks
from ..core.layout import Extent
from ..core.patching import patched
from ..engine.pieces import ParameterPieces
from ..engine.saving import filling, open_saving, put_weights
from ..errors import CheckpointError, ConfigError
from ..params.engine import Engine, engine_of
from ..tiers.array import fetch, flat_of
from .checkpoints import MAX_SHARD_SIZE, agree_is_checkpoint, bare_optimizer, load_optimizer, save_gathered, send_files
from .patches import AcceleratorBase, meta_state_dict, patched_state_dict


class ZeroStateMixin(AcceleratorBase):
    """Save and load. Every method is a collective: call it on every rank."""

    _optimizers: list[Any]

    @property
    def _zero_series(self) -> CheckpointSeries:
        # accelerate writes this file last unless custom objects are registered.
        return CheckpointSeries(Path(self.project_dir, "checkpoints"), "checkpoint_", "random_states_0.pkl")

    if TYPE_CHECKING:

        def _zero_bound_engine(self, optimizer: Any) -> Engine: ...

    def _zero_first_engine(self) -> Engine | None:
        return next((engine for model in self._models if (engine := engine_of(model)) is not None), None)

    def _zero_wait_for_save(self) -> None:
        engine = self._zero_first_engine()
        if engine is not None:
            engine.wait_for_save()

    def end_training(self) -> None:
        """Wait for a save that is written in the background, then end as accelerate does."""
        self._zero_wait_for_save()
        super().end_training()

    # -- one model --

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights of all ranks with the config files that `from_pretrained` needs.

        A PEFT model's adapters are saved as its own `save_pretrained` does. `safe_serialization=False` gathers the model on
        rank 0 and pickles it.

        Raises:
            CheckpointError: on every rank; the folder keeps its content.
        """
        engine = engine_of(model)
        if engine is None:
            folder = Path(save_directory)
            if self.is_main_process and "model" in format_of(model).stems and not folder.is_file():
                format_of(model).write_metadata(meta_state_dict(model), folder)
            return super().save_model(model, save_directory, max_shard_size, safe_serialization)
        self._zero_refuse_each_node()
        self._zero_wait_for_save()
        own = format_of(model)
        form = StateDictFormat(model) if "model" in own.stems else None  # accelerate's names, or the adapters'
        with open_saving(engine, save_directory) as saving:
            if form is not None:
                with on_all_ranks(engine.wire, f"saving to {saving.target}"):
                    if engine.rank == 0:
                        own.write_metadata(engine.outline(), saving.folder)
            stock: Any = super().save_model
            if safe_serialization and stock.__func__ is Accelerator.save_model:
                put_weights(saving, engine, max_shard_size, form=form)
            else:  # pickling, or a subclass's own method, needs full values
                save_gathered(saving, engine, partial(stock, model, saving.folder, max_shard_size, safe_serialization))
            saving.commit()
        return None

    # -- everything --

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save accelerate's folder with weights and optimizer state of every rank, as one rename. Returns its path.

        With `ZeroPlugin(async_save=True)` it appears later, at the latest with the next save or load, or `end_training`.
        With `automatic_checkpoint_naming`, `total_limit` applies after the save and never removes the last complete one.

        Raises:
            CheckpointError: on every rank; an older folder keeps its content.
            ConfigError: `safe_serialization=False`: a checkpoint has no pickled weights.
        """
        engine = self._zero_first_engine()
        if engine is None:
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        self._zero_refuse_each_node()
        if not safe_serialization:
            raise ConfigError(
                "save_state(safe_serialization=False): weights are saved as safetensors only; leave it out"
            )
        self._zero_wait_for_save()
        project = self.project_configuration
        named, iteration = project.automatic_checkpoint_naming, project.iteration
        if not named and output_dir is None:
            raise ConfigError(
                "save_state: pass output_dir, or turn on automatic_checkpoint_naming in ProjectConfiguration"
            )
        series = self._zero_series if named else None
        target = Path(output_dir or ".").expanduser()
        if series is not None:
            target = series.folder / f"{series.prefix}{self.save_iteration}"
            with on_all_ranks(engine.wire, f"saving to {target}") as report:
                report.local = target.exists(), series.next_number()
            exists, following = report.by_rank[0]
            # After a load skipped a damaged folder, the next save replaces that folder.
            if exists and series.find_damage(engine.wire, target) is None:
                raise ValueError(
                    f"Checkpoint directory {target} ({self.save_iteration}) already exists and is complete. Set "
                    f"accelerator.project_configuration.iteration = {following} to continue after the existing ones."
                )
        parent: Any = super()
        try:
            with open_saving(engine, target) as saving:
                project.automatic_checkpoint_naming = False  # else it would name and rotate staged folders
                left = self._zero_small_files(saving, engine, parent.save_state, save_model_func_kwargs)
                project.automatic_checkpoint_naming = named
                for index in left:
                    self._zero_put_model(saving, engine, index)
                for index, optimizer in enumerate(self._optimizers):
                    state = self._zero_bound_engine(optimizer).optimizer_state(bare_optimizer(optimizer))
                    saving.optimizer(state, max_shard_size=MAX_SHARD_SIZE, folder=optimizer_folder(index))
                send_files(saving, engine.wire)
                on_complete = partial(self._zero_after, engine, series, target)
                engine.saves.commit(saving, in_background=engine.config.async_save, on_complete=on_complete)
        except BaseException:
            project.automatic_checkpoint_naming, project.iteration = named, iteration
            raise
        return target

    def _zero_small_files(
        self, saving: CheckpointWriter, engine: Engine, stock: Callable[..., Any], settings: dict[str, Any]
    ) -> list[int]:
        """Run accelerate's `save_state` and registered hooks. Returns the indices of models that are still to be saved."""
        # A user's hook may save on one rank, so it needs full values.
        outlines = not self._save_model_state_pre_hook
        states = {m: e.outline() if outlines and (e := engine_of(m)) else m.state_dict() for m in self._models}
        left: list[int] = []

        def take_states(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
            left[:] = [i for i, model in enumerate(models) if any(states[model] is other for other in weights)]
            weights.clear()

        # accelerate's `save_state` passes models and states to the hooks in order of registration, then writes the states left
        # in the list. This hook must be last: earlier hooks have saved the states that they removed. This one saves the others.
        hook = self.register_save_state_pre_hook(take_states)
        optimizers, self._optimizers = self._optimizers, []
        shown = [item for model, state in states.items() for item in patched_state_dict(model, state)]
        shown.append((self, "get_state_dict", lambda model, *args, **kwargs: states[model]))
        try:
            with on_all_ranks(engine.wire, f"saving to {saving.target}") as report, patched(shown):
                stock(str(saving.folder), True, **settings)
                report.local = left
        finally:
            hook.remove()
            self._optimizers = optimizers
        writers: list[int] = report.by_rank[0]  # a hook may save, and remove states, on the main process only
        return writers

    def _zero_put_model(self, saving: CheckpointWriter, first: Engine, index: int) -> None:
        model = self._models[index]
        engine = engine_of(model)
        inside = f"model_{index}" if index else ""
        if engine is None:  # not sharded: every rank has the full model
            with on_all_ranks(first.wire, f"saving to {saving.target}"):
                if first.rank == 0:
                    place = saving.folder / inside
                    place.mkdir(exist_ok=True)
                    save_plain(dict(model.state_dict()), place / "model.safetensors", safe_serialization=True)
            return
        engine.quiesce()
        put_weights(saving, engine, MAX_SHARD_SIZE, inside)

    def _zero_after(self, engine: Engine, series: CheckpointSeries | None, target: Path) -> None:
        with on_all_ranks(engine.wire, f"after saving {target}"):
            if series is not None and self.is_main_process:
                series.rotate(series.folders(), self.project_configuration.total_limit, [target])

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load a folder of `save_state` of any stage and number of ranks, or one of plain accelerate.

        Without `input_dir` and with `automatic_checkpoint_naming`: the newest complete one, with every digest checked.

        Raises:
            CheckpointError: on every rank: it is damaged or of another model. Models may hold part of it.
        """
        engine = self._zero_first_engine()
        if engine is None:
            return super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        self._zero_wait_for_save()
        folder = self._zero_choose(engine, input_dir)
        loading = CheckpointReader(engine.wire, folder) if agree_is_checkpoint(engine.wire, folder) else None
        strict = load_model_func_kwargs.get("strict", True)
        every = list(self._models)

        def load_models(models: list[nn.Module], _: str) -> None:
            for index, model in enumerate(every):
                if not any(model is other for other in models):  # a hook before this one may have loaded it
                    continue
                engine, inside = engine_of(model), f"model_{index}" if index else ""
                if loading is None:
                    _load_plain(model, folder, index, strict)
                elif engine is not None:
                    _load_weights(loading, engine, strict, inside)
                else:
                    _load_unsharded(loading, model, strict, inside)
            models.clear()

        # Must be the last hook: models that another hook loaded are no longer in the list. An empty list keeps accelerate
        # from loading models; the empty list of optimizers does the same for optimizers.
        optimizers, self._optimizers = self._optimizers, []
        handle = self.register_load_state_pre_hook(load_models)
        try:
            super().load_state(str(folder), load_kwargs, **load_model_func_kwargs)
        finally:
            handle.remove()
            self._optimizers = optimizers
        for index, optimizer in enumerate(optimizers):
            inside = optimizer_folder(index)
            if loading is not None:
                load_optimizer(loading, self._zero_bound_engine(optimizer), bare_optimizer(optimizer), inside)
                continue
            single = folder / f"{inside}.bin"
            if not single.is_file():
                raise CheckpointError(f"no optimizer state in {folder}: expected {inside}/ or {single.name}")
            optimizer.load_state_dict(torch.load(single, map_location="cpu", weights_only=True, mmap=True))
        loaded = {bare_optimizer(optimizer) for optimizer in optimizers}
        for found in map(engine_of, every):
            if found is not None and loaded.issuperset(found.optimizers):
                found.forget_failure()
        return None

    def _zero_choose(self, engine: Engine, given: str | None) -> Path:
        if given is not None:
            folder = Path(given).expanduser()
            if not folder.is_dir():
                raise ValueError(f"Tried to find {folder} but folder does not exist")
            if not is_hf_zero_checkpoint(folder) and engine.rank == 0:
                warnings.warn(
                    f"{folder} has no zero_manifest.json: it is of plain accelerate, and nothing vouches for its bytes",
                    stacklevel=3,
                )
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        newest = self._zero_series.newest_complete(engine.wire)
        if newest is None:
            folder = self._zero_series.folder
            raise CheckpointError(f"{folder} holds no checkpoint_N: nothing has been saved there")
        return newest

    def _zero_refuse_each_node(self) -> None:
        if self.project_configuration.save_on_each_node:
            raise ConfigError("save_on_each_node=True: all ranks write one folder together; save to a shared one")


def _load_weights(loading: CheckpointReader, engine: Engine, strict: bool, folder: str) -> None:
    engine.prepare_load()
    with filling(engine, loading):
        pieces, form = ParameterPieces(engine.units), format_of(engine.model)
        loading.weights(pieces, engine.model, form, strict=strict, folder=folder)()


class _FullParameters:
    """The full parameters of a model without an engine, as `Fillable`."""

    def __init__(self, model: nn.Module) -> None:
        self._params = dict(model.named_parameters())
        self._flat = {name: flat_of(param) for name, param in self._params.items()}

    def to_fill(self) -> Iterator[NamedPiece]:
        for name, values in self._flat.items():
            yield name, Extent(values, 0, 0, self._params[name].numel())

    @torch.no_grad()
    def put(self) -> None:
        """Copy values back to parameters that are not contiguous: `to_fill` returned copies of them."""
        for name, param in self._params.items():
            if not param.is_contiguous():
                param.copy_(fetch(self._flat[name]).view(param.shape))


def _load_unsharded(loading: CheckpointReader, model: nn.Module, strict: bool, folder: str) -> None:
    form = format_of(model)
    if "model" not in form.stems and not any(
        (loading.folder / folder / f"{stem}.safetensors").is_file() for stem in form.stems
    ):
        form = StateDictFormat(model)  # adapters that were saved without an engine, with their base
    everything = _FullParameters(model)
    loading.weights(everything, model, form, strict=strict, folder=folder)()
    everything.put()


def _load_plain(model: nn.Module, folder: Path, index: int, strict: bool) -> None:
    """Load accelerate's files. Its own loader compares storages of `state_dict()`, which only rank 0 has."""
    suffix = f"_{index}" if index else ""
    safe, pickled = folder / f"model{suffix}.safetensors", folder / f"pytorch_model{suffix}.bin"
    if safe.is_file():
        state = load_file(safe)
    elif pickled.is_file():
        state = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
    else:
        raise CheckpointError(f"no weights for model {index} in {folder}: expected {safe.name} or {pickled.name}")
    if all(name.startswith("module.") for name in state):  # plain data parallel keeps its wrapper's prefix
        state = {name.removeprefix("module."): value for name, value in state.items()}
    result = model.load_state_dict(state, strict=False)
    if strict:
        names = dict(model.named_parameters(remove_duplicate=False))
        present = {id(param) for name, param in names.items() if name in state}
        missing = [key for key in result.missing_keys if id(names.get(key)) not in present]
        if missing or result.unexpected_keys:
            raise CheckpointError(
                f"{safe if safe.is_file() else pickled} does not fit {type(model).__name__}: missing {missing[:5]}, "
                f"unexpected {result.unexpected_keys[:5]}"
            )
