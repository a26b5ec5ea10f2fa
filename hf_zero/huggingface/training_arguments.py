"""`TrainingArguments` that have the settings of `ZeroConfig` as flags; every other argument is the stock one's."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

from ..config import explains_names
from ..errors import ConfigError
from .arguments import OTHER_ENGINES, ZeroFlags, refuse
from .plugin import ZeroPlugin


@explains_names("zero_", all_names=False)
@dataclass
class ZeroTrainingArguments(ZeroFlags, TrainingArguments):
    """`TrainingArguments` with every field of `ZeroConfig` as `zero_<field>`; for code and for `HfArgumentParser`.

    Raises:
        ConfigError: a bad value, or DeepSpeed, FSDP or a parallelism_config that says something else in the same arguments.
    """

    def __post_init__(self) -> None:
        refuse(OTHER_ENGINES, self)
        given = self.parallelism_config
        super().__post_init__()
        # After super(): it resets accelerate's state, so that an Accelerator from before cannot shadow the plugin.
        made = ZeroPlugin(**self.settings())
        # `dataclasses.replace` hands in the plugin of the flags before: only such a one may differ. Of any other, settings
        # that the program asks for would be dropped here without a word.
        if given is not None and not (
            isinstance(given, ZeroPlugin) and (given.is_of_flags or given.config == made.config)
        ):
            raise ConfigError(
                f"ZeroTrainingArguments sets parallelism_config itself, found {given!r}: give its settings as zero_stage=3 and "
                "the like, or use plain TrainingArguments with it"
            )
        made.is_of_flags = True
        self.parallelism_config = made


ZeroTrainingArguments.__module__ = "hf_zero"  # as ZeroPlugin: training_args.bin names the place that stays
