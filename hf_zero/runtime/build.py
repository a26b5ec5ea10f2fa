"""A model's parameters put into units, cut anew when the optimizer's groups ask for it, and given back whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..comm.agree import read, same_structure
from ..core.layout import Layout, ParamSpec, Span
from ..core.precision import Precision, dtype_name, dtype_of
from ..errors import ConfigError, LayoutError
from ..plan.costs import Placement
from ..plan.machine import Machine, here
from ..plan.plan import Drafter, Plan
from ..plan.solve import PlanInputs
from .optimizers.optimizer import Binding, originals_of, state_tensors
from .optimizers.supported_optimizers import counted, needs_wholes, state_bytes, step_cost
from .optimizers.whole_optimizer import WholeBinding
from .values.deferred import birth_of
from .values.deferred_spans import check_alike, check_ready
from .values.flat_param import Flat, slice_of
from .values.ownership import adopt, release
from .values.reads import AsTheyAre
from .values.sharded import Place, Sharded
from .values.unit import State, Unit

Groups = list[list[nn.Parameter]]
"""An optimizer's groups, as the model's parameters."""


class Assembly:
    """The units of one model, and which parameter is where.

    Args:
        machine: measured speeds, for every plan.
        mixed_precision: as the ranks compare it.

    Attributes:
        sharded: the model, and what is built.
        owned: by number, optimizers that step over parameters whole.
        counted: by optimizer: what a step changes besides parameters' states, where these may be offloaded.

    Raises:
        ConfigError: the model was born on another number of ranks.
    """

    def __init__(
        self,
        sharded: Sharded,
        drafter: Drafter,
        planner: Callable[[PlanInputs], Plan],
        machine: Machine,
        mixed_precision: str | None,
    ) -> None:
        self.sharded = sharded
        self._machine, self._mixed_precision = machine, mixed_precision
        self._placements: Sequence[Placement] = ()
        self._drafter, self._planner = drafter, planner
        self._params: list[nn.Parameter] = []
        self._flags: list[bool] = []
        """Which of `_params`, all there are in the spans' order, were trained at the last look."""
        self.owned: dict[int, torch.optim.Optimizer] = {}
        self._costs: dict[tuple[object, ...], tuple[int, ...]] = {}
        """By optimizer, and what of a parameter matters: the bytes of its state."""
        self.counted: list[frozenset[str]] = []
        self._frozen: list[Flat] = []
        """Spans that have no place for a gradient."""
        check_ready(sharded.names, sharded.wire)

    def local_values(self) -> Iterator[tuple[str, Tensor]]:
        """What of each parameter could differ from other ranks': not one that the ranks were given parts of at birth."""
        for param, (name, *_) in self.sharded.names.items():
            birth = birth_of(param)
            if birth is None:
                yield name, param.detach()
            elif birth.wire.size == 1:
                yield name, birth.slice_of(param) if birth.is_open else birth.values()

    def specs(self, originals: Sequence[Groups]) -> list[list[ParamSpec]]:
        """By unit, for optimizers with these parameters in their groups; types stay what they were when first cut."""
        group_of = {p: group for groups in originals for group, params in enumerate(groups) for p in params}
        optimizer_of = {p: number for number, groups in enumerate(originals) for params in groups for p in params}
        old = {param: self._spec(param) for param in self.sharded.places}
        specs = [[self._owned(spec) for spec in mine] for mine in self._drafter.specs(group_of, old, optimizer_of)]
        if not old:
            return specs
        # What is unfrozen begins with no optimizer state: not in one span with what has made steps.
        fresh = {param for param, spec in old.items() if param.requires_grad and not spec.trainable}
        return [self._apart(mine, number, fresh) for number, mine in enumerate(specs)] if fresh else specs

    def agree(self, specs: list[list[ParamSpec]], originals: Sequence[Groups]) -> None:
        """A collective. RankMismatchError, on every rank: they have other settings, parameters or groups than each other."""
        sharded = self.sharded
        same_structure(sharded.wire, sharded.config, self._mixed_precision, specs, originals, sharded.names)
        check_alike(sharded.names, sharded.wire)

    def _owned(self, spec: ParamSpec) -> ParamSpec:
        """With what a step over the parameter costs, and its state takes, where its optimizer must have it whole."""
        optimizer = self.owned.get(spec.optimizer) if spec.trainable and spec.group >= 0 else None
        if optimizer is None:
            return spec
        key = optimizer, spec.group, spec.shape, spec.master_dtype
        if key not in self._costs:
            self._costs[key] = state_bytes(optimizer, spec.group, spec.shape, dtype_of(spec.master_dtype))
        return replace(spec, step_cost=step_cost(optimizer, spec.shape), state_bytes=self._costs[key])

    def _apart(self, specs: list[ParamSpec], number: int, params: Container[nn.Parameter]) -> list[ParamSpec]:
        """Of one unit, with these parameters in a cohort of their own."""
        newest = 1 + max((spec.cohort for spec in specs), default=0)
        pairs = zip(specs, self._drafter.groups[number].params)
        return [replace(spec, cohort=newest) if param in params else spec for spec, param in pairs]

    def _spec(self, param: nn.Parameter) -> ParamSpec:
        return self.sharded.places[param].slot.spec

    def cuts_otherwise(self, specs: list[list[ParamSpec]]) -> bool:
        """Whether these specs make other spans than there are now."""
        now = [[self._spec(param).key for param in group.params] for group in self._drafter.groups]
        return [[spec.key for spec in unit] for unit in specs] != now

    def moved_by(self, specs: list[list[ParamSpec]]) -> list[nn.Parameter]:
        """Parameters of units of which these specs make other spans."""
        pairs = zip(self._drafter.groups, specs)
        return [p for group, mine in pairs if [self._spec(p) for p in group.params] != mine for p in group.params]

    def hosts(self) -> Iterator[tuple[Unit, list[nn.Module]]]:
        return ((unit, group.hosts) for unit, group in zip(self.sharded.units, self._drafter.groups))

    def lay_out(self, specs: list[list[ParamSpec]]) -> Layout:
        """The layout that these specs make; nothing changes."""
        wire = self.sharded.wire
        return self._drafter.layout(specs, self.sharded.layout.shards).seen_from((wire.shard_group or wire).rank)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Around `kinds_of_binding` and what may refuse an optimizer, on any rank: owners stay what they were then."""
        before = self.owned, self.counted
        try:
            yield
        except BaseException:
            self.owned, self.counted = before
            raise

    def kinds_of_binding(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[type[Binding]]:
        """Of each: over slices or over whole matrices; `specs` are for these from now on.

        Raises:
            UnsupportedOptimizerError: one can have neither.
            ConfigError: there are several, and units are updated before the program says which of them steps.
        """
        sharded = self.sharded
        if len(optimizers) > 1 and sharded.config.step_in_backward:
            raise ConfigError(
                f"step_in_backward updates parameters in backward, before the program says which of {len(optimizers)} "
                "optimizers steps: turn it off, or build one optimizer with several groups"
            )
        cuts = sharded.layout.shards > 1
        offloaded = sharded.config.offload_optimizer != "none"
        wholes = [needs_wholes(each, sharded.names, cut=cuts, offloaded=offloaded) for each in optimizers]
        self.counted = [counted(each) if offloaded else frozenset() for each in optimizers]
        self.owned = {number: each for number, (each, is_) in enumerate(zip(optimizers, wholes)) if is_}
        self._costs = {}
        return [WholeBinding if is_ else Binding for is_ in wholes]

    def originals(self, optimizers: Sequence[torch.optim.Optimizer], bound: Sequence[Binding]) -> list[Groups]:
        return originals_of(optimizers, {param: names[0] for param, names in self.sharded.names.items()}, bound)

    def plan(self, specs: list[list[ParamSpec]], optimizers: Sequence[torch.optim.Optimizer], ranks_here: int) -> Plan:
        """The plan for these specs; nothing changes. A collective under `auto`, and once there are units.

        Args:
            ranks_here: processes on this machine, which share its memory. Under `auto`, what is free is looked up now, on every
                rank; speeds are those that were measured.
        """
        sharded, machine = self.sharded, Machine()
        if sharded.config.is_auto:
            with AsTheyAre():
                held = sum(p.untyped_storage().nbytes() for p in sharded.names if p.device == sharded.device)
            free = here(sharded.device, ranks=ranks_here, offload_dir=sharded.config.offload_dir, held_bytes=held)
            found: list[Machine] = sharded.wire.exchange(free.with_speeds_of(self._machine))
            machine = Machine.least(found)
        inputs = PlanInputs(
            self.lay_out(specs),
            machine,
            sharded.config,
            sharded.wire.size,
            sharded.precision,
            state_tensors(optimizers),
            in_files=self._in_files(),
            sizes=sharded.storage.sizes,
            node_ranks=1 if sharded.wire.node is None else sharded.wire.node.size,
        )
        return self._planner(inputs)

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

    def build(self, specs: list[list[ParamSpec]], placements: Sequence[Placement]) -> None:
        """All units, one after another, from the parameters' values, whole or born; these are the engine's from here on.

        Args:
            placements: by span.
        """
        self._placements = placements
        self.sharded.layout = self.lay_out(specs)
        for number, unit_specs in enumerate(specs):
            self.sharded.units.append(self._build(number, unit_specs, {}))
        self._note_flags()

    def _note_flags(self) -> None:
        self._params = [param for flat in self.sharded.flats for param in flat.params]
        self._flags = [param.requires_grad for param in self._params]
        self._frozen = [flat for flat in self.sharded.flats if not flat.span.trainable]

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
            flats.append(Flat(span, params, self.sharded, self._placements[span.index]))
        unit = Unit(layout, flats, self.sharded.wire, self.sharded.policy)
        unit.release()
        for flat in flats:
            self.sharded.wire.watch.units[flat.span.index] = unit.name
            for index, param in enumerate(flat.params):
                self.sharded.places[param] = Place(unit, flat, index)
                adopt(param, weakref.ref(self.sharded), shows_nan=not unit.policy.keep_full)
        return unit

    def parted(self, originals: Sequence[Groups]) -> list[list[ParamSpec]] | None:
        """Specs that put parameters without a gradient in spans of their own; None where no span has both kinds.

        The same on every rank, after a backward. Spans are only ever divided, each at most as often as it has parameters.
        """
        absent = [
            [
                {param for param, has in zip(flat.params, flat.present) if not has}
                for flat in unit.trained
                if flat.span.is_updated and flat.wholes is None and True in flat.present and False in flat.present
            ]
            for unit in self.sharded.units
        ]
        if not any(absent):
            return None
        specs = self.specs(originals)
        for number, parts in enumerate(absent):
            for params in parts:
                specs[number] = self._apart(specs[number], number, params)
        return specs

    def arranged(self, originals: Sequence[Groups], marks: Mapping[str, str]) -> list[list[ParamSpec]] | None:
        """Specs for optimizer state that comes from elsewhere; None where there is room for it as it is.

        Parameters of one span have made the same steps. A frozen one that has state gets a place for it.

        Args:
            marks: by parameter that has state and shares a span with others, what of the state is one value for the
                parameter (`step`), as text.
        """
        specs = self.specs(originals)
        before = [list(mine) for mine in specs]
        for number, (mine, group) in enumerate(zip(before, self._drafter.groups)):
            specs[number] = [
                replace(spec, trainable=True, master_dtype=dtype_name(Precision.trained_as(dtype_of(spec.dtype))))
                if spec.group >= 0 and spec.name in marks and not spec.trainable
                else spec
                for spec in mine
            ]
            seen: dict[tuple[object, ...], dict[str | None, set[nn.Parameter]]] = {}
            for param, spec in zip(group.params, specs[number]):
                if spec.group >= 0 and spec.trainable:
                    seen.setdefault(spec.key, {}).setdefault(marks.get(spec.name), set()).add(param)
            for parts in seen.values():
                for params in [*parts.values()][1:]:
                    specs[number] = self._apart(specs[number], number, params)
        return specs if specs != before else None

    def recut(
        self,
        specs: list[list[ParamSpec]],
        bindings: Sequence[Binding],
        placements: Sequence[Placement],
    ) -> None:
        """Other spans for the same parameters, their gradients and optimizer state; one unit after another. A collective."""
        self._placements = placements
        before = [[self._spec(param) for param in group.params] for group in self._drafter.groups]
        self.sharded.layout = self.lay_out(specs)
        kept = self._kept()
        goes_on = set(kept.values())
        for number, unit_specs in enumerate(specs):
            layout, unit = self.sharded.layout.units[number], self.sharded.units[number]
            if unit_specs == before[number] and all(
                flat.rests_as(self._placements[span.index]) and _same_owners(flat.span, span)
                for flat, span in zip(unit.flats, layout.spans)
            ):
                unit.layout = layout
                for flat, span in zip(unit.flats, layout.spans):
                    flat.span = span
                continue
            old = [flat for flat in unit.flats if flat not in goes_on]
            # One unit after another, and its old memory goes before the new is there: the peak is the model and one unit.
            # What a unit has is taken before `drop`, after which its masters are empty.
            grads = self._take_grads(old)
            states = [binding.take(old) for binding in bindings]
            for flat in old:
                for index, value in enumerate(flat.cut_up(self._whole(flat, flat.values))):
                    flat.show(index, value)
            for flat in old:
                flat.drop()
            self.sharded.units[number] = unit = self._build(number, unit_specs, kept)
            for binding, state in zip(bindings, states):
                binding.put([flat for flat in unit.trained if binding.has(flat)], state)
            self._put_grads(unit.trained, grads)
        self._note_flags()

    def _take_grads(self, flats: Sequence[Flat]) -> dict[nn.Parameter, torch.Tensor]:
        """The reduced gradients of these spans' parameters, whole, on every rank, of those that have one. A collective."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        for flat in flats:
            if not flat.span.trainable or True not in flat.present:
                continue
            whole = self._whole(flat, flat.grad)
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
            LayoutError: a frozen one has a gradient of this rank's alone, from a backward of a part of the model.
        """
        for flat in self._frozen:
            for index, param in enumerate(flat.params):
                if param.grad is not None:
                    raise LayoutError(
                        f"{flat.span.slots[index].spec.name!r} was unfrozen, and a backward has come before a forward of the "
                        "whole model: its gradient is this rank's alone. Call the model itself after a change of requires_grad"
                    )

    def look_at_flags(self) -> bool:
        """Before a forward: whether parameters were frozen or unfrozen since the last look. Without communication.

        Raises:
            LayoutError: frozen under `step_in_backward`, which steps over whole spans as their gradients come.
        """
        before = self._flags
        with AsTheyAre():
            self._flags = now = [param.requires_grad for param in self._params]
        if now == before:
            return False
        if self.sharded.config.step_in_backward:
            slots = [(flat, slot) for flat in self.sharded.flats for slot in flat.span.slots]
            for (flat, slot), trains in zip(slots, now):
                if flat.span.trainable and not trains:
                    self._flags = before
                    raise LayoutError(
                        f"{slot.spec.name!r} was frozen in the middle of training, which step_in_backward cannot honour: it "
                        "updates all parameters that lie together. Freeze before the model is sharded, or turn it off"
                    )
        return True

    @property
    def has_unfrozen(self) -> bool:
        """A parameter is trained that has no place for a gradient: units must be cut anew."""
        return any(param.requires_grad for flat in self._frozen for param in flat.params)

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
        for param, value in self.whole_values(self.sharded.places):
            _, flat, index = self.sharded.places[param]
            flat.show(index, value)
        for param in self.sharded.names:
            release(param)

    def whole_values(self, params: Container[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Whole values of some parameters in their own types, new tensors on every rank, span by span. A collective."""
        for flat in self.sharded.flats:
            if any(param in params for param in flat.params):
                whole = self._whole(flat, flat.values)
                for slot, param, value in zip(flat.span.slots, flat.params, flat.cut_up(whole)):
                    if param in params:
                        yield param, value.to(dtype_of(slot.spec.dtype), copy=True)

    def _whole(self, flat: Flat, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        """All ranks' slices of a span, in the master dtype. A collective."""
        whole = torch.empty(flat.span.numel, dtype=flat.master_dtype, device=flat.device)
        own = read(self.sharded.wire, values, may_fail=flat.storage.uses_disk)
        if flat.span.shards > 1:
            self.sharded.wire.gather(whole, own, flat.span.index, flat.span.cuts).close()
        else:
            whole.copy_(own)
        return whole


def _same_owners(old: Span, new: Span) -> bool:
    """Of equal specs: whether each element has the same owner. Parameters with one owner are dealt over the whole model."""
    return old.cuts == new.cuts and (not new.cuts or [s.offset for s in old.slots] == [s.offset for s in new.slots])


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
    if wanted is None or wanted == device or wanted.type == device.type == "cpu":  # cpu:0 is cpu, except to torch
        return device
    if device.type != "cpu":
        raise LayoutError(
            f"the model is on {device} and is to compute on {wanted}: move it there, or to host memory, first"
        )
    return wanted
