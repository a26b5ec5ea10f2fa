"""The optimizers that are bound to one sharded model: replaced, given groups; spans are cut anew for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..comm import agree
from ..core.layout import ParamSpec
from ..errors import LayoutError, RankMismatchError, StateError
from .build import Assembly, Groups
from .gradient_ops import Gradients
from .group_flags import GroupFlags
from .moves import Monitor
from .offload import Offload
from .optimizers.optimizer import Binding, take_state
from .optimizers.state_pieces import OptimizerPieces
from .optimizers.transaction import HeldSignals
from .optimizers.whole_optimizer import WholeBinding
from .passes.schedule import Schedule
from .values.sharded import Sharded
from .values.writes import WriteWatch


class BoundOptimizers:
    """Of one sharded model, whose units are built and whose hooks are on.

    Args:
        held: signals wait while spans are cut anew.
        quiesce: nothing is gathered and nothing on the move afterwards; a collective.
        flush: reduces what `no_sync` left; a collective.
        take_methods: takes over the methods of an optimizer that is bound for the first time.

    Attributes:
        bindings: how the optimizers are bound, in the order of `Sharded.optimizers`.
    """

    def __init__(
        self,
        sharded: Sharded,
        assembly: Assembly,
        offload: Offload,
        schedule: Schedule,
        writes: WriteWatch,
        gradients: Gradients,
        group_flags: GroupFlags,
        *,
        held: HeldSignals,
        quiesce: Callable[[], None],
        flush: Callable[[], None],
        take_methods: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._sharded, self._config, self._wire = sharded, sharded.config, sharded.wire
        self._assembly, self._offload, self._schedule = assembly, offload, schedule
        self._writes, self._gradients, self._group_flags = writes, gradients, group_flags
        self._held, self._quiesce, self._flush, self._take_methods = held, quiesce, flush, take_methods
        self._taken: set[torch.optim.Optimizer] = set()  # whose methods are ours
        self.settle_states = offload.finish_before_a_look if sharded.config.offloads else None
        self.bindings: list[Binding] = []

    def bind(self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """See `Engine.bind`. A collective."""
        wanted = self._wanted(optimizers)
        bound = [binding.optimizer for binding in self.bindings]
        if bound == wanted and all(binding.is_current() for binding in self.bindings):
            return
        self._sharded.refuse_unsharded("Engine.bind")
        with self._assembly.tried():
            with agree.on_all_ranks(self._wire, "Engine.bind", kind=RankMismatchError):
                kinds = self._assembly.kinds_of_binding(wanted)
                for optimizer, kind in zip(wanted, kinds):
                    binding = self.binding_of(optimizer)
                    if binding is not None and type(binding) is not kind:
                        raise LayoutError(
                            f"a group that was added to {type(optimizer).__name__} makes it need whole matrices where it did "
                            "not, or the other way round: build the optimizer anew with all its groups, and bind that"
                        )
                originals = self._assembly.originals(wanted, self.bindings)
                specs = self._assembly.specs(originals)
            self._assembly.agree(specs, originals)
        self._quiesce()
        cuts_otherwise = self._assembly.cuts_otherwise(specs)
        if cuts_otherwise and any(flat.is_reduced for flat in self._sharded.trained):
            raise LayoutError("an optimizer's groups may change only between steps: call zero_grad() first")
        kept = []
        for binding in self.bindings:
            if binding.optimizer in wanted:
                binding.index = wanted.index(binding.optimizer)
                kept.append(binding)
            else:
                binding.forget()
        if cuts_otherwise:
            self._recut(specs, wanted, kept)
        self.take(wanted, originals, kinds)

    def _wanted(
        self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """All that are to be bound. One alone joins those that are, in the place of those that have parameters of its."""
        if not isinstance(optimizers, torch.optim.Optimizer):
            return list(optimizers)
        bound = [binding.optimizer for binding in self.bindings]
        if any(each is optimizers for each in bound):
            return bound
        given = {param for group in optimizers.param_groups for param in group["params"]}
        places = [
            index
            for index, binding in enumerate(self.bindings)
            if any(param in given for params in binding.current_originals() for param in params)
        ]
        if not places:
            return [*bound, optimizers]
        return [optimizers if i == places[0] else each for i, each in enumerate(bound) if i not in places[1:]]

    def binding_of(self, optimizer: torch.optim.Optimizer) -> Binding | None:
        for binding in self.bindings:
            if binding.optimizer is optimizer:
                return binding
        return None

    def _recut(
        self,
        specs: list[list[ParamSpec]],
        optimizers: Sequence[torch.optim.Optimizer],
        bindings: Sequence[Binding],
    ) -> None:
        self._group_flags.refuse_cut(self._assembly.moved_by(specs))
        # New spans are filled from the masters: what was written to parameters, frozen ones too, must be there before.
        self._writes.settle()
        self._sharded.plan = self._assembly.plan(specs, optimizers, self._offload.ranks_here)
        self._assembly.recut(specs, bindings, self._sharded.plan.placements)
        self._schedule.recut(self._sharded.units)
        self._writes.restart()

    def part_spans(self) -> None:
        """Before a step: parameters without a gradient leave the spans of those that have one, and are left alone."""
        if self._config.step_in_backward or not any(binding.one_gradient for binding in self.bindings):
            return
        specs = self._assembly.parted(self._originals)
        if specs is not None:
            self._cut_anew(specs)

    def unfreeze(self) -> None:
        """Parameters were frozen or unfrozen. Frozen ones keep their place and their state, and get no gradient; the first time
        that one is unfrozen, it gets a place for its gradient and state: a collective, so on every rank in the same step."""
        if not self._assembly.has_unfrozen:
            return
        originals = self._originals
        specs = self._assembly.specs(originals)
        self._assembly.agree(specs, originals)
        self._flush()
        self._quiesce()
        self._cut_anew(specs)

    def _cut_anew(self, specs: list[list[ParamSpec]]) -> None:
        """Between passes: the same optimizers over other spans. A collective."""
        bindings = self.bindings
        with self._held:  # there is no way back half way
            optimizers = [binding.optimizer for binding in bindings]
            self._recut(specs, optimizers, bindings)
            self.take(optimizers, self._originals, [type(binding) for binding in bindings])
            self._gradients.show()

    @property
    def _originals(self) -> list[Groups]:
        return [binding.originals for binding in self.bindings]

    def make_room(self, marks: Mapping[str, str]) -> None:
        """Before optimizer state is loaded, on every rank with the same `marks`: by parameter, what of its state is one value.
        See `Assembly.arranged`. A collective then."""
        if self._config.step_in_backward:
            return
        sharing = {p for each in self.bindings if each.one_gradient for params in each.originals for p in params}
        names = {self._sharded.names[param][0] for param in sharing}
        marks = {name: mark for name, mark in marks.items() if name in names}
        specs = self._assembly.arranged(self._originals, marks) if marks else None
        if specs is not None:
            self._quiesce()
            self._cut_anew(specs)

    def take(
        self, optimizers: Sequence[torch.optim.Optimizer], originals: Sequence[Groups], kinds: Sequence[type[Binding]]
    ) -> None:
        """Bind these, whose spans are cut. A collective."""
        states = [take_state(optimizer, groups) for optimizer, groups in zip(optimizers, originals)]
        for state in states:
            agree.same_answer(
                self._wire, state is not None, "whether the optimizer has state (has made steps) when it is bound"
            )
        self.bindings = []
        self._sharded.optimizers = list(optimizers)
        for index, (optimizer, groups, kind, state) in enumerate(zip(optimizers, originals, kinds, states)):
            binding = kind(optimizer, self._sharded.units, self._wire, groups, index)
            self.bindings.append(binding)
            binding.keep_states(self.settle_states)
            if state is not None:
                binding.load_state_dict(state)
            if optimizer not in self._taken:
                self._taken.add(optimizer)
                self._take_methods(optimizer)
        self._writes.count_references()
        self._group_flags.set_out()
        if self._config.offloads:
            over_wholes = [binding for binding in self.bindings if isinstance(binding, WholeBinding)]
            self._offload.counted = {index: self._assembly.counted[index] for index in range(len(optimizers))}
            self._offload.over_wholes = {binding.index: binding.steps_without_gradient for binding in over_wholes}
        if self._config.is_auto:
            free = partial(self._offload.free_host_bytes, self._offload.ranks_here)
            self._offload.monitor = Monitor(self._sharded, free)

    def bound(self, optimizer: torch.optim.Optimizer, what: str) -> Binding:
        """Raises:
        StateError: another optimizer has taken its place.
        """
        binding = self.binding_of(optimizer)
        if binding is None:
            raise StateError(
                f"{type(optimizer).__name__}.{what}: another optimizer was bound in its place, and it has no parameters of "
                "this model any more: use that one, or call engine.bind(optimizer)"
            )
        return binding

    def current(self, optimizer: torch.optim.Optimizer, what: str) -> Binding:
        """As `bound`, over the groups as they are now. A collective where they were changed.

        Raises:
            StateError: another optimizer has taken its place.
            LayoutError: they were changed while there are gradients.
        """
        if not self.bound(optimizer, what).is_current():
            self.bind(optimizer)
        return self.bound(optimizer, what)

    def pieces_of(self, optimizer: torch.optim.Optimizer) -> OptimizerPieces:
        """See `Engine.optimizer_state`. A collective where its groups were changed."""
        binding = self.current(optimizer, "state")
        return binding.pieces({param: names[0] for param, names in self._sharded.names.items()})

    def pieces(self) -> list[OptimizerPieces]:
        return [self.pieces_of(optimizer) for optimizer in list(self._sharded.optimizers)]

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        binding = self.current(optimizer, "state_dict()")
        self._quiesce()
        return binding.state_dict()

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        binding = self.current(optimizer, "load_state_dict()")
        self._quiesce()
        if not binding.one_gradient:  # torch's own method takes it, and runs the program's hooks
            binding.load_state_dict(state_dict)
            return
        state_dict = state_dict.copy()  # as torch does: a hook may change it
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = before(optimizer, state_dict)
            state_dict = state_dict if changed is None else changed
        what = "the optimizer's load_state_dict()"
        with agree.on_all_ranks(self._wire, what, kind=RankMismatchError) as report:
            report.mine = binding.marks(state_dict, self._sharded.names)
        self.make_room(report.everyone[0])
        self._quiesce()
        self.bound(optimizer, "load_state_dict()").load_state_dict(state_dict)  # spans may have been cut anew
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)
