"""accelerate: `ZeroPlugin`, the one argument that turns a stock Accelerator, and the Trainer around it, into ours.

`Accelerator(parallelism_config=...)` hands the *live* accelerator to `ParallelismConfig._validate_accelerator`. `ZeroPlugin`
uses that moment, and nothing of accelerate is patched. What it does to the accelerator is not known here: see `ADOPT`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from accelerate import Accelerator, ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.optim import Optimizer

from ..config import ZeroConfig, setting
from ..errors import ConfigError

ADOPT: list[Callable[[Accelerator, ZeroPlugin], None]] = []
"""What makes an Accelerator one for sharded models. `accelerator` puts its own here; without it a plugin would do nothing."""
_MADE: dict[tuple[Any, ...], type[Any]] = {}
_DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


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
    stall_s: float = setting("stall_s")

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
        if not ADOPT:
            raise ConfigError("import ZeroPlugin from hf_zero: `from hf_zero import ZeroPlugin`")
        for adopt in ADOPT:
            adopt(accelerator, self)


# What a Trainer pickles into training_args.bin names the place that stays, wherever this file is moved.
ZeroPlugin.__module__ = "hf_zero"


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
