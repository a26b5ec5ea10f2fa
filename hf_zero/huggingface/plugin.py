"""`ZeroPlugin`: the one argument that shards the models of a stock Accelerator or Trainer.

`Accelerator(parallelism_config=...)` passes itself to `ParallelismConfig._validate_accelerator`, where `ZeroPlugin` puts
`ZeroAcceleratorMixin` in front of its class. docs/DESIGN.md lists what else is replaced. `ZeroAccelerator(zero_plugin=...)`
is the same, explicitly.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, fields
from typing import Any

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState

from ..comm.process_group import rank_count
from ..config import ZeroConfig, setting, suggest_names
from ..errors import ConfigError
from .accelerator import ZeroAcceleratorMixin, adopt_calling_trainer
from .arguments import ACCELERATE_STATE, ONE_RANK, check_counts, refuse
from .patches import with_mixin

_LOGGER = logging.getLogger(__name__)


@suggest_names()
@dataclass(kw_only=True, repr=False)
class ZeroPlugin(ParallelismConfig):
    """Shard models with ZeRO: pass it as `parallelism_config` of an `Accelerator` or of `TrainingArguments`.

    The fields are those of `ZeroConfig`. The plugin is pickled with the training arguments. `sp_size` is a field of the base
    class, too; its other sizes stay 1, and accelerate builds no device mesh.

    Raises:
        ConfigError: a bad value; a tensor or context parallel size; an Accelerator exists already and would ignore the
            plugin.

    Example:
        >>> args = TrainingArguments("out", parallelism_config=zero.ZeroPlugin(stage=3))
        >>> accelerator = Accelerator(parallelism_config=zero.ZeroPlugin(stage=3, offload_optimizer="cpu"))
    """

    stage: int = setting("stage")
    reduce_dtype: str | None = setting("reduce_dtype")
    full_precision: str | tuple[str, ...] = setting("full_precision")
    units: str | tuple[str, ...] = setting("units")
    async_save: bool = setting("async_save")
    offload_optimizer: str = setting("offload_optimizer")
    offload_params: str = setting("offload_params")
    offload_activations: str = setting("offload_activations")
    offload_dir: str | None = setting("offload_dir")
    device_memory: int | str | None = setting("device_memory")
    keep_gathered: int | str | None = setting("keep_gathered")
    host_memory: int | str | None = setting("host_memory")
    replicas: int = setting("replicas")
    chunked_loss: bool | str = setting("chunked_loss")
    sp_size: int = setting("sp_size")
    wire: str = setting("wire")
    step_in_backward: bool = setting("step_in_backward")
    stall_s: float = setting("stall_s")
    debug: bool = setting("debug")
    is_of_flags = False  # not a field; True if `ZeroTrainingArguments` made the plugin

    def __post_init__(self) -> None:
        for field in fields(ParallelismConfig):
            self._refuse_inherited(field.name)
        _ = self.config
        self.sp_backend: Any = None
        super().__post_init__()
        # With "deepspeed", accelerate's own choice, accelerate and transformers would call DeepSpeed.
        self.sp_backend, self.sp_handler = "hf_zero", None
        self._refuse_older_accelerator()

    def _refuse_inherited(self, name: str) -> None:
        value = getattr(self, name)
        if name.endswith("_size"):
            variable = f"PARALLELISM_CONFIG_{name.upper()}"
            if name == "sp_size":
                if os.environ.get(variable, "1") not in ("1", str(value)):
                    raise ConfigError(
                        f"{variable}={os.environ[variable]}, and ZeroPlugin has sp_size={value}. Unset the variable, or pass "
                        f"sp_size={os.environ[variable]}"
                    )
                return
            if value is None and os.environ.get(variable, "1") != "1":
                raise ConfigError(
                    f"{variable}={os.environ[variable]} asks for a parallelism that ZeroPlugin does not combine with; unset it"
                )
            if value not in (None, 1):
                raise ConfigError(
                    f"ZeroPlugin takes no {name} (found {value!r}): tensor and context parallelism do not go with it. Settings "
                    "are keywords: ZeroPlugin(stage=3)"
                )
            setattr(self, name, 1)
        elif name.endswith("_handler") and value is not None:
            raise ConfigError(f"ZeroPlugin takes no {name} (found {value!r}): remove it")

    def _refuse_older_accelerator(self) -> None:
        """Refuse a late plugin: accelerate silently keeps its first configuration for the whole process."""
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
            # TrainingArguments resets accelerate's state, so this may be fine: warn only.
            warnings.warn(
                f"an Accelerator exists already, with {older}; one built now would keep that and ignore {self}: "
                f"{remedy}",
                stacklevel=4,
            )

    @property
    def config(self) -> ZeroConfig:
        """Return the engine's settings."""
        return ZeroConfig(**{field.name: getattr(self, field.name) for field in fields(ZeroConfig)})

    def __repr__(self) -> str:
        return f"ZeroPlugin({', '.join(f'{name}={getattr(self, name)!r}' for name in self.config.changed())})"

    def get_device_mesh(self, device_type: str | None = None) -> None:
        """Return no mesh: the engine has process groups of its own."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings for `TrainingArguments.to_dict`."""
        return self.config.to_dict()

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        # Not super(): it would use the ranks for its replicate dimension and refuse CPU ranks.
        # accelerate calls this in `Accelerator.__init__` after it set `state`, and before its lists of models and
        # optimizers, the scaler and the gradient state: only `state` may be read here.
        refuse(ACCELERATE_STATE, accelerator.state)
        check_counts(accelerator.state.num_processes)
        cls = type(accelerator)
        accelerator.__class__ = ZeroAccelerator if cls is Accelerator else with_mixin(ZeroAcceleratorMixin, cls)
        accelerator.zero_plugin, accelerator.zero_config = self, self.config
        in_trainer = adopt_calling_trainer()  # its start screen says so itself
        if not in_trainer and rank_count()[0] == 1 and "RANK" not in os.environ and not self.config.offloads:
            _LOGGER.warning("hf_zero: %s", ONE_RANK)


# training_args.bin pickles this name, so it must not depend on the file.
ZeroPlugin.__module__ = "hf_zero"


class ZeroAccelerator(ZeroAcceleratorMixin, Accelerator):
    """An Accelerator with a plugin: `ZeroAccelerator(zero_plugin=ZeroPlugin(stage=3), ...)`."""

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
