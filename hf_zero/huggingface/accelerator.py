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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from accelerate import Accelerator, ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..config import ZeroConfig, setting
from ..errors import ConfigError, UnsupportedOptimizerError
from ..plan.machine import Machine, kept
from ..runtime.deferred import birth_of
from ..runtime.engine import Engine, engine_of, shard
from .accelerator_state import ZeroStateMixin


def _probed() -> Machine | None:
    """The speeds that `hf-zero probe` has measured on this host, if it has."""
    path = kept(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_zero")
    return Machine.load(path) if path.exists() else None


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

    stage: int = setting("stage")
    reduce_dtype: str | None = setting("reduce_dtype")
    full_precision: str | tuple[str, ...] = setting("full_precision")
    async_save: bool = setting("async_save")
    offload_optimizer: str = setting("offload_optimizer")
    offload_params: str = setting("offload_params")
    offload_dir: str | None = setting("offload_dir")
    device_memory: int | str | None = setting("device_memory")
    host_memory: int | str | None = setting("host_memory")
    step_in_backward: bool = setting("step_in_backward")

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
        given = {field.name: getattr(self, field.name) for field in fields(ZeroConfig)}
        meant, plain = self.config.to_dict(), ZeroConfig().to_dict()
        shown = [f"{name}={value!r}" for name, value in given.items() if name == "stage" or meant[name] != plain[name]]
        return f"ZeroPlugin({', '.join(shown)})"

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


# What a Trainer pickles into training_args.bin names the place that stays, wherever this file is moved.
ZeroPlugin.__module__ = "hf_zero"


def _adopt_trainer() -> None:
    if "transformers.trainer" in sys.modules:
        from .callback import adopt_trainer

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


class ZeroAcceleratorMixin(ZeroStateMixin, _AcceleratorBase):
    """What differs from the stock Accelerator. Everything else (data, metrics, schedulers, tracking) is inherited."""

    zero_plugin: ZeroPlugin

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
            born = any(birth_of(param) is not None for param in model.parameters())  # has no whole values to run with
            if config.policy.keep_full and not trains and not born:
                return None
            self._zero_check_model(model)
            _adopt_trainer()  # one that was given an Accelerator from elsewhere
            device = None
            if self.device_placement if placement is None else placement:
                if config.offloads and next(model.parameters()).device.type == "cpu":
                    device = self.device  # unit by unit: the whole may not fit there
                else:
                    model.to(self.device)
            engine = shard(
                model, optimizer, config, mixed_precision=self._zero_precision(), machine=_probed(), device=device
            )
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
            if "transformers.modeling_utils" in sys.modules:  # else there is no model of its
                from .models import adopt_model

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
        """Batches are even inside, whatever is asked for: every rank must make the same number of steps, for an early end
        would leave the others waiting for its shards."""
        if not any(isinstance(obj, nn.Module) and engine_of(obj) is not None for obj in joinables):
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        # Loaders without one (iterable data sets) are even in accelerate anyway.
        samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        uneven = [sampler for sampler in samplers if getattr(sampler, "even_batches", True) is False]
        if self.num_processes > 1:
            warnings.warn(
                "join_uneven_inputs has no effect on a sharded model: each rank holds parts that the others need, so "
                "all must make the same number of steps. Batches are even inside (the last ones are filled up)",
                stacklevel=3,
            )
        for sampler in uneven:
            sampler.even_batches = True
        try:
            yield
        finally:
            for sampler in uneven:
                sampler.even_batches = False

    def _zero_bound_engine(self, optimizer: Optimizer) -> Engine:
        engine = _engine_of_optimizer(bare_optimizer(optimizer))
        if engine is None:
            raise ConfigError(
                f"{type(bare_optimizer(optimizer)).__name__} belongs to no sharded model of this Accelerator"
            )
        return engine


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


__all__ = ["ZeroAccelerator", "ZeroAcceleratorMixin", "ZeroPlugin", "zero_accelerator_cls"]
