"""What user code may do between steps, in any order: every value stays that of plain training."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.oracle import Run, program
from tests.programs.usual import FP32


class Adapted(nn.Module):
    """Each block has frozen and trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"base": nn.Linear(16, 16), "added": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
            for _ in range(3)
        )
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["norm"](x + block["base"](x) + block["added"](x))
        return self.head(x)


def partly_frozen(model: nn.Module, frozen: set[str]) -> torch.optim.Optimizer:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def bases(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if "base" in name}


def broadcast_state(run: Run) -> dict[str, object]:
    """The optimizer's state dict, which rank 0 alone may hold."""
    state = [run.optimizer.state_dict()]
    if run.world > 1:
        dist.broadcast_object_list(state, 0)
    return state[0]


class Operations:
    """Every method does the same to the sharded model and to the plain one. All ranks draw the same."""

    NAMES = (
        "train", "train", "train", "evaluate", "bind", "load_state_dict", "set_full", "set_local", "gathered", "away",
        "save", "load", "load_optimizer",
    )  # fmt: skip

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.model = run.build(Adapted)
        self.params = dict(self.model.named_parameters())
        self.frozen = bases(self.model)
        run.shard(self.model, partly_frozen(self.model, self.frozen))
        self.engine = run.engine_of(self.model)
        self.saved: dict[str, Tensor] | None = None
        self.step = 0

    def any_param(self) -> nn.Parameter:
        return self.params[self.random.choice([*self.params])]

    def train(self) -> None:
        self.step += 1
        self.run.loss(self.step).backward()
        if self.random.random() < 0.3:
            self.away()
        self.run.update()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.run.see(self.model(torch.ones(2, 16)), "evaluation")

    def bind(self) -> None:
        """Freeze or unfreeze one parameter, and train with a new optimizer."""
        self.frozen ^= {self.random.choice([*self.params])}
        self.run.bind(partly_frozen(self.model, self.frozen))

    def load_state_dict(self) -> None:
        chosen = {name for name in self.params if self.random.random() < 0.5}
        values = {name: self.full(param) + 0.01 for name, param in self.params.items() if name in chosen}
        self.model.load_state_dict(values, strict=False)

    def full(self, param: nn.Parameter) -> Tensor:
        return param.detach().clone() if self.engine is None else zero.full_parameter(param)

    def set_full(self) -> None:
        param = self.any_param()
        value = self.full(param) * 1.5
        if self.engine is None:
            param.data.copy_(value)
        else:
            zero.set_full_parameter(param, value)

    def set_local(self) -> None:
        """By the ranks that have a part of it."""
        param = self.any_param()
        if self.engine is None:
            param.data.mul_(0.5)
            return
        mine = zero.local_parameter(param)
        if len(mine):
            zero.set_local_parameter(param, mine * 0.5)
        self.engine.refresh()

    @torch.no_grad()
    def gathered(self) -> None:
        params = [self.params[name] for name in self.random.sample([*self.params], 3)]
        modifier = self.random.randrange(self.run.world)
        with self.run.gathered(params, modifier_rank=modifier):
            for param in params[:2]:
                if self.run.is_plain or self.run.rank == modifier:
                    param.add_(0.03)

    def away(self) -> None:
        if self.engine is not None:
            self.engine.offload_states()
            self.engine.reload_states()

    def save(self) -> None:
        if self.engine is not None:
            self.engine.save(self.run.folder / "saved", save_optimizer=False)
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self) -> None:
        if self.saved is None:
            return
        if self.engine is not None:
            self.engine.load(self.run.folder / "saved", load_optimizer=False)
        else:
            self.model.load_state_dict(self.saved)

    def load_optimizer(self) -> None:
        self.run.optimizer.load_state_dict(broadcast_state(self.run))


def _any_order(run: Run, seed: int, count: int = 24) -> None:
    operations = Operations(run, seed)
    for number in range(count):
        name = operations.random.choice(Operations.NAMES)
        getattr(operations, name)()
        values = [operations.full(param).flatten() for param in operations.params.values()]
        run.see(torch.cat(values), f"stored weights after operation {number}, {name}")
        with run.unsharded(operations.model):
            values = [param.detach().flatten() for param in operations.params.values()]
        run.see(torch.cat(values), f"weights after operation {number}, {name}")


@program(reference="average", only={**FP32, "ranks": (2, 3)}, exact=True)
def any_order(run: Run) -> None:
    _any_order(run, 0)


@program(reference="average", only={**FP32, "ranks": (2, 3)}, exact=True)
def any_other_order(run: Run) -> None:
    _any_order(run, 1)


@program(reference="average", only={**FP32, "stage": (1, 2, 3)})
def written_by_its_owner(run: Run) -> None:
    """The rank that owns a frozen parameter writes it; `engine.refresh()` comes steps later."""
    model = run.build(Adapted)
    run.shard(model, partly_frozen(model, bases(model)))
    engine, param = run.engine_of(model), model.blocks[0]["base"].bias
    if engine is None:
        param.data.add_(1)
    elif len(mine := zero.local_parameter(param)):
        zero.set_local_parameter(param, mine + 1)
    run.loop(lambda step: model.head(run.inputs(step)).square().mean(), 2)
    if engine is not None:
        engine.refresh()
    with run.unsharded(model):
        run.see(param, "written parameter")
