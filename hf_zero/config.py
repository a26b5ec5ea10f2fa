"""What the user chooses: a frozen value, checked once. The only file that compares stage numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import ConfigError

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "torch.float32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "torch.float16": "float16",
}


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """What a stage means to the runtime; nothing else asks for the number."""

    shard: bool
    """Each rank owns 1/N of the optimizer state (False: plain data parallel, every rank owns all of it)."""
    keep_full: bool
    """Full parameters stay in memory between their uses."""
    reduce_each_backward: bool
    """Gradients leave for their owners in every backward, also inside `no_sync`; else they add up locally first."""


# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), §5.
STAGES = {
    0: StagePolicy(shard=False, keep_full=True, reduce_each_backward=False),
    1: StagePolicy(shard=True, keep_full=True, reduce_each_backward=False),
    2: StagePolicy(shard=True, keep_full=True, reduce_each_backward=True),
    3: StagePolicy(shard=True, keep_full=False, reduce_each_backward=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Settings of one engine.

    Raises:
        ConfigError: a value outside its set; the message names the field and the values allowed.
    """

    stage: int = 2
    """0 plain data parallel (for comparison), 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    reduce_dtype: str | None = None
    """Type in which gradients travel and are summed: float32 (default), bfloat16 or float16."""
    async_save: bool = False
    """Checkpoints of the Trainer and of `save_state` are copied to host memory and written while training goes on."""

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in STAGES:
            raise ConfigError(f"stage must be 0, 1, 2 or 3 (an integer), found {self.stage!r}")
        if not isinstance(self.async_save, bool):
            raise ConfigError(f"async_save must be True or False, found {self.async_save!r}")
        if self.reduce_dtype is not None:
            name = _DTYPES.get(str(self.reduce_dtype).lower())
            if name is None:
                raise ConfigError(
                    f"reduce_dtype must be one of float32, bfloat16, float16 or None, found {self.reduce_dtype!r}"
                )
            object.__setattr__(self, "reduce_dtype", name)

    @property
    def policy(self) -> StagePolicy:
        return STAGES[self.stage]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
