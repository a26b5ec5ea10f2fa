"""Settings of `ZeroConfig` as flags, and refused arguments of the Trainer and accelerate.

Each refused argument is one row, which names the alternative. All others work as without the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from accelerate.state import GradientState, PartialState
from accelerate.utils import DistributedType

from ..comm.process_group import rank_count
from ..config import ZeroConfig, setting
from ..errors import ConfigError


@dataclass
class ZeroFlags:
    """Every field of `ZeroConfig` as `zero_<field>`, typed as text where text is allowed, for `HfArgumentParser`."""

    zero_stage: int = setting("stage")
    zero_reduce_dtype: str | None = setting("reduce_dtype")
    zero_full_precision: str = setting("full_precision")
    zero_units: str = setting("units")
    zero_async_save: bool = setting("async_save")
    zero_offload_optimizer: str = setting("offload_optimizer")
    zero_offload_params: str = setting("offload_params")
    zero_offload_activations: str = setting("offload_activations")
    zero_offload_dir: str | None = setting("offload_dir")
    zero_device_memory: str | None = setting("device_memory")
    zero_keep_gathered: str | None = setting("keep_gathered")
    zero_host_memory: str | None = setting("host_memory")
    zero_replicas: int = setting("replicas")
    zero_chunked_loss: str = setting("chunked_loss")
    zero_sp_size: int = setting("sp_size")
    zero_wire: str = setting("wire")
    zero_step_in_backward: bool = setting("step_in_backward")
    zero_stall_s: float = setting("stall_s")
    zero_debug: bool = setting("debug")

    def settings(self) -> dict[str, Any]:
        """Return the values by field of `ZeroConfig`, for `ZeroPlugin(**settings)`."""
        return {item.name: getattr(self, f"zero_{item.name}") for item in fields(ZeroConfig)}


class Refusal(NamedTuple):
    """One argument that a sharded model cannot honour."""

    name: str
    is_asked: Callable[[Any], object]
    """Takes the object that has the argument; true if its value is refused."""
    text: str
    """The error message; `{found}` is the argument's value."""


def refuse(refusals: Iterable[Refusal], given: Any) -> None:
    """
    Raises:
        ConfigError: `given` has a refused value.
    """
    for refusal in refusals:
        if refusal.is_asked(given):
            raise ConfigError(refusal.text.format(found=getattr(given, refusal.name, None)))


def _steps_in_backward(args: Any) -> bool:
    return bool(getattr(args.parallelism_config, "step_in_backward", False))


_BOTH_SHARD = "and --zero_* both shard the model"

OTHER_ENGINES = (
    Refusal(
        "deepspeed",
        lambda args: args.deepspeed,
        f"--deepspeed {_BOTH_SHARD}: remove --deepspeed, or use plain TrainingArguments",
    ),
    Refusal("fsdp", lambda args: args.fsdp, f"--fsdp {_BOTH_SHARD}: remove --fsdp, or use plain TrainingArguments"),
)
"""Checked when `ZeroTrainingArguments` are made; `ACCELERATE_STATE` covers a plugin in plain TrainingArguments."""

TRAINING_ARGUMENTS = (
    Refusal(
        "max_grad_norm",
        lambda args: _steps_in_backward(args) and args.max_grad_norm,
        "step_in_backward updates parameters before all gradients exist, so max_grad_norm={found} cannot be honoured: "
        "set max_grad_norm=0, or turn step_in_backward off",
    ),
    Refusal(
        "fp16",
        lambda args: _steps_in_backward(args) and args.fp16,
        "step_in_backward does not go with fp16: use bf16, or turn it off",
    ),
    Refusal(
        "save_on_each_node",
        lambda args: args.save_on_each_node,
        "save_on_each_node: all ranks write one folder together; save to a shared one",
    ),
    Refusal(
        "optim",
        lambda args: str(getattr(args.optim, "value", args.optim)).endswith(("lomo", "_layerwise")),
        "optim={found.value} updates parameters inside backward, before gradients are averaged over the ranks; use an "
        "element-wise optimizer such as adamw_torch",
    ),
    Refusal(
        "optim",
        lambda args: str(getattr(args.optim, "value", args.optim)).startswith(("galore_", "apollo_")),
        "optim={found.value} keeps projector objects in its state, which no checkpoint has a place for; use an element-wise "
        "optimizer such as adamw_torch or adafactor",
    ),
)
"""Checked when a Trainer with the plugin is built."""


def _other_engine(name: str, kind: str) -> Refusal:
    """Refuse another engine that a plugin, the launcher's environment or accelerate's state selects."""
    attribute, variable = f"{kind.lower()}_plugin", f"ACCELERATE_USE_{kind}"

    def is_asked(state: Any) -> bool:
        asked = os.environ.get(variable, "false").lower() == "true"
        return asked or getattr(state, attribute, None) is not None or state.distributed_type == DistributedType[kind]

    return Refusal(
        attribute,
        is_asked,
        f"ZeroPlugin and {name} both want to shard the model: remove the {name} plugin (or `{variable}` / the "
        "`accelerate config` file that sets it), or remove ZeroPlugin",
    )


ACCELERATE_STATE = (
    _other_engine("DeepSpeed", "DEEPSPEED"),
    _other_engine("FSDP", "FSDP"),
    _other_engine("Megatron-LM", "MEGATRON_LM"),
    Refusal(
        "distributed_type",
        lambda state: (
            state.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        ),
        "ZeroPlugin runs on CPU and CUDA ranks, found distributed_type={found}; remove ZeroPlugin",
    ),
    Refusal(
        "mixed_precision",
        lambda state: state.mixed_precision == "fp8",
        "mixed_precision='fp8' is not supported by ZeroPlugin: use 'bf16', 'fp16' or 'no'",
    ),
)
"""Checked on `accelerator.state` when an Accelerator with the plugin is built."""


ONE_RANK = "1 rank: nothing is sharded. Start with torchrun --nproc-per-node N"


def check_counts(counted: int) -> None:
    """Refuse an Accelerator whose number of ranks differs from the process group's: ranks would get the same rows.

    Raises:
        ConfigError: the counts differ; the message names the argument that fixes it.
    """
    ranks, variable = rank_count()
    if counted != ranks:
        raise ConfigError(
            f"accelerate counts {_processes(counted)}, but {variable or 'the size of the process group'} is {ranks}: the "
            f"ranks would not share out the rows of the data. {_remedy()}"
        )


def check_loader(ranks: int) -> None:
    """Check the loader of the current batch, for a model that `zero.shard` sharded.

    Raises:
        ConfigError: see `check_counts`.
    """
    # Without an active loader the training loop distributes its rows itself.
    if GradientState._shared_state and GradientState().in_dataloader and PartialState().num_processes != ranks:
        check_counts(PartialState().num_processes)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _remedy() -> str:
    state = PartialState()
    if state.device.type == "cpu" and not state._cpu:
        return "On CPU ranks pass use_cpu=True to TrainingArguments, or cpu=True to Accelerator, or set ACCELERATE_USE_CPU=true"
    if "LOCAL_RANK" not in os.environ:
        return "accelerate reads LOCAL_RANK, RANK and WORLD_SIZE: start the ranks with torchrun or `accelerate launch`"
    return "Open the process group before you build TrainingArguments or Accelerator, which count the ranks once"
