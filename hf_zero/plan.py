"""From a model to its layout and the bytes that follow from it: no process group, no device, no values needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from .config import ZeroConfig
from .discover import Group, find_groups
from .errors import ConfigError, LayoutError
from .layout import Layout, ParamSpec
from .precision import Precision, castable_params, dtype_name
from .report import Report, data_parallel, predict, unit_rows


class Drafter:
    """Turns one model's parameters into specs, unit by unit; again, when its optimizer groups change."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.names = names_of(model)
        self.groups: list[Group] = find_groups(model)
        self._precision = precision
        self._castable = castable_params(model) if precision.autocast_dtype is not None else set()

    def specs(
        self, group_of: Mapping[nn.Parameter, int], old: Mapping[nn.Parameter, ParamSpec] | None = None
    ) -> list[list[ParamSpec]]:
        """One list per unit. `group_of` gives optimizer groups (-1: in none); `old` the specs of a layout in force."""
        known = old or {}
        return [
            [self._spec(param, group_of.get(param, -1), known.get(param)) for param in g.params] for g in self.groups
        ]

    def layout(self, specs: Sequence[Sequence[ParamSpec]], shards: int) -> Layout:
        return Layout.build(zip((group.name for group in self.groups), specs), shards)

    def _spec(self, param: nn.Parameter, group: int, old: ParamSpec | None) -> ParamSpec:
        if old is None:
            own = dtype_name(param.dtype)
            master = dtype_name(Precision.master_dtype(param))
            compute = dtype_name(self._precision.compute_dtype(param, param in self._castable))
        else:  # the parameter's `.data` is the engine's now, and may be of another type
            own, compute, master = old.dtype, old.compute_dtype, old.master_dtype
            if param.requires_grad and own in ("bfloat16", "float16"):
                master = "float32"
        shape, names = tuple(param.shape), tuple(self.names[param])
        return ParamSpec(names, shape, own, compute, master, trainable=param.requires_grad, group=group)


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter once, with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise LayoutError(f"parameter {name!r} has no shape yet: run one forward before sharding")
        names.setdefault(param, []).append(name)
    if not names:
        raise LayoutError(f"{type(model).__name__} has no parameters to shard")
    return names


def sketch(model: nn.Module, config: ZeroConfig, world_size: int, mixed_precision: str | None = "no") -> Report:
    """What `shard` would give each of `world_size` ranks under AdamW; the model may be on the meta device.

    Raises:
        ConfigError, LayoutError: as `shard`.
    """
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, found {world_size}")
    precision = Precision.of(mixed_precision, config.reduce_dtype)
    drafter = Drafter(model, precision)
    group_of = dict.fromkeys(drafter.names, 0)
    layout = drafter.layout(drafter.specs(group_of), world_size if config.policy.shard else 1)
    return Report(
        stage=config.stage,
        world_size=world_size,
        precision=str(precision),
        parameters=layout.numel,
        trainable=layout.trainable_numel,
        predicted=predict(layout, config.policy, 2),
        data_parallel=data_parallel(layout, 2),
        measured={},
        traffic={},
        units=unit_rows(layout),
    )
