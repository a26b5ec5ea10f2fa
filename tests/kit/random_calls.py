"""What users do with a model: one rank's loop, and each kind of call as a small program.

A program is a generator. It stops where ranks meet, so that plain replicas in one process can be moved along together; with
an engine it simply runs (`own`). Whatever an engine has of its own (`clip_grad_norm_`, `save`) has its plain counterpart beside
it. Details of a call come from the call's seed, the same on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.random_models import (
    TOKENS,
    VOCAB,
    Arch,
    Net,
    Planned,
    Tape,
    features_of,
    has_statistics,
    unwrap,
)

# Cases ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    stage: int = 2
    ranks: int = 2
    dtype: str = "no"
    offload_optimizer: str = "none"
    offload_params: str = "none"
    optimizer: str = "momentum"
    groups: int = 1
    replicas: int = 1
    left_out: bool = False
    """The last head comes into the optimizer later, if at all."""
    born: bool = False
    """The model is made under `zero.Init`."""
    debug: bool = False


@dataclass(frozen=True)
class Op:
    """One user call; what it does in detail comes from its own seed."""

    kind: str
    seed: int


@dataclass(frozen=True)
class Case:
    seed: int
    setting: Setting
    arch: Arch
    ops: tuple[Op, ...]

    @property
    def kinds(self) -> set[str]:
        return {op.kind for op in self.ops} | features_of(self.arch)


# Users ------------------------------------------------------------------------------------------------------------------


class Lars(torch.optim.Optimizer):
    """You et al. 2017: the rate of each parameter from its norms, with momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.05})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    rate = group["lr"] * (p.norm() + 0.1) / (p.grad.norm() + group["weight_decay"] * p.norm() + 0.1)
                    momentum.mul_(0.9).add_(p.grad + group["weight_decay"] * p)
                    p.sub_(rate * momentum)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Adam divides by the root of squared gradients: with its usual eps, rounding in a gradient that should be 0 (the bias of
    # attention's keys) becomes a full step. Here eps is of the size of gradients, so that rounding stays rounding.
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.05),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=0.03, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, eps=0.03, momentum=0.5),
}
MORE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.02, eps=0.03, amsgrad=True, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=0.03, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.02, eps=0.03, decoupled_weight_decay=True),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.02, eps=0.03),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.02, eps=0.03),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, eps=0.03, lr_decay=0.1),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5, eps=0.03),
    "lars": Lars,
}
_TYPES = {"no": None, "bf16": torch.bfloat16}
Program = Generator[tuple[str, int, Any], Any, Any]


@dataclass
class Batch:
    x: Tensor
    ids: Tensor
    seed: int


class User:
    """One rank's loop. With an engine, or (`engine` None) a plain replica that `Plain` moves along."""

    engine: zero.Engine | None = None
    optimizer: torch.optim.Optimizer

    def __init__(
        self, case: Case, rank: int, folder: str, refused: dict[str, str] | None = None, sharded: bool = False
    ) -> None:
        self.case, self.rank, self.folder = case, rank, Path(folder)
        self.world = case.setting.ranks
        self.notes: list[tuple[str, Any]] = []
        self.refused: dict[str, str] = dict(refused or {})
        self.syncing = True
        self.due = self.is_ddp = True
        self.sent: list[dict[str, Tensor]] = []
        """By forward, rank 0's buffers; the same list for all replicas, of which rank 0's runs first."""
        self.forwards = 0
        self.frozen: set[str] = set()
        self.kept: list[Any] = []
        self.op = Op("start", 0)
        self.place = 0
        self._tries = 0
        torch.manual_seed(case.seed)
        with zero.Init(enabled=sharded and case.setting.born):
            self.model = Net(case.arch)
        self.left_out = self._left_out()
        self.has_statistics = has_statistics(self.model)

    def start(self, sharded: bool) -> None:
        self.optimizer = self.new_optimizer()
        if sharded:
            self.shard()

    def shard(self) -> None:
        s = self.case.setting
        config = zero.ZeroConfig(
            stage=s.stage,
            offload_optimizer=s.offload_optimizer,
            offload_params=s.offload_params,
            replicas=s.replicas,
            debug=s.debug,
            offload_dir=str(self.folder / "tiers") if "disk" in (s.offload_optimizer, s.offload_params) else None,
        )
        self.engine = zero.shard(self.model, self.optimizer, config, mixed_precision=s.dtype)

    # What programs are made of

    def begin(self, place: int, op: Op) -> None:
        self.place, self.op, self._tries = place, op, 0
        self.rng = random.Random(f"{self.case.seed}/{op.seed}")

    def note(self, label: str, value: Any) -> None:
        """Something that must be equal."""
        value = value.detach().float().cpu().clone().numpy() if isinstance(value, Tensor) else numpy.array(value, "f8")
        self.notes.append((f"{self.place} {self.op.kind}: {label}", value))

    def attempt(self, body: Callable[[], Any], torch_too: bool = False) -> Program:
        """Run what may be refused by name; whether it was done. The replica does not do what was refused."""
        key = f"{self.place}.{self._tries}"
        self._tries += 1
        if self.engine is None and key in self.refused:
            return False
        try:
            result = body()
            if inspect.isgenerator(result):
                yield from result
        except zero.errors.ZeroError as error:
            self.refused[key] = f"{self.op.kind}: {type(error).__name__}: {error}"
        except RuntimeError as error:
            if not (torch_too and self.engine is not None and "single memory location" in str(error)):
                raise
            self.refused[key] = f"{self.op.kind}: torch's own words: {error}"
        return key not in self.refused or self.engine is None

    def batch(self, n: int = 0, size: int = 2, grad: bool = False) -> Batch:
        seed = hash((self.case.seed, self.op.seed, n, self.rank)) % 2**31
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, TOKENS, self.case.arch.width, generator=generator)
        ids = torch.randint(0, VOCAB, (size, TOKENS), generator=generator)
        return Batch(x.requires_grad_(grad), ids, seed)

    def autocast(self) -> Any:
        dtype = _TYPES[self.case.setting.dtype]
        return torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """A module's forward. The engine brings its own autocast."""
        with self.autocast() if self.engine is None else contextlib.nullcontext():
            return module(*args, **kwargs)

    def forward(self, batch: Batch, **options: Any) -> Tensor:
        torch.manual_seed(batch.seed)
        if self.engine is None and self.is_ddp:
            self._receive_buffers()
        out = unwrap(self.call(self.model, batch.x, batch.ids, **options))
        if self.is_ddp:
            self.due = self.syncing and torch.is_grad_enabled()
        return out

    def _receive_buffers(self) -> None:
        """As DDP: rank 0's, before a forward that follows one which was to be differentiated and synchronised."""
        place, self.forwards = self.forwards, self.forwards + 1
        buffers = dict(self.model.named_buffers())
        if self.rank == 0:
            self.sent.append({name: buffer.detach().clone() for name, buffer in buffers.items()})
        elif self.due:
            for name, buffer in buffers.items():
                buffer.data.copy_(self.sent[place][name])  # unseen by graphs that keep it

    def loss(self, output: Tensor, batch: Batch, n: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(batch.seed + 7 + n)
        target = torch.randn(output.shape, generator=generator)
        return (output.float() - target).square().sum() / 40

    def forward_loss(self, n: int = 0, size: int = 2, grad: bool = False, **options: Any) -> Tensor:
        batch = self.batch(n, size, grad)
        loss = self.loss(self.forward(batch, **options), batch)
        self.note(f"loss {n}", loss)
        return loss

    def backward(self, loss: Tensor, **options: Any) -> Program:
        loss.backward(**options)
        if self.syncing:
            yield ("average", 0, None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        try:
            with self.engine.no_sync() if self.engine is not None else contextlib.nullcontext():
                yield
        finally:
            self.syncing = True

    def step(self) -> Program:
        self.optimizer.step()
        self.clear()
        yield from ()

    def clear(self) -> None:
        self.model.zero_grad()

    def train(self, n: int = 0, **options: Any) -> Program:
        yield from self.backward(self.forward_loss(n, **options))
        yield from self.step()

    def look(self, label: str = "eval", mode: Any = torch.no_grad) -> Program:
        """A forward in eval mode."""
        self.model.eval()
        try:
            with mode():
                self.note(label, self.forward(self.batch(99)))
        finally:
            self.model.train()
        yield from ()

    def params(self, trained: bool = False) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad or not trained}

    def some_param(self, trained: bool = False) -> nn.Parameter:
        params = self.params(trained)
        return params[self.rng.choice(sorted(params))]

    def new_optimizer(self) -> torch.optim.Optimizer:
        params = {name: p for name, p in self.params(trained=True).items() if name not in self.left_out}
        groups: list[dict[str, Any]] = [{"params": [*params.values()]}]
        if self.case.setting.groups == 2:
            matrices = [p for p in params.values() if p.dim() > 1]
            others = [p for p in params.values() if p.dim() < 2]
            groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        return (OPTIMIZERS | MORE_OPTIMIZERS)[self.case.setting.optimizer](
            [group for group in groups if group["params"]]
        )

    def _left_out(self) -> list[str]:
        names = [name for name in self.params(trained=True) if name.startswith("heads.")]
        everything = len(self.params(trained=True))
        return names[-1:] if self.case.setting.left_out and everything > 2 else []


def own(program: Program) -> Any:
    """Run one rank's program with an engine: where ranks meet is the engine's matter."""
    reply = None
    while True:
        try:
            _, _, reply = program.send(reply)
        except StopIteration as end:
            return end.value


# Kinds of calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    run: Callable[[User], Program]
    fits: Callable[[Setting, Arch], bool]


KINDS: dict[str, Kind] = {}


def kind(fits: Callable[[Setting, Arch], bool] = lambda setting, arch: True) -> Callable[[Any], Any]:
    def register(run: Callable[[User], Program]) -> Callable[[User], Program]:
        KINDS[run.__name__] = Kind(run, fits)
        return run

    return register


def keeps_whole(setting: Setting, arch: Arch) -> bool:
    """Ranks may run different units only where none is gathered for a forward."""
    return setting.stage < 3 or setting.ranks == 1


def no_statistics(setting: Setting, arch: Arch) -> bool:
    return all(block.piece != "conv" for block in arch.blocks)


def no_buffers(setting: Setting, arch: Arch) -> bool:
    """Where buffers change, ranks must make the same number of forwards, as under DDP."""
    return all(block.piece not in ("conv", "counter") for block in arch.blocks)


def several_ranks_keep(setting: Setting, arch: Arch) -> bool:
    return keeps_whole(setting, arch) and setting.ranks > 1


# Loops


@kind()
def step(u: User) -> Program:
    yield from u.train()


@kind()
def accumulate(u: User) -> Program:
    micros = u.rng.choice((2, 3))
    for n in range(micros):
        with contextlib.nullcontext() if n == micros - 1 else u.no_sync():
            yield from u.backward(u.forward_loss(n) / micros)
    yield from u.step()


@kind()
def accumulate_synced(u: User) -> Program:
    """Two backwards that both travel."""
    for n in range(2):
        yield from u.backward(u.forward_loss(n) / 2)
    yield from u.step()


@kind()
def two_forwards(u: User) -> Program:
    """Contrastive: two forwards, one backward."""
    one, two = u.batch(0), u.batch(1)
    a, b = u.forward(one), u.forward(two)
    loss = u.loss(a, one) + u.loss(b, two) + (a.float() * b.float()).mean()
    u.note("loss", loss)
    yield from u.backward(loss)
    yield from u.step()


@kind()
def crossed(u: User) -> Program:
    """Two forwards, then their backwards, in either order."""
    losses = [u.forward_loss(0), u.forward_loss(1)]
    if u.rng.random() < 0.5:
        losses.reverse()
    for loss in losses:
        yield from u.backward(loss)
    yield from u.step()


@kind()
def forward_only(u: User) -> Program:
    """A forward with a graph that never gets a backward, dropped now or later."""
    loss = u.forward_loss(0)
    u.kept = [loss] if u.rng.random() < 0.5 else []
    del loss
    if u.rng.random() < 0.7:
        yield from u.train(1)


@kind()
def two_losses(u: User) -> Program:
    batch = u.batch()
    out = u.forward(batch)
    yield from u.backward(u.loss(out, batch), retain_graph=True)
    yield from u.backward(u.loss(out, batch, 1))
    yield from u.step()


@kind()
def retain_twice(u: User) -> Program:
    loss = u.forward_loss()
    yield from u.backward(loss, retain_graph=True)
    yield from u.backward(loss, retain_graph=u.rng.random() < 0.5)
    yield from u.step()


@kind()
def double_backward(u: User) -> Program:
    """A penalty on the gradient of the inputs."""
    batch = u.batch(grad=True)
    out = u.forward(batch)
    (slope,) = torch.autograd.grad(out.float().sum(), batch.x, create_graph=True, allow_unused=True)
    penalty = slope.square().sum() / 40 if slope is not None else 0.0
    u.note("penalty", penalty)
    yield from u.backward(u.loss(out, batch) + penalty)
    yield from u.step()


@kind()
def grad_inputs(u: User) -> Program:
    batch = u.batch(grad=True)
    (slope,) = torch.autograd.grad(u.loss(u.forward(batch), batch), batch.x, allow_unused=True)
    u.note("gradient", slope if slope is not None else 0.0)
    if u.rng.random() < 0.5:
        yield from u.train(1)


@kind()
def grad_params(u: User) -> Program:
    params = [p for _, p in sorted(u.params(trained=True).items())]
    chosen = u.rng.sample(params, min(3, len(params)))
    if chosen:
        grads = torch.autograd.grad(u.forward_loss(), chosen, allow_unused=True)
        for n, grad in enumerate(grads):
            u.note(f"gradient {n}", grad if grad is not None else 0.0)
    yield from u.train(1)


@kind()
def other_head(u: User) -> Program:
    """Multi-task: another head, another expert; the rest is not used."""
    yield from u.train(head=u.rng.randrange(3), route=u.rng.randrange(3))


@kind()
def other_heads(u: User) -> Program:
    """Heads in turn, over accumulated batches."""
    with u.no_sync():
        yield from u.backward(u.forward_loss(0, head=0, route=1))
    yield from u.backward(u.forward_loss(1, head=1, route=2))
    yield from u.step()


@kind()
def layer_drop(u: User) -> Program:
    yield from u.train(skip=u.rng.randrange(len(u.case.arch.blocks)))


@kind()
def recorded(u: User) -> Program:
    """A loss on tensors recorded inside blocks, with the output or without it."""
    tape, batch = Tape(), u.batch()
    out = u.forward(batch, tape=tape)
    inner = tape.tensors[u.rng.randrange(len(tape.tensors))]
    loss = inner.float().square().sum() / 20
    if u.rng.random() < 0.5:
        loss = loss + u.loss(out, batch)
    u.note("loss", loss)
    if loss.requires_grad:
        yield from u.backward(loss)
        yield from u.step()


@kind()
def part(u: User) -> Program:
    """A part of the model called directly, and trained."""
    piece = u.rng.choice([*u.model.pieces(), u.model.heads[0]])
    batch = u.batch(grad=True)
    torch.manual_seed(batch.seed)
    out = unwrap(u.call(piece, batch.x))
    loss = u.loss(out, batch)
    u.note("loss", loss)
    yield from u.backward(loss)
    yield from u.step()


@kind()
def part_eval(u: User) -> Program:
    piece = u.rng.choice(u.model.pieces())
    u.model.eval()
    with u.rng.choice((torch.no_grad, torch.inference_mode))():
        u.note("output", unwrap(u.call(piece, u.batch().x)))
    u.model.train()
    yield from ()


@kind()
def checkpoint_reentrant(u: User) -> Program:
    yield from u.train(grad=True, recompute=True)


@kind()
def checkpoint_nonreentrant(u: User) -> Program:
    yield from u.train(grad=u.rng.random() < 0.5, recompute=False)


@kind()
def evaluate(u: User) -> Program:
    yield from u.look(mode=u.rng.choice((torch.no_grad, torch.inference_mode, torch.enable_grad)))


@kind()
def eval_between(u: User) -> Program:
    loss = u.forward_loss()
    yield from u.look("before backward")
    yield from u.backward(loss)
    yield from u.look("before the step")
    yield from u.step()


@kind()
def closure(u: User) -> Program:
    if u.engine is None:
        yield from u.train()
        return

    def run() -> Tensor:
        u.clear()
        loss = u.forward_loss()
        loss.backward()
        return loss

    u.optimizer.step(run)
    u.clear()


@kind()
def other_thread(u: User) -> Program:
    """Forward and backward in a thread of their own."""
    done: list[Any] = []

    def run() -> None:
        torch.set_num_threads(1)
        try:
            u.forward_loss().backward()
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if done:
        raise done[0]
    yield ("average", 0, None)
    yield from u.step()


@kind()
def anomaly(u: User) -> Program:
    with torch.autograd.set_detect_anomaly(True):
        yield from u.train()


@kind()
def hooked(u: User) -> Program:
    """A tensor hook on a parameter."""
    params = u.params(trained=True)
    if params:
        handle = u.some_param(trained=True).register_hook(lambda grad: grad * 3)
        yield from u.backward(u.forward_loss())
        handle.remove()
        yield from u.step()


# Gradients


@kind()
def clip_norm(u: User) -> Program:
    yield from u.backward(u.forward_loss())
    clip = partial(torch.nn.utils.clip_grad_norm_, u.model.parameters())
    u.note("norm", (u.engine.clip_grad_norm_ if u.engine is not None else clip)(0.3))
    yield from u.step()


@kind()
def clip_value(u: User) -> Program:
    yield from u.backward(u.forward_loss())
    if u.engine is not None:
        u.engine.clip_grad_value_(0.02)
    else:
        torch.nn.utils.clip_grad_value_(u.model.parameters(), 0.02)
    yield from u.step()


def _gradients(u: User, body: Callable[[], Any]) -> Program:
    """A backward, something with the gradients that may be refused, and the step (without it if it was refused)."""
    yield from u.backward(u.forward_loss())
    yield from u.attempt(body)
    yield from u.step()


@kind()
def torch_clip_norm(u: User) -> Program:
    def body() -> None:
        u.note("norm", torch.nn.utils.clip_grad_norm_(u.model.parameters(), 0.3))

    yield from _gradients(u, body)


@kind()
def torch_clip_value(u: User) -> Program:
    yield from _gradients(u, lambda: torch.nn.utils.clip_grad_value_(u.model.parameters(), 0.02))


@kind()
def grad_none(u: User) -> Program:
    """`p.grad = None`, for all or for some."""
    names = sorted(u.params(trained=True))
    chosen = names if u.rng.random() < 0.5 else names[: len(names) // 2]
    yield from u.backward(u.forward_loss())

    def body() -> None:
        for name in chosen:
            u.params()[name].grad = None

    yield from u.attempt(body)
    if u.rng.random() < 0.5:
        yield from u.backward(u.forward_loss(1))
    yield from u.step()


@kind()
def part_zero_grad(u: User) -> Program:
    piece = u.rng.choice([*u.model.pieces(), *u.model.heads])
    yield from u.backward(u.forward_loss())
    yield from u.attempt(piece.zero_grad)
    yield from u.step()


@kind()
def read_grad(u: User) -> Program:
    def body() -> None:
        norms = [p.grad.norm() for p in u.model.parameters() if p.grad is not None]
        u.note("norm", torch.stack([n.float() for n in norms]).norm() if norms else 0.0)

    yield from _gradients(u, body)


@kind()
def edit_grad(u: User) -> Program:
    def body() -> None:
        for p in u.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    yield from _gradients(u, body)


@kind()
def full_gradient(u: User) -> Program:
    params = u.params(trained=True)
    yield from u.backward(u.forward_loss())
    for name in u.rng.sample(sorted(params), min(2, len(params))):
        grad = zero.full_gradient(params[name]) if u.engine is not None else params[name].grad
        u.note(name, grad if grad is not None else torch.zeros(params[name].shape))
    yield from u.step()


# Weights


def _written(u: User, write: Callable[[], Any]) -> Program:
    """A write between steps; what reads it first may refuse it. Then it has not been, on any rank."""
    follow = u.rng.choice(("eval", "grad", "state_dict", "step" if not u.has_statistics else "eval"))

    def body() -> Program:
        with torch.no_grad():
            write()
        match follow:
            case "eval":
                yield from u.look()
            case "grad":
                yield from u.look(mode=torch.enable_grad)
            case "state_dict":
                u.model.state_dict()
            case "step":
                yield from u.train()

    before = len(u.notes)
    if not (yield from u.attempt(body, torch_too=True)):
        del u.notes[before:]


@kind()
def write_data(u: User) -> Program:
    p = u.some_param()
    value = torch.randn(p.shape, generator=torch.Generator().manual_seed(u.op.seed)) * 0.3

    def write() -> None:
        p.data = value.clone()

    yield from _written(u, write)


@kind()
def write_inplace(u: User) -> Program:
    p, how = u.some_param(), u.rng.randrange(4)

    def write() -> None:
        match how:
            case 0:
                p.mul_(0.5)
            case 1 if p.numel() == 1 and u.case.setting.stage == 3:
                p.clamp_(-0.1, 0.1)  # through `.data` NaN stays NaN, and nothing tells of it: docs/LIMITS.md
            case 1:
                p.data.clamp_(-0.1, 0.1)
            case 2:
                torch.manual_seed(u.op.seed)
                if u.case.setting.dtype == "no":
                    nn.init.normal_(p, std=0.3)
                else:
                    nn.init.constant_(p, 0.3)  # torch draws other numbers in bf16 than in fp32
            case 3:
                p.copy_(torch.full_like(p, 0.2))

    yield from _written(u, write)


@kind()
def write_block(u: User) -> Program:
    """Weight clipping over a block; the write of a swap of averages."""
    piece = u.rng.choice(u.model.pieces())

    def write() -> None:
        for p in piece.parameters():
            p.data.mul_(0.6)

    yield from _written(u, write)


@kind()
def swap(u: User) -> Program:
    """`load_state_dict` of changed values: of rank 0's alone, or of whole ones on every rank."""
    state = yield ("from", 0, u.model.state_dict())
    state = {
        **state,
        **{name: value.clone() for name, value in u.model.named_buffers() if name in state},
    }  # each rank's own
    before = {name: value.clone() for name, value in state.items()}
    u.model.load_state_dict({k: v * 0.7 if v.is_floating_point() else v for k, v in state.items()})
    yield from u.look()
    if u.rng.random() < 0.5:
        u.model.load_state_dict(before)


@kind()
def gathered(u: User) -> Program:
    params = [u.some_param() for _ in range(2)]
    rank = u.rng.randrange(u.world)
    if u.engine is not None:
        with zero.GatheredParameters(params, modifier_rank=rank):
            for n, p in enumerate(params):
                u.note(f"value {n}", p.data)
            if u.rank == rank:
                for p in {id(p): p for p in params}.values():
                    p.data.mul_(0.5).add_(0.01)
        return
    for n, p in enumerate(params):
        u.note(f"value {n}", p.data)
    for p in {id(p): p for p in params}.values():
        p.data.mul_(0.5).add_(0.01)
    yield from ()


@kind()
def full_parameter(u: User) -> Program:
    p = u.some_param()
    if u.engine is not None:
        value = zero.full_parameter(p)
        u.note("value", value)
        zero.set_full_parameter(p, value * 0.5 + 0.01)
    else:
        u.note("value", p)
        p.data.mul_(0.5).add_(0.01)
    yield from ()


@kind()
def state_dict(u: User) -> Program:
    state = u.model.state_dict()
    if u.rank == 0:
        for name, value in state.items():
            u.note(name, value)
    yield from ()


@kind()
def deepcopy(u: User) -> Program:
    """A copy for averages or a reference model: a plain one that computes the same, or refused by name."""

    def body() -> None:
        twin = copy.deepcopy(u.model)
        twin.eval()
        batch = u.batch(5)
        with torch.no_grad(), u.autocast():
            u.note("copy", unwrap(twin(batch.x, batch.ids)))

    before = len(u.notes)
    if not (yield from u.attempt(body)):
        del u.notes[before:]


# Optimizers, files, and the engine's own calls


@kind()
def optimizer_reload(u: User) -> Program:
    u.optimizer.load_state_dict(u.optimizer.state_dict())
    yield from u.train()


@kind()
def save_load(u: User) -> Program:
    """Save, train on, and come back."""
    if u.engine is not None:
        folder = u.folder / f"saved{u.op.seed}"
        u.engine.save(folder, async_save=u.rng.random() < 0.3)
        yield from u.train()
        u.engine.load(folder)
        return
    model = yield ("from", 0, u.model.state_dict())
    optimizer = copy.deepcopy(u.optimizer.state_dict())
    yield from u.train()
    u.model.load_state_dict(model)
    u.optimizer.load_state_dict(optimizer)


@kind()
def add_group(u: User) -> Program:
    params = u.params(trained=True)
    late, u.left_out = [params[name] for name in u.left_out if name in params], []
    if late:
        u.optimizer.add_param_group({"params": late, "lr": 0.03})
    yield from u.train()


@kind()
def rebind(u: User) -> Program:
    """Freeze a part, or thaw it, and go on with a new optimizer."""
    piece = u.rng.choice([*u.model.pieces(), u.model.heads[0]])
    thaw = not next(piece.parameters()).requires_grad
    if not thaw and len(u.params(trained=True)) <= sum(1 for _ in piece.parameters()) + len(u.left_out):
        return
    piece.requires_grad_(thaw)
    u.optimizer = u.new_optimizer()
    if u.engine is not None:
        u.engine.bind(u.optimizer)
    yield from u.train()


@kind()
def schedule(u: User) -> Program:
    scheduler = torch.optim.lr_scheduler.StepLR(u.optimizer, 1, gamma=0.7)
    yield from u.train()
    scheduler.step()
    for group in u.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] *= 0.5


@kind()
def reshard(u: User) -> Program:
    """Plain again, trained as such by nobody, and sharded anew."""
    sharded, u.is_ddp = u.engine is not None, False
    if u.engine is not None:
        u.engine.detach()
        u.engine = None
    yield from u.look("plain", mode=lambda: _both(torch.no_grad(), u.autocast()))
    u.is_ddp = u.due = True
    u.optimizer = u.new_optimizer()
    if sharded:
        u.shard()
    else:
        yield ("buffers", 0, None)


@contextlib.contextmanager
def _both(one: Any, two: Any) -> Iterator[None]:
    with one, two:
        yield


@kind()
def away(u: User) -> Program:
    def body() -> None:
        if u.engine is not None:
            u.engine.offload_states()
            u.engine.reload_states()

    yield from u.attempt(body)


# Exceptions


@kind()
def raise_forward(u: User) -> Program:
    with contextlib.suppress(Planned):
        u.forward(u.batch(), fail=u.rng.randrange(len(u.case.arch.blocks)))
    u.clear()
    yield from u.train(1)


@kind()
def raise_backward(u: User) -> Program:
    tape, batch = Tape(), u.batch(grad=True)
    out = u.forward(batch, tape=tape)

    def fail(_: Tensor) -> None:
        raise Planned

    inner = tape.tensors[u.rng.randrange(len(tape.tensors))]
    if inner.requires_grad:
        inner.register_hook(fail)
        with contextlib.suppress(Planned):
            u.loss(out, batch).backward()
    u.clear()
    yield from u.train(1)


# Ranks that differ


@kind(several_ranks_keep)
def rank_branches(u: User) -> Program:
    """Other heads, experts, blocks on each rank."""
    skip = u.rank % len(u.case.arch.blocks) if u.rng.random() < 0.5 else -1
    yield from u.train(head=u.rank, route=u.rank, skip=skip)


@kind(lambda setting, arch: several_ranks_keep(setting, arch) and no_buffers(setting, arch))
def rank_forwards(u: User) -> Program:
    """Another number of forwards on each rank before the backward."""
    total = u.forward_loss(0)
    for n in range(1, 1 + (u.rank + u.op.seed) % 3):
        total = total + u.forward_loss(n)
    yield from u.backward(total)
    yield from u.step()


def experts_share_a_unit(setting: Setting, arch: Arch) -> bool:
    """Blocks are found as children of one class in a list; alone, an expert may be a unit."""
    blocks = sum(block.piece == "experts" for block in arch.blocks)
    return keeps_whole(setting, arch) or blocks == 0 or (blocks > 1 and arch.container in ("list", "sequential"))


@kind(lambda setting, arch: setting.ranks > 1 and experts_share_a_unit(setting, arch))
def rank_experts(u: User) -> Program:
    """Inside a unit ranks may differ at every stage."""
    yield from u.train(route=u.rank)


def trains_early(setting: Setting, arch: Arch) -> bool:
    """A rank whose loss uses no trained parameter makes no backward that others could meet, as under DDP."""
    return setting.ranks > 1 and not (arch.front_frozen and arch.blocks[0].frozen)


@kind(trains_early)
def rank_losses(u: User) -> Program:
    """The same forward on all ranks; the first one's loss uses what a block recorded, the others' the output."""
    tape, batch = Tape(), u.batch(grad=True)
    out = u.forward(batch, tape=tape)
    loss = tape.tensors[0].float().square().sum() / 20 if u.rank == 0 else u.loss(out, batch)
    u.note("loss", loss)
    yield from u.backward(loss)
    yield from u.step()


@kind(lambda setting, arch: setting.ranks > 1 and no_statistics(setting, arch))
def empty_batch(u: User) -> Program:
    yield from u.train(size=0 if u.rank == u.rng.randrange(u.world) else 2)
