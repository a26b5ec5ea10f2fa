"""The settings of one engine: a frozen value, checked once. No other file compares stage numbers."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from .errors import ConfigError

DTYPE_ALIASES = {
    alias: name
    for name, short in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"))
    for alias in (name, short, f"torch.{name}")
}
DTYPES = tuple(dict.fromkeys(DTYPE_ALIASES.values()))
"""Names of the dtypes that settings accept for weights, gradients and files."""


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """Behaviour of one stage. No other code reads the stage number."""

    shard: bool
    """Each rank owns 1/N of the optimizer state. False: plain data parallel, every rank owns all of it."""
    keep_full: bool
    """Full parameters stay in memory between their uses."""
    reduce_each_backward: bool
    """Every backward reduces gradients to their owners, also inside `no_sync`. False: they accumulate locally first."""


# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), §5.
STAGES = {
    0: StagePolicy(shard=False, keep_full=True, reduce_each_backward=False),
    1: StagePolicy(shard=True, keep_full=True, reduce_each_backward=False),
    2: StagePolicy(shard=True, keep_full=True, reduce_each_backward=True),
    3: StagePolicy(shard=True, keep_full=False, reduce_each_backward=True),
}

WIRES = ("none", "int8", "fp8")
OFFLOADS = ("none", "cpu", "disk", "auto")
ACTIVATION_TIERS = ("none", "cpu", "disk")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


_FOREIGN_NAMES = {
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_params",
    "cpu_offload": "offload_optimizer",
    "nvme_path": "offload_dir",
    "offload_optimizer_nvme_path": "offload_dir",
    "offload_param_nvme_path": "offload_dir",
    "sharding_strategy": "stage",
    "reshard_after_forward": "stage",
    "communication_data_type": "reduce_dtype",
    "mics_shard_size": "replicas",
    "zero_hpz_partition_size": "replicas",
    "zero_quantized_gradients": "wire",
    "zero_quantized_weights": "wire",
}
"""Names of settings in DeepSpeed and FSDP, with the setting here."""
_FOREIGN_VALUES = {"nvme": "disk", "ssd": "disk", "host": "cpu", "true": "cpu"}
_FOREIGN_VALUES |= dict.fromkeys(("gpu", "cuda", "device", "false"), "none")


class UnknownSettingError(ConfigError, TypeError):
    """Raised for a setting that does not exist. A TypeError, like every unknown keyword."""


T = TypeVar("T", bound=type)


def suggest_names(prefix: str = "", *, all_names: bool = True) -> Any:
    """Make the constructor of a class suggest the closest setting for an unknown keyword.

    Args:
        prefix: prefix of the arguments that are settings: `zero_` for flags.
        all_names: refuse every unknown name. False: leave names that resemble no setting to the class.
    """

    def decorate(cls: T) -> T:
        stock = vars(cls)["__init__"]
        known = inspect.signature(stock).parameters

        @functools.wraps(stock)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            names = [name for name in ZeroConfig.__dataclass_fields__ if prefix + name in known]
            if args and all_names:
                first = args[0]
                pairs = (
                    first.items() if isinstance(first, dict) else [("stage", first if isinstance(first, int) else 3)]
                )
                elsewhere = ZeroConfig.__dataclass_fields__.keys() - names  # misspelt ones stay, to be suggested then
                given = ", ".join(f"{key}={value!r}" for key, value in pairs if key not in elsewhere)
                raise UnknownSettingError(
                    f"{cls.__name__} takes keywords only, found {first!r}: write {cls.__name__}({given})"
                )
            for name in [name for name in kwargs if name not in known]:
                bare = name.removeprefix("zero_")
                meant = _FOREIGN_NAMES.get(name) or _FOREIGN_NAMES.get(bare)
                meant = meant or next(iter(difflib.get_close_matches(bare, names, 1, 0.8)), None)
                if meant in names:
                    raise UnknownSettingError(
                        f"{cls.__name__} has no setting {name!r}: did you mean '{prefix}{meant}'?"
                    )
                if all_names and name in ("mixed_precision", "bf16", "fp16"):
                    raise UnknownSettingError(
                        f"{cls.__name__} has no setting {name!r}. Precision is set by bf16=True in TrainingArguments, and by "
                        "mixed_precision='bf16' in Accelerator and zero.shard"
                    )
                if all_names:
                    other = ". Pass it to ZeroConfig or ZeroPlugin" if name in ZeroConfig.__dataclass_fields__ else ""
                    raise UnknownSettingError(
                        f"{cls.__name__} has no setting {name!r}. It has {', '.join(names)}{other}"
                    )
            stock(self, *args, **kwargs)

        type.__setattr__(cls, "__init__", __init__)
        return cls

    return decorate


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise for a value outside `choices`; suggest the choice that DeepSpeed's or Python's word means.

    Raises:
        ConfigError: `value` is not one of `choices`.
    """
    if isinstance(value, str) and value in choices:
        return
    word = str(value.get("device") if isinstance(value, dict) else value).lower()
    meant = _FOREIGN_VALUES.get(word, word)
    hint = f": did you mean {meant!r}?" if meant in choices else ""
    raise ConfigError(f"{name} must be one of {', '.join(choices)}, found {value!r}{hint}")


def parse_bytes(size: int | str, name: str = "a size") -> int:
    """Return the bytes that `50GB`, `5GiB` or `1048576` stands for.

    Raises:
        ConfigError: not a size, or not a positive one.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        value: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f"{name}: expected a size such as '50GB' or 5368709120, found {size!r}")
        value = float(match[1]) * _UNITS[match[2]]
    if value < 1:
        raise ConfigError(f"{name} must be positive, found {size!r}")
    if value >= 1 << 63:
        raise ConfigError(f"{name} is more than any machine has: found {str(size)[:40]!r}")
    return int(value)


def _memory_bytes(name: str, given: int | str) -> int:
    """Return a memory limit in bytes.

    Raises:
        ConfigError: not a size, or a bare number so small that GiB were meant.
    """
    nbytes = parse_bytes(given, name)
    bare = str(given).strip()
    if re.fullmatch(r"[\d.]+", bare) and nbytes < (1 << 20 if isinstance(given, str) else 1 << 10):
        unit = "GiB" if nbytes < 4096 else "MiB"
        raise ConfigError(f"{name}={given!r} is {nbytes} bytes: did you mean {name}='{bare}{unit}'?")
    return nbytes


def size_text(nbytes: float, *, up: bool = False) -> str:
    """Return `1.50 GiB` or `200 B`. `up`: round up, so that `parse_bytes` of the text is never less than `nbytes`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            hundredths = -(-100 * nbytes // size) if up else round(100 * nbytes / size)
            return f"{hundredths / 100:.2f} {unit}"
    return f"{nbytes:.0f} B"


def ranks_text(count: int) -> str:
    return f"{count:,} rank{'s' if count > 1 else ''}"


def _patterns(name: str, given: object, what: str, one: str, two: str) -> tuple[str, ...]:
    """Return patterns given as a sequence or separated by commas; `one` and `two` are examples for the message."""
    words = given.split(",") if isinstance(given, str) else given
    if given is None or not isinstance(words, (tuple, list)) or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"{name} must be names or patterns of {what}, such as ({one!r},) or '{one},{two}', found {given!r}"
        )
    return tuple(stripped for word in words if (stripped := word.strip()))


@suggest_names()
@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Settings of one engine. Flags and plugins take defaults and metadata from here.

    `HfArgumentParser` passes metadata to `ArgumentParser.add_argument`: they may have its keywords only.

    Raises:
        ConfigError: a value is not allowed. The message names the field and the allowed values.

    Example:
        >>> zero.ZeroConfig(stage=3, offload_optimizer="cpu")
    """

    stage: int = field(
        default=2,
        metadata={
            "help": "0: plain data parallel, for comparison. 1: shard the optimizer state. 2: and the gradients. "
            "3: and the parameters."
        },
    )
    reduce_dtype: str | None = field(
        default=None,
        metadata={"help": "Dtype in which gradients are sent and summed: float32 (default), bfloat16 or float16."},
    )
    full_precision: str | tuple[str, ...] = field(  # a tuple once it is checked
        default="",
        metadata={
            "help": "With bf16 or fp16: parameters that stay in float32, as names or patterns separated by commas, such as "
            "'*.gate.*,*.router.*'. Name those that the model itself uses in float32."
        },
    )
    units: str | tuple[str, ...] = field(  # a tuple once it is checked
        default="",
        metadata={
            "help": "Modules to gather and release as one unit: names, class names or patterns separated by commas, such as "
            "'*.experts,MoeBlock'. Needed where ranks run different parts of a module at stage 3; other units are found."
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Copy what this rank saves to host memory, continue training, and write in the background. The next save "
            "and the end of training wait for it. Callbacks' on_save runs before the folder exists."
        },
    )
    offload_optimizer: str = field(
        default="none",
        metadata={
            "help": "Where fp32 masters, gradients and optimizer state are stored: none (on the device), cpu, disk, or auto "
            "(the fastest placement that fits).",
            "choices": OFFLOADS,
        },
    )
    offload_params: str = field(
        default="none",
        metadata={
            "help": "Where parameters are stored between uses: none (on the device), cpu, disk or auto. All but none need "
            "stage 3 or one rank.",
            "choices": OFFLOADS,
        },
    )
    offload_activations: str = field(
        default="none",
        metadata={
            "help": "Where inputs of checkpointed blocks are stored between forward and backward: none (on the device), cpu or "
            "disk. Needs gradient checkpointing.",
            "choices": ACTIVATION_TIERS,
        },
    )
    offload_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the disk tier, on a fast local disk. Default: in the temporary folder."},
    )
    device_memory: int | str | None = field(
        default=None,
        metadata={
            "help": "Device memory per rank, such as 24GiB, that auto may use. Default: free memory, less a margin."
        },
    )
    keep_gathered: int | str | None = field(
        default=None,
        metadata={
            "help": "Stage 3: device memory per rank, such as 4GiB, for units that stay gathered from forward to backward. "
            "They are gathered once per pass instead of twice. Default: no unit stays."
        },
    )
    host_memory: int | str | None = field(
        default=None,
        metadata={"help": "Host memory that auto may use per rank, such as 64GiB. Default: a share of what is free."},
    )
    replicas: int = field(
        default=1,
        metadata={
            "help": "Hybrid sharding: number of groups of neighbouring ranks, each with a full copy of the sharded state. "
            "Gathers stay within a group; reduced gradients are summed across groups. 1: all ranks are one group."
        },
    )
    chunked_loss: bool | str = field(  # True, False or "auto" once it is checked
        default="false",
        metadata={
            "help": "Compute the language-model loss in chunks of tokens, so that logits of sequence x vocabulary never exist: "
            "true, false, or auto (where they would take more than 1 GiB in float32).",
            "choices": ("false", "true", "auto"),
            "nargs": "?",
            "const": "true",
        },
    )
    sp_size: int = field(
        default=1,
        metadata={
            "help": "Neighbouring ranks that share each sample, divided along the sequence (sequence parallelism): attention "
            "exchanges tokens for heads. It must divide the ranks and the attention heads. 1: every rank has whole samples."
        },
    )
    wire: str = field(
        default="none",
        metadata={
            "help": "Format in which gradients and trained matrices are sent: none (their dtypes), or blocks of int8 or "
            "fp8 (e4m3) codes with one scale each: 1/4 of float32's bytes. Sums and masters stay float32.",
            "choices": WIRES,
        },
    )
    step_in_backward: bool = field(
        default=False,
        metadata={
            "help": "Update offloaded units during the backward, when their gradients arrive. Needs --max_grad_norm 0; no fp16."
        },
    )

    stall_s: float = field(
        default=30.0,
        metadata={
            "help": "Seconds after which every rank raises StallError if ranks wait for each other without progress. "
            "0: wait as long as the process group does."
        },
    )
    debug: bool = field(
        default=False,
        metadata={
            "help": "Check numbers, at the cost of time: compare values that must be equal on all ranks, and report the first "
            "value that is not finite with unit, rank and step. Results stay equal to the bit."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in STAGES:
            raise ConfigError(f"stage must be 0, 1, 2 or 3 (an integer), found {self.stage!r}")
        for name in ("async_save", "step_in_backward", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 1:
            raise ConfigError(f"replicas must be a whole number of at least 1, found {self.replicas!r}")
        if self.replicas > 1 and not self.policy.shard:
            raise ConfigError(
                f"replicas={self.replicas} needs stage 1, 2 or 3, found stage {self.stage}, where every rank has a copy of "
                "everything already: choose another stage, or leave replicas out"
            )
        if isinstance(self.sp_size, bool) or not isinstance(self.sp_size, int) or self.sp_size < 1:
            raise ConfigError(f"sp_size must be a whole number of at least 1, found {self.sp_size!r}")
        if self.wire == "int4":
            raise ConfigError("wire='int4' was removed. Use wire='int8' or wire='fp8'")
        check_choice("wire", self.wire, WIRES)
        if self.wire != "none" and not self.policy.shard:
            raise ConfigError(
                f"wire={self.wire!r} needs stage 1, 2 or 3, found stage {self.stage}: choose another stage"
            )
        if self.wire != "none" and self.debug:
            raise ConfigError(
                f"debug=True compares gradients with their exact means, and wire={self.wire!r} rounds them: use one of the two"
            )
        for name in ("offload_optimizer", "offload_params"):
            check_choice(name, getattr(self, name), OFFLOADS)
        chunked: Any = {"true": True, "false": False}.get(str(self.chunked_loss).lower(), self.chunked_loss)
        if not isinstance(chunked, bool) and chunked != "auto":
            raise ConfigError(f"chunked_loss must be True, False or 'auto', found {self.chunked_loss!r}")
        object.__setattr__(self, "chunked_loss", chunked)
        check_choice("offload_activations", self.offload_activations, ACTIVATION_TIERS)
        for name in ("device_memory", "keep_gathered", "host_memory"):
            value: int | str | None = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _memory_bytes(name, value))
        if not isinstance(self.stall_s, (int, float)) or isinstance(self.stall_s, bool) or not 0 <= self.stall_s < 1e9:
            raise ConfigError(f"stall_s must be seconds (0: never), found {self.stall_s!r}")
        if self.offload_dir is not None:
            if not isinstance(self.offload_dir, (str, os.PathLike)):
                raise ConfigError(f"offload_dir must be the path of a folder, found {self.offload_dir!r}")
            object.__setattr__(self, "offload_dir", os.fspath(self.offload_dir))
        for name, what, one, two in (
            ("full_precision", "parameters", "*.gate.*", "*.router.*"),
            ("units", "modules or their classes", "*.experts", "MixtralSparseMoeBlock"),
        ):
            object.__setattr__(self, name, _patterns(name, getattr(self, name), what, one, two))
        if self.reduce_dtype is not None:
            dtype = DTYPE_ALIASES.get(str(self.reduce_dtype).lower())
            if dtype is None:
                raise ConfigError(
                    f"reduce_dtype must be one of float32, bfloat16, float16 or None, found {self.reduce_dtype!r}"
                )
            object.__setattr__(self, "reduce_dtype", dtype)

    def get_device_mesh(self, *_: Any) -> None:
        """Refuse to be an Accelerator's `parallelism_config`; accelerate calls this method of it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"parallelism_config must be a ZeroPlugin, found a ZeroConfig: pass zero.ZeroPlugin(stage={self.stage}, …), which "
            "has the same settings"
        )

    @property
    def policy(self) -> StagePolicy:
        return STAGES[self.stage]

    def policy_for(self, world_size: int) -> StagePolicy:
        """Return the policy on `world_size` ranks.

        Ranks that have all elements release nothing but offloaded parameters, which are released at any stage.
        """
        if self.shards(world_size) > 1:
            return self.policy
        return STAGES[3] if self.offload_params != "none" else STAGES[min(self.stage, 2)]

    @property
    def offloads(self) -> bool:
        """True if any state may be stored outside device memory."""
        return (self.offload_optimizer, self.offload_params) != ("none", "none")

    @property
    def is_auto(self) -> bool:
        """True if the plan chooses a tier."""
        return "auto" in (self.offload_optimizer, self.offload_params)

    def shards(self, world_size: int) -> int:
        """Return the number of ranks over which one replica of the state is partitioned."""
        return world_size // self.replicas if self.policy.shard else 1

    def check_world_size(self, world_size: int) -> None:
        """Check the settings that depend on the number of ranks.

        Raises:
            ConfigError: the stage does not allow the offload, or groups of ranks do not divide `world_size`.
        """
        for name in ("replicas", "sp_size"):
            if world_size % getattr(self, name):
                fitting = ", ".join(str(count) for count in range(1, world_size + 1) if world_size % count == 0)
                raise ConfigError(
                    f"{name}={getattr(self, name)} does not divide {ranks_text(world_size)} into groups of one size: "
                    f"choose one of {fitting}"
                )
        if world_size == 1:
            return
        if self.offload_optimizer != "none" and not self.policy.shard:
            raise ConfigError(
                f"offload_optimizer={self.offload_optimizer!r} needs stage 1, 2 or 3 on {world_size} ranks, found stage "
                f"{self.stage}: choose one of them"
            )
        if self.offload_params != "none" and self.policy.keep_full:
            raise ConfigError(
                f"offload_params={self.offload_params!r} needs stage 3 on {world_size} ranks, found stage {self.stage}, which "
                "keeps full parameters on the device: choose stage 3"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, and the stage."""
        stock = ZeroConfig().to_dict()
        return {name: value for name, value in self.to_dict().items() if name == "stage" or value != stock[name]}


def setting(name: str, **overrides: Any) -> Any:
    """Return a dataclass field with the default and metadata of `ZeroConfig`'s field; `overrides` overrides them."""
    origin = ZeroConfig.__dataclass_fields__[name]
    return field(default=overrides.pop("default", origin.default), metadata={**origin.metadata, **overrides})
