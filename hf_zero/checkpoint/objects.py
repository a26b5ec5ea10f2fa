"""Small states beside the weights, without pickle: `state_dict()`s of schedulers and the like, random number generators.

A nested value of dicts, lists, tuples, numbers, strings, bytes and tensors becomes JSON plus named tensors, and back.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"
_RESERVED = {_TENSOR, _TUPLE, _PAIRS}


class Stateful(Protocol):
    """What has a state of its own: a scheduler, a loss scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """`value` as JSON; its tensors go to `tensors`, named by their place below `where`.

    Raises:
        CheckpointError: something that has no place in JSON; says where.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        while where in tensors:  # names with dots can lead to one place in two ways
            where += "'"
        tensors[where] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: where}
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [pack(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and value.keys() <= _RESERVED):
            return {key: pack(item, tensors, f"{where}.{key}") for key, item in value.items()}
        pairs = [
            [pack(k, tensors, f"{where}.key{i}"), pack(v, tensors, f"{where}.{k}")]
            for i, (k, v) in enumerate(value.items())
        ]
        return {_PAIRS: pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which can be stored neither as JSON nor as a tensor; give it a state_dict() of "
        "plain values"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`; numpy arrays come back as tensors."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if set(value) == {_TUPLE}:
            return tuple(unpack(item, tensors) for item in value[_TUPLE])
        if set(value) == {_PAIRS}:
            return {unpack(key, tensors): unpack(item, tensors) for key, item in value[_PAIRS]}
        return {key: unpack(item, tensors) for key, item in value.items()}
    return value


def random_states() -> dict[str, Any]:
    """Of Python, numpy and torch (CPU, and CUDA where it is in use) in this process."""
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    out: dict[str, Any] = {
        "python": [version, torch.tensor(state, dtype=torch.int64), gauss],
        "numpy": [kind, torch.tensor(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
