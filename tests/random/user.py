"""What calls of user code are made of: a case, and one rank's training loop."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.oracle import Run, progress
from tests.random.models import TOKENS, VOCAB, Arch, Net, short, unwrap
from tests.settings import Setting

# Cases ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Case:
    """A program.

    Attributes:
        left_out: the last head joins the optimizer later, if at all.
        calls: words `kind:seed`; the details of a call come from its seed.
    """

    seed: int = 0
    setting: Setting = Setting()
    optimizer: str = "momentum"
    groups: int = 1
    left_out: bool = False
    arch: Arch = Arch()
    calls: str = "step:0"

    def __repr__(self) -> str:
        return short(self)

    @property
    def parsed(self) -> list[Call]:
        return [Call(kind, int(seed)) for kind, _, seed in (word.partition(":") for word in self.calls.split())]

    @property
    def kinds(self) -> set[str]:
        """What it holds of calls and of pieces of models."""
        return {call.kind for call in self.parsed} | {block.piece for block in self.arch.parsed}


class Call(NamedTuple):
    kind: str
    seed: int


# Optimizers -------------------------------------------------------------------------------------------------------------


class Lars(torch.optim.Optimizer):
    """You et al. 2017: each parameter's rate comes from its norms; with momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.05})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    rate = group["lr"] * (p.norm() + 0.1) / (p.grad.norm() + group["weight_decay"] * p.norm() + 0.1)
                    momentum.mul_(0.9).add_(p.grad + group["weight_decay"] * p)
                    p.sub_(rate * momentum)
        return loss


EPS: Any = {"lr": 0.02, "eps": 0.03}
"""Adam divides by the root of squared gradients. With its usual eps, rounding in a gradient that should be 0 (the bias of
attention's keys) becomes a full step. This eps has the size of gradients, so that rounding stays rounding."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.05),
    "adamw": lambda groups: torch.optim.AdamW(groups, **EPS, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, eps=0.03, momentum=0.5),
}
MORE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, **EPS, amsgrad=True, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, **EPS, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, **EPS, decoupled_weight_decay=True),
    "radam": lambda groups: torch.optim.RAdam(groups, **EPS),
    "adamax": lambda groups: torch.optim.Adamax(groups, **EPS),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, **EPS, lr_decay=0.1),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5, eps=0.03),
    "lars": Lars,
}

# One rank's loop --------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: Tensor
    ids: Tensor
    seed: int


@dataclass
class User:
    """One rank's training loop: what calls share.

    Attributes:
        nudge: initial weights are larger by this share.
        syncing: backwards reduce gradients; False under `no_sync`.
        is_parallel: forwards are the engine's; False while the model is plain.
        is_ahead: a training forward has changed buffers since the last backward.
    """

    case: Case
    run: Run
    nudge: float = 0.0
    syncing: bool = True
    is_parallel: bool = True
    is_ahead: bool = False
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin(0, Call("shard", 0))
        self.world = self.case.setting.ranks
        self.model: Any = self.run.build(self._net, self.case.seed)
        names = list(self.params(trained=True))
        heads = [name for name in names if name.startswith("heads.")]
        self.left_out = heads[-1:] if self.case.left_out and len(names) > 2 else []
        self.shard()

    def shard(self) -> None:
        self.optimizer = self.new_optimizer()
        self.run.shard(self.model, self.optimizer)
        self.engine: Any = self.run.engine_of(self.model)
        self._is_due = True

    def new_optimizer(self) -> torch.optim.Optimizer:
        params = [p for name, p in self.params(trained=True).items() if name not in self.left_out]
        groups: list[dict[str, Any]] = [{"params": params}]
        if self.case.groups == 2:
            groups = [
                {"params": [p for p in params if p.dim() > 1]},
                {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
            ]
        return (OPTIMIZERS | MORE_OPTIMIZERS)[self.case.optimizer]([group for group in groups if group["params"]])

    def begin(self, place: int, call: Call) -> None:
        self.place, self.call = place, call
        self.rng = random.Random(f"{self.case.seed}/{call.seed}")
        side = "reference" if self.run.is_plain else "engine"
        progress(str(self.run.folder.parent), self.run.rank, f"{side}, call {place}: {call.kind}")

    def see(self, what: str, *values: Any) -> None:
        """Compare values, of which the largest gives the scale; None counts as zero."""
        values = tuple(torch.zeros(1) if v is None else torch.as_tensor(v).detach().double().ravel() for v in values)
        self.run.see(torch.cat(values) if values else torch.zeros(0), f"call {self.place}, {self.call.kind}: {what}")

    # Forward, backward, step

    def batch(self, n: int = 0, size: int = 2, grad: bool = False) -> Batch:
        seed = hash((self.case.seed, self.call.seed, n, self.run.rank)) % 2**31
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, TOKENS, self.case.arch.width, generator=generator)
        return Batch(x.requires_grad_(grad), torch.randint(0, VOCAB, (size, TOKENS), generator=generator), seed)

    def forward(self, batch: Batch, **options: Any) -> Tensor:
        torch.manual_seed(batch.seed)
        if self.is_parallel and self._is_due:
            self.share_buffers()
        self.is_ahead |= self.model.training
        out = unwrap(self.model(batch.x, batch.ids, **options))
        if self.is_parallel:
            self._is_due = self.syncing and torch.is_grad_enabled()
        return out

    def share_buffers(self) -> None:
        """Send rank 0's buffers, as DDP before a forward that follows one with gradients to reduce."""
        for buffer in self.model.buffers() if self.run.is_plain else ():
            self.from_first(buffer.data)  # `.data`: graphs that keep the buffer do not see the write

    def from_first(self, value: Tensor) -> Tensor:
        """Overwrite with rank 0's value."""
        if self.world > 1:
            dist.broadcast(value, 0)
        return value

    def loss(self, output: Tensor, batch: Batch, n: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(batch.seed + 7 + n)
        return (output.float() - torch.randn(output.shape, generator=generator)).square().sum() / 40

    def forward_loss(self, n: int = 0, size: int = 2, grad: bool = False, **options: Any) -> Tensor:
        batch = self.batch(n, size, grad)
        loss = self.loss(self.forward(batch, **options), batch)
        self.see(f"loss {n}", loss)
        return loss

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        self.is_ahead = False
        if self.syncing:
            self.run.forget_gradients()  # as DDP, the reference averages after each backward
            self.run.sync_gradients()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        try:
            with self.run.no_sync(self.model):
                yield
        finally:
            self.syncing = True

    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()

    def descend(self, loss: Tensor) -> None:
        self.backward(loss)
        self.update()

    def train(self, n: int = 0, **options: Any) -> None:
        loss = self.forward_loss(n, **options)
        if loss.requires_grad:  # else all that it depends on is frozen
            self.descend(loss)

    def evaluate(self, what: str = "eval", mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad) -> None:
        # Where ranks have full parameters an evaluation has buffers as they were after the last backward (docs/LIMITS.md,
        # "Buffers"), and an engine that evaluated before a backward does not send them in it. So user code sends later changes.
        setting = self.case.setting
        has_all = setting.stage < 3 or setting.replicas == setting.ranks
        for buffer in self.model.buffers() if self.is_ahead and has_all else ():
            self.from_first(buffer.data)
        self.model.eval()
        with mode():
            self.see(what, self.forward(self.batch(99)))
        self.model.train()

    def autocast(self) -> AbstractContextManager[Any]:
        """For models that no engine runs."""
        return torch.autocast("cpu", torch.bfloat16) if self.case.setting.precision == "bf16" else nullcontext()

    # Parts of the model

    def _net(self) -> Net:
        net = Net(self.case.arch)
        with torch.no_grad():
            for param in net.parameters() if self.nudge else ():
                param.mul_(1.0 + self.nudge)
        return net

    def params(self, trained: bool = False) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad or not trained}

    def some_param(self, trained: bool = False) -> nn.Parameter:
        params = self.params(trained)
        return params[self.rng.choice(sorted(params))]

    def some_piece(self, *more: nn.Module) -> Any:
        return self.rng.choice([*self.model.pieces(), *more])
