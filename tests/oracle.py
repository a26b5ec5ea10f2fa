"""The one oracle: a program trains with hf_zero and, on the same ranks, with plain data parallel; both must agree.

A program gets a `Run` and never asks which of the two it is. As the reference, `Run.shard` wraps the model in torch's
`DistributedDataParallel`; where DDP cannot run a program (it calls parts of the model, takes several forwards for one
backward, …), `reference="average"` averages gradients over the ranks before they are used.

What is compared: losses and everything the program looked at (`Run.see`), weights, buffers and optimizer state at the end.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero
from hf_zero import engine as core
from tests.comparing import compare
from tests.kit.deferred_wire import LATE, Watch
from tests.kit.transports import ROADS
from tests.models import ids, inputs, mlp, sgd
from tests.settings import EVERYDAY, Setting, covering, is_sharded, product, rarest

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

WORLD_LIMIT_S = 60.0
"""For one program under all its rows: a rank that does not answer by then is stopped, and the program fails."""


@dataclass(frozen=True)
class Refused:
    """Where a program ends in a named error, on every rank, and which.

    Attributes:
        when: the rows. On all others the program must train.
    """

    error: type[zero.ZeroError]
    match: str
    when: Callable[[Setting], bool] = lambda setting: True


@dataclass(frozen=True)
class Program:
    """A function and what it goes with.

    Attributes:
        reference: "ddp", or "average" where DDP cannot run it.
        factors: values it combines with; others are left out because of `why`.
        refused: the rows that end in a named error.
        loose: factor on the tolerances, for what amplifies rounding; say why beside it.
        exact: on one or two ranks in fp32 every value equals the reference to the bit.
        tells: rows that show what the program is about. The default run takes its row from these.
    """

    name: str
    function: Callable[[Run], None]
    reference: str = "ddp"
    factors: Mapping[str, Sequence[Any]] = field(default_factory=lambda: EVERYDAY)
    accept: Callable[[Setting], bool] = lambda setting: True
    refused: tuple[Refused, ...] = ()
    loose: float = 1.0
    exact: bool = False
    tells: Callable[[Setting], bool] = lambda setting: True

    @property
    def rows(self) -> list[Setting]:
        """Every valid row."""
        return product(self.factors, self.accept)

    @property
    def paired_rows(self) -> list[Setting]:
        """Rows with every pair of values that any row has."""
        return covering(self.rows, self.name)

    def refusal(self, setting: Setting) -> Refused | None:
        return next((each for each in self.refused if each.when(setting)), None)


PROGRAMS: dict[str, Program] = {}


@functools.cache
def default_rows() -> dict[str, list[Setting]]:
    """Return the rows of `make test` by program: one in which it trains, and one for each of its errors.

    Pairs of values are met about equally often over all programs. Only one program in four, and none in which
    ranks differ (by its name), may meet a row in which each rank has all parameters, or one of more than two ranks.
    """
    met: Counter[Any] = Counter()
    found: dict[str, list[Setting]] = {}
    for number, each in enumerate(PROGRAMS.values()):
        by_outcome: dict[Refused | None, list[Setting]] = {}
        for row in each.rows:
            by_outcome.setdefault(each.refusal(row), []).append(row)
        found[each.name] = []
        for rows in by_outcome.values():
            telling = [row for row in rows if each.tells(row)] or rows
            usual = [row for row in telling if is_sharded(row) and row.ranks == 2]
            is_usual = bool(usual) and (number % 4 > 0 or "rank" in each.name)
            found[each.name].append(rarest(usual if is_usual else telling, met))
    return found


def program(
    function: Callable[[Run], None] | None = None,
    *,
    only: Mapping[str, Sequence[Any]] | None = None,
    more: Mapping[str, Sequence[Any]] | None = None,
    accept: Callable[[Setting], bool] = lambda setting: True,
    name: str = "",
    **options: Any,
) -> Any:
    """Register a program as `<file>.<function>`.

    Args:
        only: factors with the values that it goes with, where that is fewer than `EVERYDAY`.
        more: factors with more values than `EVERYDAY` has.
        accept: rows it goes with, where no product says it.
        name: in place of the function's, which may be a `functools.partial`.
        options: fields of `Program`.
    """
    if function is None:
        return functools.partial(program, only=only, more=more, accept=accept, name=name, **options)
    module = getattr(function, "func", function).__module__
    name = f"{module.rpartition('.')[2]}.{name or function.__name__}"
    if name in PROGRAMS:
        raise ValueError(f"two programs are named {name}")
    factors = {**EVERYDAY, **(more or {}), **(only or {})}
    PROGRAMS[name] = Program(name, function, factors=factors, accept=accept, **options)
    return function


class Plain(DistributedDataParallel):
    """DDP whose attributes are the model's, so that a program reads `model.head` either way."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _autocast_everywhere(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every forward of the reference run under autocast, whichever part of the model is called."""

    def under(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return forward(*args, **kwargs)

    for module in model.modules():
        module.forward = functools.partial(under, module.forward)


@dataclass
class _Trained:
    """One model that a program trains, with what it was before."""

    model: Any
    plain: nn.Module
    optimizers: list[torch.optim.Optimizer]
    before: dict[str, Tensor]
    engine: zero.Engine | None


class Run:
    """What a program talks to.

    Attributes:
        rank, world: of this process.
        folder: one for all ranks, empty.
        seen: what the program looked at, in order; compared with the reference's.
        kept: for what a program keeps from step to step.
    """

    def __init__(self, program: Program, setting: Setting, rank: int, world: int, folder: Path, is_plain: bool) -> None:
        self.program, self.setting, self.rank, self.world, self.folder = program, setting, rank, world, folder
        self.is_plain = is_plain
        self.seen: list[tuple[str, Any]] = []
        self.trained: list[_Trained] = []
        self.kept: Any = None
        self._is_averaged = False
        self._saved: dict[str, Any] = {}
        self._watches: list[Watch] = []

    # Building -------------------------------------------------------------------------------------------------------

    def build(self, make: Callable[[], nn.Module], seed: int = 0) -> Any:
        """Return `make()`, the same on every rank; under `zero.Init` where the row says so."""
        torch.manual_seed(seed)
        tiers = {"offload_params": self.setting.params_tier, "offload_dir": str(self.folder)}
        if self.is_plain or not self.setting.deferred:
            return make()
        with zero.Init(**tiers if self.setting.params_tier != "none" else {}):
            return make()

    def shard(self, model: Any, optimizer: Any = None, **config: Any) -> Any:
        """Make a model and its optimizer (or several) data parallel; return what the program trains.

        Args:
            config: further fields of `ZeroConfig`, which the reference has no use for.
        """
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*(optimizer or ())]
        if not self.is_plain:
            settings = zero.ZeroConfig(**{**self.setting.config(str(self.folder)), **config})
            precision = self.setting.precision if self.setting.precision != "fp32" else "no"
            shard = core.shard if self.setting.alone else zero.shard
            roads = {}
            if self.setting.roads in LATE:
                self._watches.append(watch := Watch(*LATE[self.setting.roads]))
                roads = watch.given
            elif self.setting.roads:
                roads = ROADS[self.setting.roads].given
            engine = shard(model, optimizer, settings, mixed_precision=precision, **roads)
            if self.setting.roads in LATE:
                watch.watch(engine)
            self.trained.append(_Trained(model, model, optimizers, {}, engine))
            return model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if self.setting.precision != "fp32":
            _autocast_everywhere(model, AUTOCAST[self.setting.precision])
        shown = model
        if self.program.reference == "average":
            self._average_before_steps(optimizers)
        elif self.world > 1 and any(p.requires_grad for p in model.parameters()):
            shown = Plain(model, find_unused_parameters=True)
        self.trained.append(_Trained(shown, model, optimizers, before, None))
        return shown

    def _average_before_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for each in optimizers:
            each.register_step_pre_hook(lambda *_: self.sync_gradients())
            each.register_step_post_hook(lambda *_: self._forget_average())

    def bind(self, optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer], model: Any = None) -> None:
        """`engine.bind`: an optimizer joins, instead of those with one of its parameters; a list takes the place of all."""
        each = self.trained[-1] if model is None else self._of(model)
        bound = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        if each.engine is not None:
            each.engine.bind(optimizer)
            each.optimizers = [*each.engine.optimizers]
            return
        if self.program.reference == "average":
            self._average_before_steps([new for new in bound if new not in each.optimizers])
        params = {p for new in bound for group in new.param_groups for p in group["params"]}
        others = [old for old in each.optimizers if params.isdisjoint(p for g in old.param_groups for p in g["params"])]
        each.optimizers = [*others, *bound] if bound is not optimizer else bound

    def detach(self, model: Any) -> None:
        """Let the engine go. From here on every rank must train on the same rows."""
        each = self._of(model)
        if each.engine is not None:
            each.engine.detach()
            each.engine = None

    def save(self, model: Any, name: str = "saved") -> None:
        """Write a checkpoint; the reference keeps copies."""
        each = self._of(model)
        if each.engine is not None:
            each.engine.save(str(self.folder / name))
        else:
            states = [optimizer.state_dict() for optimizer in each.optimizers]
            self._saved[name] = copy.deepcopy((each.plain.state_dict(), states))

    def load(self, model: Any, name: str = "saved") -> None:
        """Load what `save` wrote, into this model or another."""
        each = self._of(model)
        if each.engine is not None:
            each.engine.load(str(self.folder / name))
            return
        weights, states = copy.deepcopy(self._saved[name])
        each.plain.load_state_dict(weights)
        for optimizer, state in zip(each.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    # Training -------------------------------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Call before gradients are read or edited: the averaging reference averages them here, once per step."""
        if not self.is_plain or self.program.reference != "average" or self._is_averaged or self.world == 1:
            return
        self._is_averaged = True
        params = [p for each in self.trained for p in each.plain.parameters()]
        has = torch.tensor([p.grad is not None for p in params], dtype=torch.int32)
        dist.all_reduce(has, dist.ReduceOp.MAX)
        for p, is_used in zip(params, has.tolist()):
            if is_used:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                grad = grad.to_dense() if grad.is_sparse else grad
                dist.all_reduce(grad := grad / self.world)
                p.grad = grad

    def _forget_average(self) -> None:
        self._is_averaged = False

    def forget_gradients(self) -> None:
        """Call after gradients were cleared without a step."""
        self._forget_average()

    def no_sync(self, model: Any, **options: Any) -> AbstractContextManager[Any]:
        """`engine.no_sync()`, or DDP's."""
        engine = self.engine_of(model)
        if engine is not None:
            return engine.no_sync(**options)
        return model.no_sync() if isinstance(model, Plain) else nullcontext()

    def clip_grad_norm_(self, model: Any, max_norm: float, **options: Any) -> Tensor:
        """Clip; the norm is compared with the reference's. `parameters`: all, or some of the model's."""
        self.sync_gradients()
        engine = self.engine_of(model)
        if engine is not None:
            norm = engine.clip_grad_norm_(max_norm, **options)
        else:
            params = options.pop("parameters", None) or model.parameters()
            norm = nn.utils.clip_grad_norm_(params, max_norm, **options)
        self.see(norm, "gradient norm")
        return norm

    def engine_of(self, model: Any) -> zero.Engine | None:
        return next((each.engine for each in self.trained if each.model is model), None)

    def _of(self, model: Any) -> _Trained:
        return next(each for each in self.trained if each.model is model)

    def unsharded(self, model: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_plain else zero.unsharded(model, **options)

    def gathered(self, params: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_plain else zero.GatheredParameters(params, **options)

    def refuses(self, error: type[Exception], match: str, act: Callable[[], Any]) -> None:
        """Check that `act()` raises, where there is an engine; training then continues as if it had not been tried."""
        if self.is_plain:
            return
        seen = len(self.seen)
        try:
            act()
        except error as found:
            del self.seen[seen:]
            if re.search(match, str(found)):
                return
            raise AssertionError(f"{match!r} is not in: {found}") from found
        raise AssertionError(f"no {error.__name__} with {match!r}")

    # A plain loop over one MLP, of which most programs change one thing ---------------------------------------------------

    @property
    def model(self) -> Any:
        """The last model that was sharded."""
        return self.trained[-1].model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trained[-1].optimizers[0]

    def mlp(self, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, depth: int = 3) -> Any:
        return self.trained_model(lambda: mlp(depth=depth), optimizer)

    def trained_model(self, make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any] = sgd) -> Any:
        """Build a model and its optimizer, and shard them."""
        model = self.build(make)
        return self.shard(model, optimizer(model))

    def inputs(self, step: int, *shape: int) -> Tensor:
        """Features of this rank: 4 rows of 16, or `shape`."""
        return inputs(self.rank, step, *shape)

    def ids(self, step: int, rows: int = 2, length: int = 6) -> Tensor:
        """Tokens of this rank."""
        return ids(self.rank, step, rows, length)

    def loss(self, step: int) -> Tensor:
        return self.model(inputs(self.rank, step)).square().mean()

    def update(self, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none)

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.update()

    def loop(self, loss: Callable[[int], Tensor] | None = None, steps: int = 4) -> None:
        for step in range(steps):
            value = (loss or self.loss)(step)
            value.backward()
            self.see(value, "loss")
            self.update()

    # Looking --------------------------------------------------------------------------------------------------------

    def see(self, value: Any, what: str = "value") -> None:
        """Keep a value to compare: tensors and floats within the tolerance, all else exactly."""
        if isinstance(value, Tensor):
            value = value.detach().clone().to("cpu")
            value = value if value.is_complex() or not value.is_floating_point() else value.double()
        self.seen.append((what, value))

    def outcome(self) -> dict[str, Any]:
        """What training left: by model, weights with buffers, and optimizer state by parameter name."""
        found: dict[str, Any] = {"seen": self.seen}
        if self.setting.roads == "small units" and self.setting.stage == 3:
            with torch._C.DisableTorchFunctionSubclass():  # else asking for the storage gathers the values
                held = [name for name, p in self.model.named_parameters() if p.untyped_storage().nbytes()]
            assert not held, f"still gathered after the last step: {held}"
        if self.setting.alone:
            self.close()  # state dicts of the core have only local values
        for number, each in enumerate(self.trained):
            weights = each.plain.state_dict()
            found[f"weights {number}"] = {k: v.clone() for k, v in weights.items()} if self.rank == 0 else {}
            for at, optimizer in enumerate(each.optimizers):
                state = optimizer.state_dict()
                if self.rank == 0:
                    found[f"state {number} {at}"] = _flat_state(state)
            if self.is_plain:
                found[f"before {number}"] = each.before
        if self._watches:
            for watch in self._watches:
                watch.check()
            self.close()
            wrong = [line for watch in self._watches for line in watch.finish()]
            assert not wrong, "\n".join(wrong)
        return found

    def close(self) -> None:
        for each in self.trained:
            if each.engine is not None:
                with contextlib.suppress(Exception):
                    each.engine.detach()


def _flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """`{"<index> exp_avg": tensor}` of `optimizer.state_dict()`, and the options of its groups."""
    found: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            found[f"{index} {key}"] = value.clone() if isinstance(value, Tensor) else value
    for number, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            found[f"group {number} {key}"] = value
    return found


# On one rank ------------------------------------------------------------------------------------------------------------


def train(program: Program, setting: Setting, rank: int, world: int, folder: str, is_plain: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    Path(folder).mkdir(parents=True, exist_ok=True)
    run = Run(program, setting, rank, world, Path(folder), is_plain)
    try:
        program.function(run)
        return run.outcome()
    finally:
        run.close()


def on_rank(rank: int, world: int, name: str, rows: Sequence[Setting], folder: str) -> dict[str, list[str]]:
    """Run a program under rows of one number of ranks. Return what is wrong, by row; ranks run the same rows in order."""
    from tests.programs import PROGRAMS as known

    chosen = known[name]
    found: dict[str, list[str]] = {}
    references: dict[str, dict[str, Any]] = {}
    for number, setting in enumerate(rows):
        where = f"{folder}/{number}"
        progress(folder, rank, f"{setting}")
        refused = chosen.refusal(setting)
        if refused is not None:
            found[str(setting)] = _refusal(chosen, setting, refused, rank, world, where)
            continue
        if setting.precision not in references:
            progress(folder, rank, f"reference in {setting.precision}")
            plain = Setting(ranks=setting.ranks, precision=setting.precision)
            references[setting.precision] = train(chosen, plain, rank, world, f"{where}-plain", True)
            progress(folder, rank, f"{setting}")
        try:
            ours = train(chosen, setting, rank, world, where, False)
        except Exception as error:
            # Later rows would start on ranks that are no longer in step: the rows so far are reported, and this one.
            raise RowFailed(f"{setting}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from None
        found[str(setting)] = compare(chosen, setting, ours, references[setting.precision])
    return found


class RowFailed(AssertionError):
    """A row raised where it was to train."""


def _refusal(program: Program, setting: Setting, refused: Refused, rank: int, world: int, folder: str) -> list[str]:
    try:
        train(program, setting, rank, world, folder, False)
    except refused.error as error:
        return [] if re.search(refused.match, str(error)) else [f"{type(error).__name__} says {error}"]
    return [f"was to end in {refused.error.__name__}, and trained"]


def progress(folder: str, rank: int, text: str) -> None:
    """Where this rank is, for the failure text of a rank that never answers."""
    Path(folder, f"rank{rank}").write_text(text)


@contextlib.contextmanager
def fresh_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="program_") as folder:
        yield folder
