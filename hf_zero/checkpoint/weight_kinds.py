"""Kinds of weight files: which existing files a new save, export or upload makes stale.

`from_pretrained` prefers `model.safetensors` to an index and its shards, and adds an adapter to
whatever it loads. A file that an older export left can therefore replace or change the new weights.
Variants (`model.fp16.safetensors`) are loaded on request only and have no kind here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from ..errors import ConfigError

_SHARD = r"(-\d{5}-of-\d{5})?"
_KINDS = {
    "model": re.compile(rf"model{_SHARD}\.safetensors|model\.safetensors\.index\.json"),
    "adapter": re.compile(rf"adapter_model{_SHARD}\.safetensors|adapter_config\.json"),
    "pickled model": re.compile(rf"pytorch_model{_SHARD}\.bin|pytorch_model\.bin\.index\.json"),
    "pickled adapter": re.compile(r"adapter_model\.bin"),
}


def weight_kind(name: str) -> str | None:
    """Return the kind of a weight file; None for any other file."""
    last = PurePosixPath(name).name
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(last)), None)


def stale_weights(present: Iterable[str], new: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Compare the weight files of a folder or repository with those that will be written.

    Args:
        present: names of existing files, relative, with forward slashes.
        new: names of the files that will be written. Folders without new weights are not compared.

    Returns:
        Existing files of the same kind that no new file replaces; existing files of another kind -> that kind.
    """
    kinds: dict[PurePosixPath, set[str]] = {}
    for name in new:
        kind = weight_kind(name)
        if kind is not None:
            kinds.setdefault(PurePosixPath(name).parent, set()).add(kind)
    same, other = [], {}
    for name in sorted(set(present) - set(new)):
        kind, written = weight_kind(name), kinds.get(PurePosixPath(name).parent)
        if kind is None or written is None:
            continue
        if kind in written:
            same.append(name)
        else:
            other[name] = kind
    return same, other


def refuse_other_weights(
    present: Collection[str],
    new: Collection[str],
    where: str,
    remedy: str = "Choose another repository or revision, or overwrite=True to remove these files",
) -> None:
    """Raise a ConfigError if files of another kind would be loaded instead of the new weights, or with them."""
    _, other = stale_weights(present, new)
    if other:
        kinds = " and ".join(sorted({f"{'an' if kind == 'adapter' else 'a'} {kind}" for kind in other.values()}))
        named = ", ".join([*other][:4]) + (", …" if len(other) > 4 else "")
        raise ConfigError(
            f"{where} holds {kinds} ({named}), and the new weights are of another kind: a reader would mix the two. {remedy}"
        )
