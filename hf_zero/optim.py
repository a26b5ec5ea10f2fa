"""A torch optimizer over this rank's spans: which ones can be, its parameters, its full state.

The optimizer object and its `param_groups` dicts stay the user's own; only `group["params"]` is replaced, by a few long
1-D float32 tensors (the masters). So schedulers, hooks and wrappers that hold the optimizer go on working.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .agree import arriving, read
from .comm import SoloWire
from .errors import CheckpointError, LayoutError, UnsupportedOptimizerError
from .flat import Flat
from .shard import is_elementwise
from .unit import Unit

_WHOLE_TENSOR: dict[str, str] = {
    "Adafactor": "it factors each matrix into row and column statistics",
    "LBFGS": "it needs dot products over all parameters at every line-search step",
    "Muon": "it orthogonalizes whole matrices",
    "Shampoo": "it preconditions whole matrices",
    "DistributedShampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
    "LAMB": "it scales by each layer's norm",
    "Lamb": "it scales by each layer's norm",
    "FusedLAMB": "it scales by each layer's norm",
    "FusedLamb": "it scales by each layer's norm",
    "LARS": "it scales by each layer's norm",
    "Lars": "it scales by each layer's norm",
    "NovoGrad": "it scales by each layer's norm",
    "Novograd": "it scales by each layer's norm",
    "AdamMini": "it averages over blocks of each matrix",
    "Adam_mini": "it averages over blocks of each matrix",
    "CAME": "it factors each matrix",
    "SM3": "it factors each matrix",
    "GaLoreAdamW": "it projects whole matrices",
    "SparseAdam": "it needs sparse gradients",
    "KFAC": "it preconditions whole matrices",
}
_ELEMENTWISE = frozenset(
    {
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
_INSTEAD = "use an element-wise one (AdamW, Adam, SGD, RMSprop, Adagrad, Lion), or ZeroConfig(stage=0)"


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose result depends on more than each element's own history.

    Known ones by name, unknown ones by trial: three steps on a small matrix must give what the same elements give as two
    flat halves.

    Raises:
        UnsupportedOptimizerError: names the optimizer and says what to use.
    """
    kind = type(optimizer)
    for base in kind.__mro__:
        if base.__name__ in _WHOLE_TENSOR:
            raise UnsupportedOptimizerError(
                f"{kind.__name__} cannot run on flat slices of parameters: {_WHOLE_TENSOR[base.__name__]}; {_INSTEAD}"
            )
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE:
        return
    agrees = _agrees_on_slices(optimizer)
    if agrees is None:
        warnings.warn(
            f"hf_zero could not try {kind.__name__} on a small example; it is taken to be element-wise. If it uses "
            "norms or shapes of whole parameters, results will be wrong",
            stacklevel=3,
        )
    elif not agrees:
        raise UnsupportedOptimizerError(
            f"{kind.__name__} gives other results on flat slices than on whole parameters (tried on a 6 x 10 matrix), "
            f"so it cannot be sharded; {_INSTEAD}"
        )


def _agrees_on_slices(optimizer: torch.optim.Optimizer) -> bool | None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 10, generator=generator) for _ in range(4)]

    def run(cut: Callable[[Tensor], list[Tensor]]) -> Tensor:
        params = [nn.Parameter(part.clone()) for part in cut(values[0])]
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(
            {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups", "step", "zero_grad")}
        )
        options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
        torch.optim.Optimizer.__init__(twin, [{"params": params, **options}], dict(optimizer.defaults))
        for grad in values[1:]:
            for param, part in zip(params, cut(grad)):
                param.grad = part.clone()
            type(optimizer).step(twin)
        return torch.cat([param.detach().flatten() for param in params])

    try:
        with torch.enable_grad():
            whole = run(lambda t: [t])
            halves = run(lambda t: list(t.flatten().split([23, 37])))
    except Exception:
        return None
    return torch.allclose(whole, halves, rtol=1e-5, atol=1e-7)


def state_tensors(optimizer: torch.optim.Optimizer | None) -> int:
    """State tensors per parameter element, for predictions before the first step; 2 (Adam) where it is not known."""
    if optimizer is None:
        return 0
    group = optimizer.param_groups[0]
    match type(optimizer).__name__:
        case "SGD":
            return int(bool(group.get("momentum")))
        case "RMSprop":
            return 1 + int(bool(group.get("momentum"))) + int(bool(group.get("centered")))
        case "Adam" | "AdamW":
            return 3 if group.get("amsgrad") else 2
        case "Adagrad" | "Lion":
            return 1
        case _:
            return 2


class Binding:
    """One optimizer bound to the spans of one model."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        wire: SoloWire,
        originals: list[list[nn.Parameter]],
    ) -> None:
        self.optimizer = optimizer
        self.originals = originals
        self._wire = wire
        self.flats: list[Flat] = []
        masters: list[list[Tensor]] = [[] for _ in originals]
        for unit in units:
            for flat in unit.trained:
                group = flat.span.spec.group
                if group < 0:
                    continue
                self.flats.append(flat)
                masters[group] += [shard.master for shard in flat.shards]
        for options, spans in zip(optimizer.param_groups, masters):
            options["params"] = spans
        self._masters = masters

    def forget(self) -> None:
        """The optimizer has no state of these spans afterwards."""
        for flat in self.flats:
            for shard in flat.shards:
                shard.forget(self.optimizer)

    def is_current(self) -> bool:
        """False once someone added a group or replaced the parameters of one."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._masters) and all(
            group["params"] is mine for group, mine in zip(groups, self._masters)
        )

    def current_originals(self) -> list[list[nn.Parameter]]:
        """The model's parameters by group, with groups added since."""
        back = {id(shard.master) for flat in self.flats for shard in flat.shards}
        out = list(self.originals)
        for index, group in enumerate(self.optimizer.param_groups):
            fresh = [param for param in group["params"] if id(param) not in back]
            if index >= len(out):
                out.append(fresh)
            elif fresh:
                out[index] = out[index] + fresh
        return out

    def group_options(self, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
        """See `Engine.group_options`."""
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[param] for param in params]}
            for group, params in zip(self.optimizer.param_groups, self.originals)
        ]

    # Full state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A collective. The state as the plain optimizer over whole parameters would give it, on CPU.

        Rank 0 has the values, other ranks meta tensors of the same shapes.
        """
        index = {param: i for i, param in enumerate(p for params in self.originals for p in params)}
        alone = not any(flat.needs_all_ranks for flat in self.flats)
        with nullcontext() if alone else arriving(self._wire, "the optimizer's state_dict()"):
            state = {
                index[param]: entries
                for flat in self.flats
                for param, entries in self._whole_state(flat, False).items()
            }
        order = {i: state[i] for i in sorted(state)}
        return {"state": order, "param_groups": numbered_groups(self.optimizer, self.originals)}

    def take(self, flats: Iterable[Flat]) -> dict[nn.Parameter, dict[str, Any]]:
        """A collective. The state of these spans' parameters, whole, on every rank; the optimizer forgets it."""
        mine = [flat for flat in flats if flat in self.flats]
        state = {param: entries for flat in mine for param, entries in self._whole_state(flat, True).items()}
        for flat in mine:
            for shard in flat.shards:
                shard.forget(self.optimizer)
        return state

    def put(self, flats: Iterable[Flat], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """This rank's slices of what `take` gave, for spans that were cut anew."""
        for flat in flats:
            flat.put_state(self.optimizer, self._slice_state(flat, dict(state)))

    def _whole_state(self, flat: Flat, everywhere: bool) -> dict[nn.Parameter, dict[str, Any]]:
        names = flat.state_names(self.optimizer)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for key in sorted(names):
            value = read(self._wire, flat.storage, partial(flat.state, self.optimizer, key))
            whole = self._whole(flat, value, everywhere) if names[key] else None
            for slot, param in zip(flat.span.slots, flat.params):
                if whole is None:
                    piece: Any = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                else:
                    piece = whole[slot.offset : slot.stop].view(slot.spec.shape).clone()
                state.setdefault(param, {})[key] = piece
        return state

    def _whole(self, flat: Flat, value: Tensor, everywhere: bool) -> Tensor:
        if flat.span.shards == 1:
            return value.detach().cpu()
        has_values = everywhere or self._wire.rank == 0
        full = torch.empty(flat.span.numel, dtype=value.dtype, device="cpu" if has_values else "meta")
        if self._wire.rank == 0:
            self._wire.collect(value.detach(), full, flat.span.index)
        else:
            self._wire.collect(value.detach(), None, flat.span.index)
        if everywhere:
            moved = full.to(value.device)
            self._wire.broadcast(moved)
            full = moved.cpu()
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's slices from a full state (every rank passes all of it).

        As in torch: floating values come in the parameters' type, here the masters', and the optimizer brings older forms of
        its state (a `step` that is a number) up to date.

        Raises:
            CheckpointError: other groups, or a state tensor of another shape; names the parameter.
        """
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        mine = [len(params) for params in self.originals]
        if sizes != mine:
            raise CheckpointError(
                f"the optimizer state has groups of {sizes} parameters, this optimizer has {mine}: it belongs to another "
                "model, or to one with other parameters frozen"
            )
        saved = {
            param: state_dict["state"].get(i)
            for group, params in zip(groups, self.originals)
            for i, param in zip(group["params"], params)
        }
        for flat, entries in [(flat, self._slice_state(flat, saved)) for flat in self.flats]:
            for key, value in entries.items():
                if is_elementwise(key, value, flat.span.slice_numel) and value.is_floating_point():
                    entries[key] = value.to(flat.master_dtype)
            flat.put_state(self.optimizer, entries)
        for group, packed in zip(self.optimizer.param_groups, groups):
            group.update({key: value for key, value in packed.items() if key != "params"})
        self.optimizer.__setstate__({"state": self.optimizer.state, "param_groups": self.optimizer.param_groups})

    def _slice_state(self, flat: Flat, saved: dict[nn.Parameter, dict[str, Any] | None]) -> dict[str, Any]:
        states = [saved.get(param) or {} for param in flat.params]
        keys = list(dict.fromkeys(key for entries in states for key in entries))
        out: dict[str, Any] = {}
        for key in keys:
            sample = next(entries[key] for entries in states if key in entries)
            if not isinstance(sample, Tensor):
                out[key] = sample
            elif key == "step" or (sample.dim() == 0 and any(p.dim() > 0 for p in flat.params)):
                steps = {float(entries[key]) for entries in states if key in entries}
                if len(steps) > 1:
                    warnings.warn(
                        f"parameters of one span have different {key!r} in the saved optimizer state ({sorted(steps)}); "
                        f"the largest is used for all, {flat.span.spec.name!r} among them",
                        stacklevel=4,
                    )
                out[key] = torch.tensor(max(steps), dtype=sample.dtype, device=sample.device)
                if flat.device.type != "cpu" and sample.device.type != "cpu":
                    out[key] = out[key].to(flat.device)
            else:
                out[key] = self._slice(flat, key, states, sample.dtype)
        return out

    def _slice(self, flat: Flat, key: str, states: list[dict[str, Any]], dtype: torch.dtype) -> Tensor:
        out = torch.zeros(flat.span.slice_numel, dtype=dtype)
        places = {id(slot): i for i, slot in enumerate(flat.span.slots)}
        for part in flat.span.overlaps(flat.rank):
            value = states[places[id(part.slot)]].get(key)
            if value is None:
                continue
            if tuple(value.shape) != part.slot.spec.shape:
                raise CheckpointError(
                    f"optimizer state {key!r} of {part.slot.spec.name!r} has shape {tuple(value.shape)}, "
                    f"expected {part.slot.spec.shape}"
                )
            flat_value = value.reshape(-1)[part.param_start : part.param_start + part.numel]
            out[part.slice_start : part.slice_start + part.numel].copy_(flat_value)
        return out


def originals_of(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], previous: Binding | None
) -> list[list[nn.Parameter]]:
    """The model's parameters in each group of an optimizer that is about to be bound.

    Raises:
        LayoutError: a parameter that the model does not have.
    """
    if previous is not None and previous.optimizer is optimizer:
        groups = previous.current_originals()
    else:
        groups = [list(group["params"]) for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        for place, param in enumerate(group):
            if param not in names:
                raise LayoutError(
                    f"the optimizer's group {index} holds a parameter (number {place}, shape {tuple(param.shape)}) that "
                    "the model does not have: build the optimizer over this model's parameters only"
                )
    return groups


def take_state(optimizer: torch.optim.Optimizer, originals: list[list[nn.Parameter]]) -> dict[str, Any] | None:
    """The state of a plain optimizer, before its parameters are replaced; None when it has none yet."""
    if not any(param in optimizer.state for group in originals for param in group):
        return None
    flat = [param for group in originals for param in group]
    state = {i: optimizer.state.pop(param) for i, param in enumerate(flat) if param in optimizer.state}
    return {"state": state, "param_groups": numbered_groups(optimizer, originals)}


def numbered_groups(optimizer: torch.optim.Optimizer, originals: list[list[nn.Parameter]]) -> list[dict[str, Any]]:
    """The groups as `state_dict` has them: options, and under `params` running numbers of the original parameters."""
    groups: list[dict[str, Any]] = []
    start = 0
    for group, params in zip(optimizer.param_groups, originals):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": list(range(start, start + len(params)))})
        start += len(params)
    return groups


def with_closure_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of `step` after its closure was run, with one that only gives the loss in its place. None: it has none."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}
