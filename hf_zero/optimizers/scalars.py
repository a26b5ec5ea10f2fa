"""Convert options of groups and scalar states to JSON, for checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..core.precision import dtype_name
from ..errors import CheckpointError


def scalar_to_json(name: str, value: Any) -> Any:
    """Return an option or scalar state as JSON. Tensors of at most one element keep their dtype and shape.

    Raises:
        CheckpointError: JSON cannot represent the value.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        if value.numel() > 1 or value.is_complex():
            raise CheckpointError(
                f"optimizer option {name!r} is a tensor of shape {tuple(value.shape)} and dtype {value.dtype}, which JSON "
                "cannot hold. Save with save_optimizer=False, and optimizer.state_dict() separately"
            )
        shape = {"shape": list(value.shape)} if value.dim() else {}
        return {"tensor": value.item() if value.numel() else None, "dtype": dtype_name(value.dtype), **shape}
    if isinstance(value, (tuple, list)):
        return [scalar_to_json(name, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"optimizer option or state {name!r} is a {type(value).__name__}, which JSON cannot hold. Save with "
        "save_optimizer=False, and optimizer.state_dict() separately"
    )
