"""`TrainingArguments` that have the settings of `ZeroConfig` as flags; every other argument is the stock one's."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

from ..errors import ConfigError
from .arguments import OTHER_ENGINES, ZeroFlags, refuse
from .plugin import ZeroPlugin


@dataclass
class ZeroTrainingArguments(ZeroFlags, TrainingArguments):
    """`TrainingArguments` with every field of `ZeroConfig` as `zero_<field>`; for code and for `HfArgumentParser`.

    Raises:
        ConfigError: a bad value, or DeepSpeed, FSDP or another parallelism_config in the same arguments.
    """

    def __post_init__(self) -> None:
        refuse(OTHER_ENGINES, self)
        given = self.parallelism_config
        if given is not None and not isinstance(given, ZeroPlugin):
            raise ConfigError(f"ZeroTrainingArguments sets parallelism_config itself, found {given!r}: remove it")
        super().__post_init__()
        # After super(): it resets accelerate's state, so that an Accelerator from before cannot shadow the plugin.
        self.parallelism_config = ZeroPlugin(**self.settings())


ZeroTrainingArguments.__module__ = "hf_zero"  # as ZeroPlugin: training_args.bin names the place that stays
