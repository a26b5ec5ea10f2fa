"""Parameters of a model that is known by its files' headers, its shape, or a number alone: enough for a layout and a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ..checkpoint.safetensors import read_header
from ..core.layout import ParamSpec, Visit, itemsize
from ..core.precision import Precision, dtype_name
from ..core.units import LIMITS
from ..errors import ConfigError
from .shapes import Shape, tensors

Units = list[tuple[str, list[ParamSpec]]]

_BLOCK = re.compile(r"^((?:.*\.)?\d+)\.")
_EMBEDDING = re.compile(r"emb|wte|wpe")
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_HEAD = "lm_head.weight"
_SMALL = 16
"""What lies outside blocks and weighs less than a block divided by this joins one, as `core/units` does it."""


def from_number(parameters: int, precision: Precision) -> Units:
    """One unit: too few parameters for blocks."""
    return [("parameters", [_spec("parameters", (parameters,), "float32", precision, castable=True)])]


def from_shape(shape: Shape, precision: Precision) -> Units:
    """In float32, as files of such a model would have it."""
    return _units({name: ("float32", sizes) for name, sizes in tensors(shape)}, precision, shape.is_tied)


def from_files(path: Path, precision: Precision) -> Units:
    """From the headers of one safetensors file, or of all in a folder.

    Raises:
        ConfigError: no such files.
        CheckpointError: a damaged header.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path}: expected a .safetensors file, or a folder with some or with a config.json")
    shapes = {key: entry for file in files for key, entry in read_header(file).tensors.items()}
    if not shapes:
        raise ConfigError(f"{path}: its files hold no tensors")
    return _units({name: (entry.dtype, entry.shape) for name, entry in shapes.items()}, precision)


def _units(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], precision: Precision, is_tied: bool | None = None
) -> Units:
    """Units by name: `h.0.…` is of unit `h.0`.

    Matrices that are no embeddings are taken for those that autocast casts; types that are not floats for frozen.
    `is_tied`: the largest embedding is the head, too; None: if no other matrix is behind the blocks.
    """
    blocks: Units = []
    before: list[ParamSpec] = []
    after: list[ParamSpec] = []
    of: dict[str, list[ParamSpec]] = {}
    for name in sorted(shapes, key=_natural):
        dtype, shape = shapes[name]
        is_embedding = _EMBEDDING.search(name) is not None
        spec = _spec(name, shape, dtype, precision, castable=len(shape) > 1 and not is_embedding)
        block = _BLOCK.match(name)
        if block is None:
            (before if is_embedding else after).append(spec)
        elif block[1] in of:
            of[block[1]].append(spec)
        else:
            of[block[1]] = [spec]
            blocks.append((block[1], of[block[1]]))
    sizes = sorted(sum(spec.numel for spec in specs) for _, specs in blocks)
    blocks = [part for block in blocks for part in _cut(*block)]
    small = sizes[len(sizes) // 2] // _SMALL if sizes else 0
    if is_tied is None:
        is_tied = not any(len(spec.shape) > 1 for spec in after)
    if before and is_tied:
        at = max(range(len(before)), key=lambda place: before[place].numel)
        before[at] = replace(before[at], names=(before[at].name, _HEAD))
    large = _split(before, small, blocks[0][1] if blocks else [])
    return [*large, *blocks, *_split(after, small, blocks[-1][1] if blocks else [])]


def _cut(name: str, specs: list[ParamSpec]) -> Units:
    """A block above the limit into its large children by name (attention | MLP), and what is left of it; as `core/units`."""
    if _nbytes(specs) <= LIMITS.unit_bytes:
        return [(name, specs)]
    children: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        child, _, leaf = spec.name.removeprefix(f"{name}.").partition(".")
        if leaf and not child.isdigit():  # of a list each rank may run another part
            children.setdefault(f"{name}.{child}", []).append(spec)
    large = [(child, mine) for child, mine in children.items() if _nbytes(mine) > LIMITS.unit_bytes // _SMALL]
    apart = {spec.name for _, mine in large for spec in mine}
    rest = [spec for spec in specs if spec.name not in apart]
    return [*([(name, rest)] if rest else []), *(part for child, mine in large for part in _cut(child, mine))]


def _nbytes(specs: Iterable[ParamSpec]) -> int:
    return sum(spec.numel * itemsize(spec.dtype) for spec in specs)


def visits_by_name(units: Units) -> list[Visit]:
    """A pass forward: embeddings, blocks, then what is behind them; or an embedding again, where that is the head, too."""
    place_of = {spec.name: place for place, (_, specs) in enumerate(units) for spec in specs}
    names = sorted(place_of, key=lambda name: (place_of[name], _natural(name)))
    outside = [name for name in names if _BLOCK.match(name) is None]
    embeddings = [name for name in outside if _EMBEDDING.search(name)]
    heads = [place_of[name] for name in outside if name not in embeddings]
    blocks = sorted({place_of[name] for name in names if _BLOCK.match(name)})
    out = [Visit(place_of[name], is_embedding=True) for name in embeddings]
    out += [Visit(place) for place in blocks]
    out += [Visit(place) for place in dict.fromkeys(heads) if place not in blocks]
    tied = [place for place, (_, specs) in enumerate(units) if any(len(spec.names) > 1 for spec in specs)]
    return out + [Visit(place) for place in tied]


def _split(specs: Iterable[ParamSpec], small: int, nearest: list[ParamSpec]) -> Units:
    """Units of those that are large; the others join the nearest block."""
    out: Units = []
    for spec in specs:
        if spec.numel > small:
            out.append((spec.name.rpartition(".")[0] or spec.name, [spec]))
        else:
            nearest.append(spec)
    return out


def _spec(name: str, shape: tuple[int, ...], dtype: str, precision: Precision, castable: bool) -> ParamSpec:
    autocast = precision.autocast_dtype
    castable = castable and not any(fnmatchcase(name, pattern) for pattern in precision.full_precision)
    compute = dtype_name(autocast) if autocast is not None and castable and dtype == "float32" else dtype
    master = "float32" if dtype in ("bfloat16", "float16") else dtype
    trainable = dtype in _FLOATS
    gathered_in = precision.gathered_in((name,), shape, trainable)
    return ParamSpec(
        (name,), shape, dtype, compute, master if trainable else dtype, trainable=trainable, gathered_in=gathered_in
    )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """`h.10` after `h.9`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
