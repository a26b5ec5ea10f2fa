"""`ZeroAcceleratorMixin`: prepare, accumulate and clip with a sharded model.

Invariants: `distributed_type` does not change (accelerate's gather, reduce and barriers depend on it), the model keeps
its type, the optimizer and its param_groups stay the same objects.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DynamoBackend
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..config import ZeroConfig
from ..core.patching import patched
from ..engine.parameter import place_of
from ..errors import ConfigError, LayoutError, UnsupportedOptimizerError
from ..params.deferred import deferred_of
from ..params.engine import Engine, engine_of
from ..params.shard import shard, unwrap_compiled
from ..plan.machine import measured
from ..sequence.parallel import SequenceParallel
from .accelerator_state import ZeroStateMixin
from .arguments import check_counts
from .checkpoints import bare_optimizer
from .sequences import SharedSamplesMixin


def adopt_calling_trainer() -> bool:
    """Put `ZeroTrainerMixin` in front of the class of the Trainer that calls this; return whether there is one."""
    if "transformers.trainer" not in sys.modules:
        return False
    from .trainer import adopt_trainer

    return adopt_trainer()


class ZeroAcceleratorMixin(ZeroStateMixin, SharedSamplesMixin):
    """Override what a sharded model needs; data, metrics, schedulers and tracking are the stock Accelerator's."""

    zero_config: ZeroConfig

    # -- prepare --

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does, in any order and number of calls; a model must precede its optimizer."""
        optimizers = [bare_optimizer(obj) for obj in args if isinstance(obj, Optimizer)]
        wrappers = {obj: unwrap_compiled(obj) for obj in args if isinstance(obj, nn.Module)}
        args = tuple(wrappers[obj][0] if isinstance(obj, nn.Module) else obj for obj in args)
        for position, obj in enumerate(args):
            if isinstance(obj, nn.Module):
                wanted = device_placement[position] if device_placement and position < len(device_placement) else None
                self._zero_attach(obj, optimizers, wanted, evaluation_mode=False)
        prepared = super().prepare(*args, device_placement=device_placement)
        for model, compile_ in wrappers.values():
            engine = engine_of(model)
            if compile_ is not None and engine is not None:
                engine.compile(using=compile_)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Attach the engine in place, apply accelerate's autocast, and compile block by block; never wrap in DDP."""
        engine = self._zero_attach(model, (), device_placement, evaluation_mode)
        if engine is None:
            # Evaluation only, and sharding would save no memory: use accelerate's evaluation path.
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        # evaluation_mode=True means autocast without DDP. A whole-model compile would put hooks into the graph.
        # A model that was evaluated first has accelerate's mark and passes through: its forward already runs under
        # autocast, and the engine's hooks work around any forward.
        dynamo = self.state.dynamo_plugin
        with patched([(dynamo, "backend", DynamoBackend.NO)]):
            prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if dynamo.backend != DynamoBackend.NO and not engine.is_compiled:
            engine.compile(**dynamo.to_kwargs())
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
        engine = self._zero_engine_of(bare)
        if engine is None:
            raise ConfigError(
                f"{type(bare).__name__} holds no parameter of a model that this Accelerator has prepared: pass the "
                "model to prepare() before its optimizer or together with it"
            )
        if not _is_bound(bare, engine):
            self._zero_attach(engine.model, [bare], device_placement, evaluation_mode=False)
        bare.__dict__[_MODEL] = weakref.ref(engine.model)
        # Placement would move the state through state_dict(), a collective. Shards are on their devices already.
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _zero_attach(
        self, model: nn.Module, optimizers: Sequence[Optimizer], placement: bool | None, evaluation_mode: bool
    ) -> Engine | None:
        """Return the model's engine, sharding it now if needed; None if sharding saves no memory in evaluation."""
        check_counts(self.num_processes)
        config = self.zero_config
        engine = engine_of(model)
        params = frozenset(map(id, model.parameters()))
        mine = [  # a bound optimizer holds slices instead of parameters
            each
            for each in optimizers
            if (engine is not None and _is_bound(each, engine)) or not params.isdisjoint(_param_ids(each))
        ]
        if engine is None:
            trains = not evaluation_mode and any(param.requires_grad for param in model.parameters())
            is_deferred = any(deferred_of(param) is not None for param in model.parameters())  # without full values
            if config.policy.keep_full and not trains and not is_deferred:
                return None
            _check_model(model)
            hook = DDPCommunicationHookType.NO if self.ddp_handler is None else self.ddp_handler.comm_hook
            if hook != DDPCommunicationHookType.NO:
                raise ConfigError(
                    f"DistributedDataParallelKwargs(comm_hook={hook.value!r}): no DDP runs here that would call it. Leave it "
                    'out; reduce_dtype="bfloat16" or wire="int8" of the plugin send fewer bytes'
                )
            adopt_calling_trainer()  # a Trainer may use an Accelerator that other code built
            device = None
            if self.device_placement if placement is None else placement:
                if config.offloads and next(model.parameters()).device.type == "cpu":
                    device = self.device  # unit by unit: the model may not fit
                else:
                    model.to(self.device)
            # The precision in force: accelerate has no autocast for fp16 on CPU, and autocast can be disabled.
            on = self.native_amp and (self.autocast_handler is None or self.autocast_handler.enabled)
            precision = str(self.mixed_precision) if on else "no"
            engine = shard(model, mine, config, mixed_precision=precision, machine=measured(), device=device)
            engine.observer(SequenceParallel).automatic = True
        elif engine.config != config:
            raise ConfigError(
                f"{type(model).__name__} is sharded with {engine.config} already, the Accelerator has {config}: use "
                "the same settings, or undo the first with zero.engine_of(model).detach()"
            )
        else:
            had = engine.optimizers
            try:
                for optimizer in mine:
                    engine.bind(optimizer)
            except LayoutError:
                if had:
                    raise
                # Spans never change: those of a model that was evaluated first were built without an optimizer.
                engine.detach()
                return self._zero_attach(model, optimizers, placement, evaluation_mode)
        for bound in mine:
            bound.__dict__[_MODEL] = weakref.ref(model)
        if not any(model is known for known in self._models) and "transformers.modeling_utils" in sys.modules:
            from .models import adopt_model  # imports transformers, which a plain loop does not need

            adopt_model(model, engine)
        return engine

    # -- the step --

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients inside; `accumulate()` also uses this."""
        engine = engine_of(model)
        with nullcontext() if engine is None else engine.no_sync(), super().no_sync(model):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Do nothing: the engine decides in the backward whether to reduce, not in the forward as DDP does."""
        if engine_of(model) is None:
            with Accelerator.trigger_sync_in_backward(model):
                yield
        else:
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by the norm over all ranks; return it as a 0-dim tensor."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine, stock = self._zero_engine_to_clip(params), cast(Any, super().clip_grad_norm_)
        # A subclass's method ends in torch's function, which gets gradients from `compat/gradients.py`.
        if engine is None or stock.__func__ is not Accelerator.clip_grad_norm_:
            return stock(params, max_norm, norm_type)
        self.unscale_gradients()
        return engine.clip_grad_norm_(max_norm, norm_type=norm_type, parameters=params)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine, stock = self._zero_engine_to_clip(params), cast(Any, super().clip_grad_value_)
        if engine is None or stock.__func__ is not Accelerator.clip_grad_value_:
            return stock(params, clip_value)
        self.unscale_gradients()
        return engine.clip_grad_value_(clip_value, parameters=params)

    # -- data --

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare as accelerate does.

        Raises:
            ConfigError: on every rank: ranks would have different numbers of batches (`even_batches=False`), or accelerate
                counts another number of ranks than the process group.
        """
        check_counts(self.num_processes)
        known = len(self._dataloaders)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        counts = _uneven_batches(prepared)
        if counts is not None:
            del self._dataloaders[known:]
            raise ConfigError(f"even_batches=False: {_uneven_text(counts)}")
        return prepared

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Join as accelerate does if all ranks have the same number of batches: no rank may stop earlier.

        Raises:
            ConfigError: on every rank, at the call: ranks would have different numbers of batches, or the number is
                unknown with `even_batches=False`.
        """
        if not any(isinstance(obj, nn.Module) and engine_of(obj) is not None for obj in joinables):
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        samplers = {loader: found for loader in self._dataloaders if (found := _sharded_sampler(loader)) is not None}
        uneven = next((counts for loader in samplers if (counts := _uneven_batches(loader, even_batches))), None)
        if uneven is not None:
            raise ConfigError(f"join_uneven_inputs(even_batches=False): {_uneven_text(uneven)}")
        is_even = self.even_batches if even_batches is None else even_batches
        if not is_even and not samplers and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs(even_batches=False): no loader that this Accelerator has prepared says how many batches "
                f"each rank will have, and {_ALL_RANKS}: prepare the loader, or leave the context out and {_REMEDY}"
            )
        asked = [] if even_batches is None else [(found, "even_batches", even_batches) for found in samplers.values()]
        with patched(asked):
            yield

    # -- find the engine --

    def _zero_engine_of(self, optimizer: Optimizer) -> Engine | None:
        """Return the engine of an optimizer that is bound or has parameters of a sharded model."""
        known = optimizer.__dict__.get(_MODEL)
        models = self._models if known is None else [known()]
        for model in models:
            engine = None if model is None else engine_of(model)
            if engine is not None and _is_bound(optimizer, engine):
                return engine
        return _engine_holding(param for group in optimizer.param_groups for param in group["params"])

    def _zero_bound_engine(self, optimizer: Optimizer) -> Engine:
        bare = bare_optimizer(optimizer)
        engine = self._zero_engine_of(bare)
        if engine is None:
            raise ConfigError(f"{type(bare).__name__} belongs to no sharded model of this Accelerator")
        return engine

    def _zero_engine_to_clip(self, params: Iterable[Any]) -> Engine | None:
        """Return the one engine of all `params`: parameters, or this rank's flat slices from an optimizer's groups.

        None if there are several: torch's function clips parameters of several models by lazy gradients. Another Accelerator
        may have created the engine, because accelerate's state belongs to the process.
        """
        engines = {_engine_holding([param]) for param in params}
        if engines == {None}:
            of_slices: dict[int, Engine | None] = {}
            for optimizer in map(bare_optimizer, self._optimizers):
                of_slices |= dict.fromkeys(_param_ids(optimizer), self._zero_engine_of(optimizer))
            engines = {of_slices.get(id(param)) for param in params}
        return engines.pop() if len(engines) == 1 else None


_ALL_RANKS = "all ranks must make as many steps with a sharded model, for each holds parts that the others need"
_REMEDY = (
    "keep even_batches=True, accelerate's default (last batches are filled up, gather_for_metrics drops what is double), or "
    "give the DataLoader drop_last=True. To count every sample once, give all ranks as many batches and use engine.weigh, "
    "with weight 0 for batches that only fill up"
)


def _sharded_sampler(loader: Any) -> BatchSamplerShard | None:
    """Return the sampler that splits batches over ranks; None if rank 0 dispatches them, and for iterable data."""
    places = (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    return next((place for place in places if isinstance(place, BatchSamplerShard)), None)


def _uneven_batches(loader: Any, even_batches: bool | None = None) -> list[int] | None:
    """Return the number of batches of each rank if they differ; None if they are equal or unknown.

    Args:
        even_batches: count as if the loader had been prepared with it; None: as it was prepared.
    """
    shard_ = _sharded_sampler(loader)
    if shard_ is None or shard_.drop_last or (shard_.even_batches if even_batches is None else even_batches):
        return None
    ranks = shard_.num_processes
    try:
        total = len(shard_.batch_sampler)
        samples = len(shard_.batch_sampler.sampler) if shard_.split_batches else 0
    except (TypeError, AttributeError):  # a sampler without a length
        return None
    if shard_.split_batches:  # the last ranks may get no rows of an incomplete last batch
        left = samples % shard_.batch_size
        part = shard_.batch_size // ranks
        counts = [total - (0 < left <= part * rank) for rank in range(ranks)]
    else:
        counts = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    return counts if len(set(counts)) > 1 else None


def _uneven_text(counts: list[int]) -> str:
    most, least = counts.index(max(counts)), counts.index(min(counts))
    return (
        f"rank {most} would have {counts[most]} batches and rank {least} {counts[least]}, and {_ALL_RANKS}: {_REMEDY}"
    )


def _check_model(model: nn.Module) -> None:
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise ConfigError(f"pass the bare model to prepare(), not a {type(model).__name__}: the engine replaces it")
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len(set(device_map.values())) > 1:
        raise ConfigError(
            f"{type(model).__name__} was loaded with a device_map over "
            f"{sorted(map(str, set(device_map.values())))}: load it without device_map, the engine decides what "
            "each rank holds"
        )


_MODEL = "_zero_model"
"""Attribute of an optimizer: weak reference to its sharded model. A bound optimizer holds slices of no module."""


def _param_ids(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(param) for group in optimizer.param_groups for param in group["params"])


def _is_bound(optimizer: Optimizer, engine: Engine) -> bool:
    return any(each is optimizer for each in engine.optimizers)


def _engine_holding(params: Iterable[Any]) -> Engine | None:
    """Return the engine of the first of `params` that belongs to a sharded model."""
    for param in params:
        place = place_of(param)
        if place is not None:
            return engine_of(place.unit.context.model)
    return None
