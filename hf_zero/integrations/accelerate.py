"""accelerate: `ZeroPlugin`, the one argument, and the Accelerator that it turns a stock one into.

`Accelerator(parallelism_config=...)` hands the *live* accelerator to `ParallelismConfig._validate_accelerator`.
`ZeroPlugin` uses that moment to change the accelerator's class to one with `ZeroAcceleratorMixin` in front; nothing of
accelerate is patched. `ZeroAccelerator(zero_plugin=...)` says the same thing out loud.

Invariants: `distributed_type` stays what accelerate found (its own gather, reduce and barriers depend on it), the model
keeps its type, the optimizer and its param_groups stay the same objects.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import safetensors.torch
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..pieces_old import load_optimizer, save_optimizer
from ..config import ZeroConfig
from ..engine import Engine, engine_of, shard
from ..errors import CheckpointError, ConfigError, UnsupportedOptimizerError

OPTIMIZER_FOLDER = "zero_optimizer"
"""Where the ranks' optimizer pieces lie inside a checkpoint folder; a second optimizer's in `zero_optimizer_1`, …"""

_DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


# ---- the plugin ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, repr=False)
class ZeroPlugin(ParallelismConfig):
    """`Accelerator(parallelism_config=ZeroPlugin(stage=3))`; the same argument in `TrainingArguments`.

    The fields are those of `ZeroConfig`, one to one. Pure data: it is pickled with the training arguments. The sizes of
    the base class stay 1, so that accelerate builds no device mesh and splits data as for plain data parallel.

    Raises:
        ConfigError: a bad value; a tensor, context or sequence parallel size; an Accelerator that exists already, which
            would ignore the plugin.
    """

    stage: int = ZeroConfig().stage
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in fields(ParallelismConfig):
            self._refuse_inherited(field.name)
        super().__post_init__()
        _ = self.config
        self._refuse_older_accelerator()

    def _refuse_inherited(self, name: str) -> None:
        value = getattr(self, name)
        if name.endswith("_size"):
            variable = f"PARALLELISM_CONFIG_{name.upper()}"
            if value is None and os.environ.get(variable, "1") != "1":
                raise ConfigError(
                    f"{variable}={os.environ[variable]} asks for a parallelism that ZeroPlugin does not combine with "
                    "(every rank is a data parallel rank); unset it"
                )
            if value not in (None, 1):
                raise ConfigError(
                    f"ZeroPlugin takes no {name} (found {value!r}): every rank is a data parallel rank; tensor, "
                    "context and sequence parallelism do not go with it. Settings are keywords: ZeroPlugin(stage=3)"
                )
            setattr(self, name, 1)
        elif name.endswith("_handler") and value is not None:
            raise ConfigError(f"ZeroPlugin takes no {name} (found {value!r}): remove it")

    def _refuse_older_accelerator(self) -> None:
        """accelerate keeps its first configuration for the whole process: a later plugin is dropped without a word."""
        state = AcceleratorState._shared_state
        if not state or state == PartialState._shared_state:
            return
        older = state.get("parallelism_config")
        remedy = (
            "build the plugin and pass it to the first Accelerator of the process, or call "
            "accelerate.state.AcceleratorState._reset_state(True) before building the plugin"
        )
        if not isinstance(older, ZeroPlugin):
            raise ConfigError(f"an Accelerator exists already and would ignore this ZeroPlugin: {remedy}")
        if older.config != self.config:
            # TrainingArguments resets accelerate's state by itself, so this may be fine: warn, don't raise.
            warnings.warn(
                f"an Accelerator exists already, with {older}; one built now would keep that and ignore {self}: "
                f"{remedy}",
                stacklevel=4,
            )

    @property
    def config(self) -> ZeroConfig:
        """The engine's settings."""
        return ZeroConfig(**{field.name: getattr(self, field.name) for field in fields(ZeroConfig)})

    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(ZeroConfig))
        return f"ZeroPlugin({values})"

    def to_json(self) -> dict[str, Any]:
        """What `TrainingArguments.to_dict` shows."""
        return self.config.to_dict()

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        # Not super(): it would claim the ranks for its own replicate dimension and refuse CPU ranks.
        _refuse_rivals(accelerator)
        accelerator.__class__ = zero_accelerator_cls(type(accelerator))
        if not isinstance(accelerator, ZeroAcceleratorMixin):  # for the type checker: the line above made it one
            raise ConfigError(f"{type(accelerator).__name__} could not be turned into a ZeroAccelerator")
        accelerator.zero_plugin = self
        _adopt_trainer()


def _adopt_trainer() -> None:
    if "transformers.trainer" in sys.modules:
        from .transformers import adopt_trainer

        adopt_trainer()


def _refuse_rivals(accelerator: Accelerator) -> None:
    """Settings of accelerate that cannot be on together with the plugin."""
    state = accelerator.state
    rivals = (
        ("DeepSpeed", "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
        ("FSDP", "fsdp_plugin", "ACCELERATE_USE_FSDP", DistributedType.FSDP),
        ("Megatron-LM", "megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM", DistributedType.MEGATRON_LM),
    )
    for name, attribute, variable, kind in rivals:
        asked = os.environ.get(variable, "false").lower() == "true"
        if asked or getattr(state, attribute, None) is not None or state.distributed_type == kind:
            raise ConfigError(
                f"ZeroPlugin and {name} both want to shard the model: remove the {name} plugin (or "
                f"`{variable}` / the `accelerate config` file that sets it), or remove ZeroPlugin"
            )
    if state.distributed_type not in _DATA_PARALLEL:
        raise ConfigError(
            f"ZeroPlugin runs on CPU and CUDA ranks, found distributed_type={state.distributed_type}; remove ZeroPlugin"
        )
    if state.mixed_precision == "fp8":
        raise ConfigError("mixed_precision='fp8' is not supported by ZeroPlugin: use 'bf16', 'fp16' or 'no'")
    dynamo = getattr(state, "dynamo_plugin", None)
    if dynamo is not None and dynamo.backend != "NO":
        raise ConfigError(
            f"torch.compile (found dynamo backend {dynamo.backend}) is not supported by ZeroPlugin: turn it off"
        )


# ---- the accelerator -------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from accelerate import Accelerator as _AcceleratorBase
else:
    _AcceleratorBase = object


class ZeroAcceleratorMixin(_AcceleratorBase):
    """What differs from the stock Accelerator. Everything else (data, metrics, schedulers, tracking) is inherited."""

    zero_plugin: ZeroPlugin
    _optimizers: list[Any]

    # -- prepare --

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's: any order, any number of calls; the model first or in the same call as its optimizer."""
        optimizers = [bare_optimizer(obj) for obj in args if isinstance(obj, Optimizer)]
        for position, obj in enumerate(args):
            if isinstance(obj, nn.Module):
                wanted = device_placement[position] if device_placement and position < len(device_placement) else None
                self._zero_attach(obj, optimizers, wanted, evaluation_mode=False)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Attach the engine in place; then accelerate's own autocast, never DDP."""
        if self._zero_attach(model, (), device_placement, evaluation_mode) is None:
            # Nothing to train and nothing to save by sharding: accelerate's evaluation path.
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        if hasattr(model, "_original_forward"):
            # Evaluated before it is trained: its forward runs under autocast already.
            model.__dict__["_is_accelerate_prepared"] = True
        # evaluation_mode is accelerate's way to say "autocast, but no DDP".
        prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        prepared.__dict__["_is_accelerate_prepared"] = True
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer)
        if type(optimizer).__name__ in ("Lomo", "AdaLomo"):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} updates parameters inside backward, before gradients are averaged over "
                "the ranks; use an element-wise optimizer such as torch.optim.AdamW"
            )
        bare = bare_optimizer(optimizer)
        engine = _engine_of_optimizer(bare)
        if engine is None:
            raise ConfigError(
                f"{type(bare).__name__} holds no parameter of a model that this Accelerator has prepared: pass the "
                "model to prepare() before its optimizer or together with it"
            )
        if engine.optimizer is not bare:
            engine.bind(bare)
        # Placement would send the optimizer's whole state through state_dict(), a collective; shards lie right already.
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _zero_attach(
        self, model: nn.Module, optimizers: Sequence[Optimizer], placement: bool | None, evaluation_mode: bool
    ) -> Engine | None:
        """The model's engine, made now if need be; None where plain evaluation holds no more than sharding would."""
        config = self.zero_plugin.config
        engine = engine_of(model)
        mine = [optimizer for optimizer in optimizers if _holds_parameter_of(optimizer, model, engine)]
        if len(mine) > 1:
            raise ConfigError(
                f"{len(mine)} optimizers hold parameters of one {type(model).__name__}: build one optimizer with "
                "several parameter groups instead"
            )
        optimizer = mine[0] if mine else None
        if engine is None:
            trains = not evaluation_mode and any(param.requires_grad for param in model.parameters())
            if config.policy.keep_full and not trains:
                return None
            self._zero_check_model(model)
            _adopt_trainer()  # one that was given an Accelerator from elsewhere
            if self.device_placement if placement is None else placement:
                model.to(self.device)
            engine = shard(model, optimizer, config, mixed_precision=self._zero_precision())
            _SHARDED.discard(model)
        elif engine.config != config:
            raise ConfigError(
                f"{type(model).__name__} is sharded with {engine.config} already, the Accelerator has {config}: use "
                "the same settings, or undo the first with engine.detach()"
            )
        elif optimizer is not None and engine.optimizer is not optimizer:
            engine.bind(optimizer)
        if model not in _SHARDED:
            _SHARDED.add(model)
            _KNOWN_IDS.pop(model, None)
            if "transformers" in sys.modules:
                from .transformers import adopt_model

                adopt_model(model, engine)
        return engine

    def _zero_check_model(self, model: nn.Module) -> None:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            raise ConfigError(f"pass the bare model to prepare(), not a {type(model).__name__}: the engine replaces it")
        if hasattr(model, "_orig_mod"):
            raise ConfigError("pass the bare model to prepare(), not a compiled one: torch.compile is not supported")
        device_map = getattr(model, "hf_device_map", None)
        if device_map is not None and len(set(device_map.values())) > 1:
            raise ConfigError(
                f"{type(model).__name__} was loaded with a device_map over "
                f"{sorted(map(str, set(device_map.values())))}: load it without device_map, the engine decides what "
                "each rank holds"
            )

    def _zero_precision(self) -> str:
        """The precision that really is in force: accelerate has no autocast for fp16 on CPU, and it can be disabled."""
        handler = self.autocast_handler
        on = self.native_amp and (handler is None or handler.enabled)
        return str(self.mixed_precision) if on else "no"

    # -- the step --

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate; `accumulate()` comes here too."""
        engine = engine_of(model)
        with super().no_sync(model) if engine is None else engine.no_sync():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Nothing to do: whether gradients travel is asked at the backward, not fixed at the forward as in DDP."""
        if engine_of(model) is None:
            with Accelerator.trigger_sync_in_backward(model):
                yield
        else:
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """The true norm over all ranks, as a 0-dim tensor."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = _owner_of(params, "clip_grad_norm_")
        if found is None:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        self.unscale_gradients()
        engine, part = found
        return engine.clip_grad_norm_(max_norm, norm_type=norm_type, parameters=part)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = _owner_of(params, "clip_grad_value_")
        if found is None:
            return super().clip_grad_value_(params, clip_value)
        self.unscale_gradients()
        engine, part = found
        return engine.clip_grad_value_(clip_value, parameters=part)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Every rank must make the same number of steps: an early end would leave the others waiting for its shards."""
        if not any(isinstance(obj, nn.Module) and engine_of(obj) is not None for obj in joinables):
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        if self.num_processes > 1:
            warnings.warn(
                "join_uneven_inputs has no effect on a sharded model: each rank holds parts that the others need, so "
                "all must make the same number of steps. Batches stay even (the last ones are filled up)",
                stacklevel=3,
            )
        yield

    # -- files --

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """On every rank; the main process writes."""
        if engine_of(model) is None:
            return super().save_model(model, save_directory, max_shard_size, safe_serialization)
        self._zero_refuse_each_node()
        state = model.state_dict()
        parent: Any = super()

        def write() -> None:
            if self.is_main_process:
                with serving_state_dict(model, state):
                    parent.save_model(model, save_directory, max_shard_size, safe_serialization)

        return on_every_rank(write, f"writing the model to {save_directory}")

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """accelerate's folder; every rank writes its optimizer state to `zero_optimizer/`, for any later world size."""
        if not any(True for _ in _engines()):
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        self._zero_refuse_each_node()
        states = [(model, model.state_dict()) for model in self._models if engine_of(model) is not None]
        optimizers, self._optimizers = self._optimizers, []
        handle = self.register_save_state_pre_hook(_drop_weights_off_main)
        parent: Any = super()
        written: list[Any] = []

        def write() -> None:
            with ExitStack() as serving:
                for model, state in states:
                    serving.enter_context(serving_state_dict(model, state))
                written.append(parent.save_state(output_dir, safe_serialization, **save_model_func_kwargs))
            if self.is_main_process:
                for index in range(len(optimizers)):
                    _optimizer_file(written[0], index).unlink(missing_ok=True)  # of plain data parallel, before

        try:
            on_every_rank(write, f"writing the state to {output_dir or self.project_dir}")
        finally:
            handle.remove()
            self._optimizers = optimizers
        for index, optimizer in enumerate(optimizers):
            save_optimizer(self._zero_bound_engine(optimizer), _optimizer_folder(written[0], index))
        self.wait_for_everyone()
        return written[0]

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """A folder of `save_state`, at any stage and world size, or one that plain data parallel wrote."""
        if not any(True for _ in _engines()):
            return super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        found: list[Path] = []

        def load_models(models: list[nn.Module], folder: str) -> None:
            found.append(Path(folder))
            for index, model in enumerate(models):
                _load_model(model, Path(folder), index, load_model_func_kwargs.get("strict", True))
            models.clear()

        optimizers, self._optimizers = self._optimizers, []
        handle = self.register_load_state_pre_hook(load_models)
        try:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        finally:
            handle.remove()
            self._optimizers = optimizers
        for index, optimizer in enumerate(optimizers):
            folder = _optimizer_folder(found[0], index)
            single = _optimizer_file(found[0], index)
            if single.is_file():  # save_state above leaves none: whoever wrote it did so later
                optimizer.load_state_dict(torch.load(single, map_location="cpu", weights_only=True, mmap=True))
            elif folder.is_dir():
                load_optimizer(self._zero_bound_engine(optimizer), folder)
            else:
                raise CheckpointError(f"no optimizer state in {found[0]}: expected {folder.name}/ or {single.name}")
        return None

    def _zero_bound_engine(self, optimizer: Optimizer) -> Engine:
        engine = _engine_of_optimizer(bare_optimizer(optimizer))
        if engine is None:
            raise ConfigError(
                f"{type(bare_optimizer(optimizer)).__name__} belongs to no sharded model of this Accelerator"
            )
        return engine

    def _zero_refuse_each_node(self) -> None:
        if self.project_configuration.save_on_each_node:
            raise ConfigError("save_on_each_node=True: only rank 0 holds the gathered model; save to a shared folder")


class ZeroAccelerator(ZeroAcceleratorMixin, Accelerator):
    """`ZeroAccelerator(zero_plugin=ZeroPlugin(stage=3), ...)`: the Accelerator, the plugin an argument of its own."""

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        given = kwargs.pop("parallelism_config", None)
        if given is not None and zero_plugin is not None:
            raise ConfigError("pass the plugin once: zero_plugin or parallelism_config")
        plugin = zero_plugin or given or ZeroPlugin()
        if not isinstance(plugin, ZeroPlugin):
            raise ConfigError(f"zero_plugin must be a ZeroPlugin, found {type(plugin).__name__}")
        super().__init__(*args, parallelism_config=plugin, **kwargs)
        kept = self.state.parallelism_config
        if not isinstance(kept, ZeroPlugin) or kept.config != plugin.config:
            raise ConfigError(
                f"an Accelerator existed before this one, and accelerate keeps its settings ({kept}) for the whole "
                f"process: {plugin} would be ignored. Build the ZeroAccelerator first"
            )


def zero_accelerator_cls(cls: type[Any]) -> type[Any]:
    """`cls` with the mixin in front."""
    return ZeroAccelerator if cls is Accelerator else put_in_front(ZeroAcceleratorMixin, cls)


# ---- helpers, also for the Trainer -----------------------------------------------------------------------------------


_MADE: dict[tuple[Any, ...], type[Any]] = {}
_SHARDED: WeakSet[nn.Module] = WeakSet()
"""Models that an Accelerator of this process has sharded. Like accelerate's state they are the process's, not one
object's: a second `Accelerator()` clips and saves what the first prepared, and `free_memory`, which the Trainer calls
before every run, only forgets lists."""
_KNOWN_IDS: WeakKeyDictionary[nn.Module, tuple[frozenset[int], frozenset[int]]] = WeakKeyDictionary()
"""Per sharded model the identities of all its parameters, and of those that train."""


def put_in_front(mixin: type[Any], cls: type[Any], **attributes: Any) -> type[Any]:
    """A subclass `Zero<cls>` of `mixin` and `cls`, made once; `cls` itself where it has the mixin."""
    if issubclass(cls, mixin):
        return cls
    key = (mixin, cls, *attributes.items())
    if key not in _MADE:
        _MADE[key] = type(f"Zero{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__, **attributes})
    return _MADE[key]


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _param_ids(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(param) for group in optimizer.param_groups for param in group["params"])


def _holds_parameter_of(optimizer: Optimizer, model: nn.Module, engine: Engine | None) -> bool:
    """After binding an optimizer holds slices, not parameters: then the engine knows."""
    if engine is not None and engine.optimizer is optimizer:
        return True
    return not _param_ids(optimizer).isdisjoint(map(id, model.parameters()))


def _engines() -> Iterator[Engine]:
    for model in list(_SHARDED):
        engine = engine_of(model)
        if engine is not None:
            yield engine


def _engine_of_optimizer(optimizer: Optimizer) -> Engine | None:
    for engine in _engines():
        if _holds_parameter_of(optimizer, engine.model, engine):
            return engine
    return None


def _owner_of(params: list[Any], caller: str) -> tuple[Engine, list[Any] | None] | None:
    """The engine that holds all of `params`, and which of its parameters are meant (None: all that train)."""
    wanted = frozenset(map(id, params))
    for engine in _engines():
        known = _KNOWN_IDS.get(engine.model)
        if known is None:
            every = frozenset(map(id, engine.model.parameters()))
            trained = frozenset(id(param) for param in engine.model.parameters() if param.requires_grad)
            known = _KNOWN_IDS[engine.model] = (every, trained)
        every, trained = known
        if wanted.isdisjoint(every) and engine.optimizer is not None:
            every = trained = _param_ids(engine.optimizer)  # the optimizer's own: this rank's flat slices
        if wanted.isdisjoint(every):
            continue
        if not wanted <= every:
            raise ConfigError(
                f"{caller} got parameters of a {type(engine.model).__name__} together with {len(wanted - every)} "
                "others: call it once per model"
            )
        return engine, None if trained <= wanted else params
    return None


def on_every_rank(work: Callable[[], None], what: str) -> None:
    """Do `work`, which must not communicate, and raise on every rank if it failed on any.

    Raises:
        CheckpointError: naming the first rank that failed, and how.
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:  # any failure must reach the other ranks, which would wait for this one
        failure = error
    rank = PartialState().process_index
    report = None if failure is None else f"rank {rank}: {type(failure).__name__}: {failure}"
    failed = [line for line in gather_object([report]) if line is not None]
    if failed:
        raise CheckpointError(f"{what} failed on {failed[0]}") from failure


@contextmanager
def serving_state_dict(model: nn.Module, state: dict[str, Any]) -> Iterator[None]:
    """Inside, `state_dict()` of the model and of its parts answers from `state`, so that one rank alone may write.

    Of a sharded model it is a collective, and library code between here and the file calls it on the writer only.
    """
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for name, module in model.named_modules():
            replaced.append((module, module.__dict__.get("state_dict")))
            module.__dict__["state_dict"] = _server(state, f"{name}." if name else "")
        yield
    finally:
        for module, before in replaced:
            if before is None:
                del module.__dict__["state_dict"]
            else:
                module.__dict__["state_dict"] = before


def _server(state: dict[str, Any], inside: str) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        answer = type(state)() if destination is None else destination
        answer.update({prefix + key[len(inside) :]: value for key, value in state.items() if key.startswith(inside)})
        return answer

    return state_dict


def _drop_weights_off_main(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
    """Off rank 0 the gathered tensors are `meta`: nothing to write, and accelerate would look for shared storage."""
    if not PartialState().is_main_process:
        weights.clear()


def _optimizer_folder(folder: str | os.PathLike[str], index: int) -> Path:
    return Path(folder) / (f"{OPTIMIZER_FOLDER}_{index}" if index else OPTIMIZER_FOLDER)


def _optimizer_file(folder: str | os.PathLike[str], index: int) -> Path:
    """accelerate's own name for a whole optimizer state."""
    return Path(folder) / (f"optimizer_{index}.bin" if index else "optimizer.bin")


def _load_model(model: nn.Module, folder: Path, index: int, strict: bool) -> None:
    """accelerate's file names. Its own loader compares storages of `state_dict()`, which only rank 0 has."""
    suffix = f"_{index}" if index else ""
    safe, pickled = folder / f"model{suffix}.safetensors", folder / f"pytorch_model{suffix}.bin"
    if safe.is_file():
        state = safetensors.torch.load_file(safe)
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


__all__ = ["OPTIMIZER_FOLDER", "ZeroAccelerator", "ZeroAcceleratorMixin", "ZeroPlugin", "zero_accelerator_cls"]
