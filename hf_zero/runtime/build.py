"""A model's parameters put into units, cut anew when the optimizer's groups ask for it, and given back whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..comm.wire import SoloWire
from ..core.layout import Layout, ParamSpec
from ..core.precision import dtype_of
from ..errors import ConfigError, LayoutError
from ..plan.costs import Placement
from ..plan.machine import Machine, here
from ..plan.plan import Drafter, Plan, plan
from ..plan.solve import PlanInputs
from .deferred import birth_of
from .flat_param import Flat, slice_of
from .optimizer import Binding, WholeBinding, originals_of, state_tensors
from .ownership import adopt, release
from .sharded import Place, Sharded
from .supported_optimizers import needs_wholes
from .unit import State, Unit


class Assembly:
    """The units of one model, and which parameter is where.

    Attributes:
        sharded: the model, and what is built.

    Raises:
        ConfigError: it was born on another number of ranks.
    """

    def __init__(self, sharded: Sharded, drafter: Drafter) -> None:
        self.sharded = sharded
        self._placements: Sequence[Placement] = ()
        self._drafter = drafter
        _check_births(sharded.names, sharded.wire)

    def local_values(self) -> Iterator[tuple[str, Tensor]]:
        """What of each parameter could differ from other ranks': not one that the ranks were given parts of at birth."""
        for param, (name, *_) in self.sharded.names.items():
            birth = birth_of(param)
            if birth is None:
                yield name, param.detach()
            elif birth.wire.size == 1:
                yield name, birth.slice_of(param)

    def specs(self, originals: list[list[nn.Parameter]]) -> list[list[ParamSpec]]:
        """By unit, for an optimizer with these parameters in its groups; types stay what they were when first cut."""
        group_of = {param: group for group, params in enumerate(originals) for param in params}
        return self._drafter.specs(group_of, {param: self._spec(param) for param in self.sharded.places})

    def _spec(self, param: nn.Parameter) -> ParamSpec:
        return self.sharded.places[param].slot.spec

    def cuts_otherwise(self, specs: list[list[ParamSpec]]) -> bool:
        """Whether these specs make other spans than there are now."""
        now = [[self._spec(param).key for param in group.params] for group in self._drafter.groups]
        return [[spec.key for spec in unit] for unit in specs] != now

    def hosts(self) -> Iterator[tuple[Unit, list[nn.Module]]]:
        """Every unit with the modules that use it."""
        return ((unit, group.hosts) for unit, group in zip(self.sharded.units, self._drafter.groups))

    def lay_out(self, specs: list[list[ParamSpec]]) -> Layout:
        """The layout that these specs make; nothing changes."""
        return self._drafter.layout(specs, self.sharded.layout.shards)

    def kind_of_binding(self, optimizer: torch.optim.Optimizer) -> type[Binding]:
        """Over slices or over whole matrices.

        Raises:
            UnsupportedOptimizerError: it can have neither.
        """
        sharded = self.sharded
        cuts = sharded.policy.shard and sharded.wire.size > 1
        offloaded = sharded.config.offload_optimizer != "none"
        wholes = needs_wholes(optimizer, sharded.names, cut=cuts, offloaded=offloaded)
        return WholeBinding if wholes else Binding

    def originals(self, optimizer: torch.optim.Optimizer, bound: Binding | None) -> list[list[nn.Parameter]]:
        """The parameters in an optimizer's groups, as it was built; `bound` if it is."""
        return originals_of(optimizer, {param: names[0] for param, names in self.sharded.names.items()}, bound)

    def plan(
        self, specs: list[list[ParamSpec]], optimizer: torch.optim.Optimizer | None, known: Machine, ranks_here: int
    ) -> Plan:
        """The plan for these specs; nothing changes. A collective under `auto`, and once there are units.

        Args:
            known: measured speeds. What is free is looked up now, on every rank.
        """
        sharded, machine = self.sharded, Machine()
        if sharded.config.is_auto:
            held = sum(p.untyped_storage().nbytes() for p in sharded.names if p.device == sharded.device)
            free = here(sharded.device, ranks=ranks_here, offload_dir=sharded.config.offload_dir, held_bytes=held)
            found: list[Machine] = sharded.wire.exchange(free.with_speeds_of(known))
            machine = Machine.least(found)
        inputs = PlanInputs(
            self.lay_out(specs),
            machine,
            sharded.config,
            sharded.wire.size,
            sharded.precision,
            state_tensors(optimizer),
            in_files=self._in_files(),
            sizes=sharded.storage.sizes,
        )
        return plan(inputs)

    def _in_files(self) -> frozenset[str]:
        """Parameters whose values the model's own files have, and may keep. A collective once there are units."""
        born = [
            name
            for param, (name, *_) in self.sharded.names.items()
            if (birth := birth_of(param)) is not None and birth.origin is not None
        ]
        if not self.sharded.units:
            return frozenset(born)
        mine = frozenset(slot.spec.name for flat in self.sharded.flats if flat.in_files for slot in flat.span.slots)
        return mine.intersection(*self.sharded.wire.exchange(mine))

    def build(
        self,
        specs: list[list[ParamSpec]],
        placements: Sequence[Placement],
    ) -> None:
        """All units, one after another, from the parameters' values, whole or born; these are the engine's from here on.

        Args:
            placements: by span.
        """
        self._placements = placements
        self.sharded.layout = self.lay_out(specs)
        for number, unit_specs in enumerate(specs):
            self.sharded.units.append(self._build(number, unit_specs, {}))

    def _build(self, number: int, specs: list[ParamSpec], kept: Mapping[int, Flat]) -> Unit:
        param_of = {spec.name: param for spec, param in zip(specs, self._drafter.groups[number].params)}
        layout, flats = self.sharded.layout.units[number], []
        for span in layout.spans:
            params = [param_of[slot.spec.name] for slot in span.slots]
            for param in params:
                param.grad = None
            if span.index in kept:
                flats.append(kept[span.index])
                flats[-1].span = span
                flats[-1].watched = []  # nothing is gathered that could be compared
                continue
            flats.append(
                Flat(
                    span,
                    params,
                    self.sharded.wire,
                    self.sharded.policy,
                    self.sharded.precision,
                    self.sharded.storage,
                    self._placements[span.index],
                )
            )
        unit = Unit(layout, flats, self.sharded.wire, self.sharded.policy)
        unit.release()
        for flat in flats:
            self.sharded.wire.watch.units[flat.span.index] = unit.name
            for index, param in enumerate(flat.params):
                self.sharded.places[param] = Place(unit, flat, index)
                adopt(param, weakref.ref(self.sharded), shows_nan=not unit.policy.keep_full)
        return unit

    def parted(self, originals: list[list[nn.Parameter]]) -> list[list[ParamSpec]] | None:
        """Specs that put parameters without a gradient in spans of their own; None where no span has both kinds.

        The same on every rank, after a backward. Spans are only ever divided, each at most as often as it has parameters.
        """
        cohort_of: dict[nn.Parameter, int] = {}
        for unit in self.sharded.units:
            newest = -1
            for flat in unit.trained:
                if flat.span.is_updated and True in flat.present and False in flat.present:
                    if newest < 0:
                        newest = max(slot.spec.cohort for each in unit.flats for slot in each.span.slots)
                    newest += 1
                    absent = [param for param, has in zip(flat.params, flat.present) if not has]
                    cohort_of.update(dict.fromkeys(absent, newest))
        if not cohort_of:
            return None
        specs = self.specs(originals)
        return [
            [replace(spec, cohort=cohort_of.get(param, spec.cohort)) for spec, param in zip(unit_specs, group.params)]
            for unit_specs, group in zip(specs, self._drafter.groups)
        ]

    def recut(
        self,
        specs: list[list[ParamSpec]],
        binding: Binding | None,
        placements: Sequence[Placement],
    ) -> None:
        """Other spans for the same parameters, their gradients and optimizer state; one unit after another. A collective."""
        self._placements = placements
        before = [[self._spec(param) for param in group.params] for group in self._drafter.groups]
        self.sharded.layout = self.lay_out(specs)
        kept = self._kept()
        for number, unit_specs in enumerate(specs):
            layout, unit = self.sharded.layout.units[number], self.sharded.units[number]
            if unit_specs == before[number] and all(
                flat.rests_as(self._placements[span.index]) for flat, span in zip(unit.flats, layout.spans)
            ):
                unit.layout = layout
                for flat, span in zip(unit.flats, layout.spans):
                    flat.span = span
                continue
            old = [flat for flat in unit.flats if flat not in kept.values()]
            grads = self._take_grads(old)
            state = binding.take(old) if binding is not None else {}
            self._restore(old, in_own_type=False)
            for flat in old:
                flat.drop()
            self.sharded.units[number] = unit = self._build(number, unit_specs, kept)
            if binding is not None:
                binding.put([flat for flat in unit.trained if flat.span.spec.group >= 0], state)
            self._put_grads(unit.trained, grads)

    def _take_grads(self, flats: Sequence[Flat]) -> dict[nn.Parameter, torch.Tensor]:
        """The reduced gradients of these spans' parameters, whole, on every rank, of those that have one. A collective."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        for flat in flats:
            if not flat.span.trainable or True not in flat.present:
                continue
            whole = self._whole(flat, partial(flat.grad, flat.device))
            for slot, param, has in zip(flat.span.slots, flat.params, flat.present):
                if has:
                    found[param] = whole[slot.offset : slot.stop].clone()
        return found

    @staticmethod
    def _put_grads(flats: Sequence[Flat], grads: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for flat in flats:
            present = [param in grads for param in flat.params]
            if True not in present:
                continue
            mine = slice_of(flat, [grads.get(param) for param in flat.params], flat.master_dtype, flat.device)
            flat.add_reduced(mine)
            flat.arrived = flat.present = present

    def _kept(self) -> dict[int, Flat]:
        """By the index of a new span: what holds its values now and goes on to, with nothing moved. A collective."""
        if self.sharded.policy.keep_full:
            return {}
        found = {
            span.index: flat
            for unit, layout in zip(self.sharded.units, self.sharded.layout.units)
            for flat in unit.flats
            for span in layout.spans
            if flat.serves(span, self._placements[span.index])
        }
        everyone = self.sharded.wire.exchange(set(found))  # what one rank has moved elsewhere all ranks build anew
        return {index: found[index] for index in set(found).intersection(*everyone)}

    def check(self) -> None:
        """Before a step, with all units at rest.

        Raises:
            StateError: a parameter was written while it was released.
            LayoutError: one was frozen or unfrozen since the spans were cut.
        """
        if not self.sharded.policy.keep_full and self.sharded.device.type != "cpu":  # on CPU every gather looks
            intact = torch.stack([flat.guards.intact() for flat in self.sharded.flats])
            if not bool(intact.all()):
                for unit in self.sharded.units:
                    for flat in unit.flats:
                        flat.guards.check(unit.name)
        for flat in self.sharded.flats:
            trainable = flat.span.trainable
            for index, param in enumerate(flat.params):
                if param.requires_grad is trainable:
                    continue
                raise LayoutError(
                    f"requires_grad of {flat.span.slots[index].spec.name!r} was {trainable} when the model was sharded and "
                    f"is {not trainable} now: freeze or unfreeze, then call engine.bind(optimizer) with an optimizer built anew"
                )

    def regather(self) -> None:
        """After a step: whole again, where the stage keeps that, and nothing on its way in. A collective there."""
        if self.sharded.policy.keep_full:
            for unit in self.sharded.units:
                unit.gather()
        for unit in self.sharded.units:
            if unit.state is State.GATHERING:
                unit.wait()

    def dissolve(self) -> None:
        """Every parameter whole and plain again, in its own type; a collective."""
        self._restore(self.sharded.flats, in_own_type=True)
        for param in self.sharded.names:
            release(param)

    def whole_values(self, params: Container[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Whole values of some parameters in their own types, new tensors on every rank, span by span. A collective."""
        for flat in self.sharded.flats:
            if any(param in params for param in flat.params):
                whole = self._whole(flat, flat.values)
                for slot, param in zip(flat.span.slots, flat.params):
                    if param in params:
                        value = whole[slot.offset : slot.stop].view(slot.spec.shape)
                        yield param, value.to(dtype_of(slot.spec.dtype), copy=True)

    def _restore(self, flats: Sequence[Flat], in_own_type: bool) -> None:
        for flat in flats:
            whole = self._whole(flat, flat.values)
            for slot, param in zip(flat.span.slots, flat.params):
                value = whole[slot.offset : slot.stop].view(slot.spec.shape)
                param.data = value.to(dtype_of(slot.spec.dtype), copy=True) if in_own_type else value

    def _whole(self, flat: Flat, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        """All ranks' slices of a span, in the master dtype. A collective."""
        whole = torch.empty(flat.span.numel, dtype=flat.master_dtype, device=flat.device)
        own = read(self.sharded.wire, values, may_fail=flat.storage.uses_disk)
        if flat.span.shards > 1:
            self.sharded.wire.gather(whole, own, flat.span.index).close()
        else:
            whole.copy_(own)
        return whole


def _check_births(names: Mapping[nn.Parameter, list[str]], wire: SoloWire) -> None:
    for param, (name, *_) in names.items():
        birth = birth_of(param)
        if birth is None:
            continue
        birth.check_guard(param, name)
        if birth.wire.size not in (1, wire.size):
            raise ConfigError(
                f"this model was born under zero.Init() on {birth.wire.size} ranks and is to be sharded on {wire.size}: "
                "build it in the process group that trains it"
            )


def device_of(model: nn.Module, wanted: torch.device | None) -> torch.device:
    """Where the model computes: `wanted`, to which it comes unit by unit from host memory, or where it is.

    Raises:
        LayoutError: it is on several devices, or on the meta device.
    """
    found: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        found.setdefault(param.device, name)
    if len(found) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in found.items())
        raise LayoutError(f"all parameters must be on one device, found {places}: move the model first")
    device, name = next(iter(found.items()))
    if device.type == "meta":
        raise LayoutError(f"parameter {name!r} is on the meta device and has no values: load or initialise it first")
    if wanted is None or wanted == device:
        return device
    if device.type != "cpu":
        raise LayoutError(
            f"the model is on {device} and is to compute on {wanted}: move it there, or to host memory, first"
        )
    return wanted
