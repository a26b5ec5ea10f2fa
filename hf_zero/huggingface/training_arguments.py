"""`TrainingArguments` with the settings of `ZeroConfig` as flags."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

from ..config import suggest_names
from ..errors import ConfigError
from .arguments import OTHER_ENGINES, ZeroFlags, refuse
from .plugin import ZeroPlugin


@suggest_names("zero_", all_names=False)
@dataclass
class ZeroTrainingArguments(ZeroFlags, TrainingArguments):
    """`TrainingArguments` with every field of `ZeroConfig` as `zero_<field>`; for code and for `HfArgumentParser`.

    Raises:
        ConfigError: a bad value; DeepSpeed, FSDP or another parallelism_config in the same arguments.

    Example:
        >>> args = zero.ZeroTrainingArguments("out", zero_stage=3, zero_offload_optimizer="cpu")
    """

    def __post_init__(self) -> None:
        refuse(OTHER_ENGINES, self)
        given = self.parallelism_config
        super().__post_init__()
        # After super(): it resets accelerate's state, so that an Accelerator from before cannot shadow the plugin.
        made = ZeroPlugin(**self.settings())
        # `dataclasses.replace` passes the plugin of the earlier flags: only that one may differ. The settings of any other
        # plugin would be lost silently.
        if given is not None and not (
            isinstance(given, ZeroPlugin) and (given.is_of_flags or given.config == made.config)
        ):
            raise ConfigError(
                f"ZeroTrainingArguments sets parallelism_config itself, found {given!r}: give its settings as zero_stage=3 and "
                "the like, or use plain TrainingArguments with it"
            )
        made.is_of_flags = True
        self.parallelism_config = made


ZeroTrainingArguments.__module__ = "hf_zero"  # training_args.bin pickles this name
