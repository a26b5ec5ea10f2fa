"""Entries of `model.state_dict()`: written, copied, saved, loaded, also by one rank and inside one another."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import hf_zero as zero
from tests.models import adamw, bert, gpt2, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.accessors import full_parameter, set_full_parameter
from tests.programs.failures import caught
from tests.programs.usual import is_sharded
from tests.settings import Setting

NAME = "0.weight"


def whole(run: Run) -> dict[str, Tensor]:
    """Every parameter with all its digits."""
    return {name: full_parameter(run, param).clone() for name, param in run.model.named_parameters()}


def see_same(run: Run, found: Any, what: str) -> None:
    """Entries have all digits of the parameters."""
    expected = whole(run)
    run.see([name for name, value in expected.items() if not torch.equal(found[name], value)], f"differing in {what}")


# Writes -----------------------------------------------------------------------------------------------------------------


def set_item(entry: Tensor) -> None:
    entry[2] = 5.0


def add_in_place(entry: Tensor) -> None:
    entry += 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda entry: entry.copy_(torch.ones(16, 16)),
    "add_": lambda entry: entry.add_(1),
    "fill_": lambda entry: entry.fill_(0.5),
    "+=": add_in_place,
    "item": set_item,
    "a view": lambda entry: entry[3].zero_(),
    "view, transposed": lambda entry: entry.t()[0].mul_(3),
    "detach": lambda entry: entry.detach().zero_(),
    "data": lambda entry: entry.data.mul_(2),
    "init": nn.init.ones_,
    "foreach": lambda entry: torch._foreach_add_([entry], 1.0),
    "out": lambda entry: torch.add(entry, 1.0, out=entry),
    "out of others": lambda entry: torch.mul(torch.ones(16, 16), 7.0, out=entry),
    "unbind": lambda entry: entry.unbind(0)[1].sub_(4),
    "index_fill_": lambda entry: entry.index_fill_(0, torch.tensor([1]), 9.0),
}


@program(reference="average")
def written(run: Run) -> None:
    """Refused: no parameter would have the value. A copy of an entry is user code's own."""
    model = run.mlp()
    run.step(0)
    for number, (name, write) in enumerate(WRITES.items()):
        state, before = model.state_dict(), whole(run)
        act = torch.no_grad()(write)
        run.refuses(zero.StateError, r"state_dict\(\).*clone", lambda act=act, state=state: act(state[NAME]))
        run.see(torch.equal(state[NAME], before[NAME]), f"whether the entry is as it was after {name}")
        run.see(torch.equal(full_parameter(run, model[0].weight), before[NAME]), f"and the parameter after {name}")
        if number % 4 == 0:
            run.step(number)
    if not run.is_plain:
        array = model.state_dict()[NAME].numpy()
        run.refuses(ValueError, "read-only", lambda: array.fill(1.0))
    average = copy.deepcopy(model.state_dict())
    cloned = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in model.state_dict().items():
        average[key].mul_(0.5).add_(value, alpha=0.5)
        cloned[key].mul_(0.5).add_(value, alpha=0.5)
        value.double().zero_()
        (value + 1).zero_()
        run.see(torch.allclose(average[key], value) and torch.allclose(cloned[key], value), f"an average of {key}")


@program(reference="average")
def written_parameters(run: Run) -> None:
    """What was written since the step is in the state dict, however it was written; inside `unsharded` entries are live."""
    model = run.mlp()
    run.step(0)
    model[0].weight.data = torch.full((16, 16), 2.0)
    with torch.no_grad():
        model[2].bias.fill_(3.0)
    see_same(run, model.state_dict(), "written parameters")
    with run.unsharded(model):
        model[0].weight.data.fill_(4.0)
        run.see(model.state_dict()[NAME].float(), "an entry inside")
        model.state_dict()["2.weight"].fill_(6.0)
    run.see(full_parameter(run, model[2].weight), "a parameter whose entry was written inside")
    kept = model.state_dict(keep_vars=True)[NAME]
    run.see(kept.float() if run.rank == 0 else None, "an entry as a parameter")
    run.step(1)


# Uses -------------------------------------------------------------------------------------------------------------------


@program(reference="average")
def used_as_tensors(run: Run) -> None:
    """Saved and read, loaded into other models, in a graph, in lists of tensors."""
    model = run.mlp()
    run.step(0)
    state = model.state_dict()
    for read in (state, copy.deepcopy(state)):
        file = io.BytesIO()
        torch.save(read, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        run.see({type(value) is Tensor for value in loaded.values()}, "types that were saved")
        see_same(run, loaded, "what was saved")
        loaded[NAME].zero_()  # user code's own
    see_same(run, safetensors.torch.load(safetensors.torch.save(state)), "what was saved by safetensors")
    twin = mlp()
    twin.load_state_dict(state)
    see_same(run, dict(twin.named_parameters()), "another model")
    with torch.no_grad():
        twin[0].weight.zero_()
    x = run.inputs(0).requires_grad_()
    F.linear(x, state[NAME]).sum().backward()
    run.see(x.grad, "a gradient through an entry")
    mine = torch.zeros(16, 16)
    torch._foreach_add_([mine], [state[NAME]])
    run.see(mine._version > 0, "whether torch counts what a list with entries has written")
    before = whole(run)
    run.see(torch.equal(mine, before[NAME]), "whether it was written")
    model.load_state_dict(state)
    model.load_state_dict({key: value.clone() for key, value in state.items()})
    see_same(run, before, "itself")
    run.step(1)


@program(reference="average", more={"ranks": (1, 2)})
def parts_and_loads(run: Run) -> None:
    """Of tied and frozen parameters; from full values on every rank, and on rank 0 alone."""
    model = run.trained_model(bert, adamw)
    before = {name: value.clone() for name, value in bert().state_dict().items()}
    for part in ("", "bert.encoder.layer.0.", "cls."):
        for name, value in model.get_submodule(part.rstrip(".")).state_dict().items():
            run.see((name, str(value.dtype), value.shape), "an entry")
    state = model.state_dict()
    see_same(run, state, "the state dict")
    names = ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
    run.see(run.rank > 0 or len({state[name].data_ptr() for name in names}) == 1, "whether entries are tied")
    changed = {name: value.clone() + value.is_floating_point() for name, value in before.items()}
    model.load_state_dict(changed)
    see_same(run, changed, "changed values")
    has_all = run.is_plain or run.rank == 0
    model.load_state_dict({name: value if has_all else value.to("meta") for name, value in before.items()})
    see_same(run, before, "values of rank 0")
    found = model.load_state_dict({"nonsense": torch.zeros(1)}, strict=False)
    run.see(found.unexpected_keys, "unexpected keys")
    wrong = {**changed, "cls.predictions.bias": torch.zeros(3)}
    run.refuses(RuntimeError, "size mismatch for cls.predictions.bias", lambda: model.load_state_dict(wrong))
    run.refuses(zero.StateError, "assign", lambda: model.load_state_dict(changed, assign=True))
    model.load_state_dict(before)
    with torch.no_grad():
        run.see(model(input_ids=run.ids(0)).logits, "logits")


class Scaled(nn.Linear):
    """Saves its weight in another unit and under another name, by overriding what torch calls for each module."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "twice"] = destination.pop(prefix + "weight").float() * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state = {**state}
        state[prefix + "weight"] = state.pop(prefix + "twice") / 2
        super()._load_from_state_dict(state, prefix, *args)


@program(reference="average")
def hooks_of_user_code(run: Run) -> None:
    """They see values, of a part that is loaded alone, too."""
    model = run.trained_model(lambda: nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), Scaled(6, 3)))
    model[0].register_state_dict_post_hook(
        lambda _, state, prefix, __: run.see(state[prefix + "weight"].double().sum(), "a sum in a hook")
    )
    run.step(0)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in values.items():
        run.see(value, name)
    model.load_state_dict({name: value + 1 for name, value in values.items()})
    model[0].load_state_dict({"weight": torch.ones(6, 16)}, strict=False)
    for name, value in model.state_dict().items():
        run.see(value, f"loaded {name}")


@program(
    reference="average",
    refused=(Refused(zero.RankMismatchError, r"'0\.bias' is not on rank 1 what it is on rank 0", is_sharded),),
)
def other_values_on_each_rank(run: Run) -> None:
    run.mlp().load_state_dict({"0.bias": torch.full((16,), float(run.rank))}, strict=False)
    run.step(0)


@program(reference="average", only={"deferred": (True,)})
def of_a_deferred_model(run: Run) -> None:
    """Before it is sharded, code inside `zero.Init` alone sees values; every rank gets them there."""
    model = run.build(mlp)
    run.refuses(zero.StateError, r"created under zero\.Init\(\)", model.state_dict)
    with nullcontext() if run.is_plain else zero.Init():
        for name, value in model.state_dict().items():
            run.see(value, name)
    run.shard(model, sgd(model))
    run.step(0)


# On one rank ------------------------------------------------------------------------------------------------------------


def on_every_rank(setting: Setting) -> bool:
    """Whether each rank has all values of the parameters without asking others."""
    return setting.stage == 0 or (setting.stage < 3 and setting.precision == "fp32" and setting.tier != "disk")


def save_plain(model: Any, folder: Path) -> dict[str, Any]:
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save(model.state_dict()["transformer.ln_f.bias"], folder / "one.pt")
    assert (folder / "one.pt").stat().st_size < 4096
    return torch.load(folder / "weights.pt", weights_only=True)


def save_pretrained(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def save_safetensors(model: Any, folder: Path) -> dict[str, Any]:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return safetensors.torch.load_file(folder / "model.safetensors")


def save_accelerate(model: Any, folder: Path) -> dict[str, Any]:
    from accelerate.state import PartialState
    from accelerate.utils import save

    PartialState(cpu=True)  # accelerate logs by it
    save(model.state_dict(), folder / "model.safetensors", safe_serialization=True)
    return safetensors.torch.load_file(folder / "model.safetensors")


def _saved_by_one_rank(run: Run, *, inside: bool) -> None:
    model = run.trained_model(gpt2, adamw)
    model(input_ids=run.ids(0), labels=run.ids(0)).loss.backward()
    run.update()
    saves: dict[int, Any] = {0: (save_plain, save_pretrained, save_safetensors, save_accelerate), 1: (save_plain,)}
    for saver, ways in saves.items():
        expected = whole(run)
        with run.unsharded(model) if inside else nullcontext():
            for way in ways if run.rank == saver else ():
                folder = run.folder / f"{way.__name__} {saver}"
                folder.mkdir()
                found = way(model, folder)
                for name, value in expected.items():
                    key = name if name in found else "lm_head.weight"  # tied
                    run.see(torch.equal(found[key], value), f"whether {way.__name__} saved {name}")
        if run.rank == saver and not inside:
            run.see([*model.lm_head.state_dict(prefix="head.")], "names of a part")


program(partial(_saved_by_one_rank, inside=False), name="saved_by_one_rank", reference="average", accept=on_every_rank)
program(partial(_saved_by_one_rank, inside=True), name="saved_by_one_rank_inside_unsharded", reference="average")


@program(only={"stage": (1, 2), "tier": ("cpu",)}, reference="average", accept=on_every_rank)
def saved_by_one_rank_between_updates_in_backward(run: Run) -> None:
    model = run.build(mlp)
    run.shard(model, sgd(model), step_in_backward=True)
    for step in range(2):
        run.step(step)
        if run.rank == step:
            found = {name: value.clone() for name, value in model.state_dict().items()}
            run.see(found[NAME], "a weight")


# Inside one another -----------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    """Saves a part of itself under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), mlp(), nn.Linear(4, 4)

    def get_extra_state(self) -> Any:
        return torch.cat([value.flatten() for value in self.inner.state_dict().values()])

    def set_extra_state(self, state: Any) -> None:
        pass


class Counting(nn.Linear):
    """Its forwards are its state."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.count = 0

    def get_extra_state(self) -> Any:
        return torch.tensor([self.count, 7])

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state[0])

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) / self.count


@program(reference="average")
def states_of_modules_come_back(run: Run) -> None:
    def named_by_transformers() -> nn.Module:
        model: Any = gpt2(n_embd=16)
        model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, Counting())
        return model

    def named_by_torch() -> nn.Module:
        return nn.Sequential(Counting(), Counting())

    for make, rows in (named_by_torch, run.inputs), (named_by_transformers, run.ids):
        model = run.trained_model(make)
        for step in range(3):
            out = model(rows(step))
            getattr(out, "logits", out).square().mean().backward()
            run.update()
            if step == 1:
                run.save(model, make.__name__)
        run.load(model, make.__name__)
        run.see([module.count for module in model.modules() if isinstance(module, Counting)], "forwards")


class Hooked(nn.Linear):
    """Asks for a part's own state dict in a hook, as quantisers do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = mlp()
        self.register_state_dict_pre_hook(lambda *_: self.seen.append(self.inner.state_dict()))
        self.seen: list[Any] = []


@program(reference="average")
def inside_one_another(run: Run) -> None:
    for make in (Outer, lambda: nn.Sequential(Hooked(), nn.Linear(4, 4))):
        model = run.trained_model(make)
        for _ in range(2):
            for name, value in model.state_dict().items():
                run.see(value if run.rank == 0 else None, name)


class Fails(Outer):
    fails = False

    def get_extra_state(self) -> Any:
        if self.fails:
            raise ValueError("no state yet")
        return torch.zeros(1)


@program(reference="average")
def after_one_that_raised(run: Run) -> None:
    """Nothing of the call that raised is left."""
    model = run.trained_model(lambda: nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4)))
    model[1].fails = True
    with caught(ValueError):
        model.state_dict()
    set_full_parameter(run, model[0].weight, torch.full((4, 4), 7.0))
    part = model[0].state_dict(prefix="part.")
    run.see(part["part.weight"] if run.rank == 0 else None, "an entry of a part")
    model[1].fails = False
    see_same(run, model.state_dict(), "the next state dict")


# torch's own functions --------------------------------------------------------------------------------------------------


@program(reference="average")
def distributed_checkpoint(run: Run) -> None:
    """`torch.distributed.checkpoint.state_dict`: models work, optimizers are refused, before and after a step."""
    model = run.mlp(adamw)
    plain = mlp()
    theirs = adamw(plain)
    plain(run.inputs(5)).sum().backward()
    theirs.step()
    given, optimizer = dcp.get_optimizer_state_dict(plain, theirs), run.optimizer
    for step in range(2):
        before = whole(run)
        for act in (
            lambda: dcp.get_optimizer_state_dict(model, optimizer),
            lambda: dcp.get_optimizer_state_dict(model, optimizer, options=dcp.StateDictOptions(full_state_dict=True)),
            lambda: dcp.get_state_dict(model, optimizer),
            lambda: dcp.set_optimizer_state_dict(model, optimizer, given),
            lambda: dcp.set_state_dict(
                model, optimizer, model_state_dict=dcp.get_model_state_dict(model), optim_state_dict=given
            ),
        ):
            run.refuses(zero.StateError, r"engine\.save.*zero\.full_optimizer_state", act)
        see_same(run, before, "weights after refused calls")
        run.see([p.grad for p in model.parameters()], "gradients after refused calls")
        run.see([p.grad for group in optimizer.param_groups for p in group["params"]].count(None) > 0, "of groups")
        state = dcp.get_model_state_dict(model)
        see_same(run, state if run.rank == 0 else before, "torch's state dict")
        run.step(step)
    values = {name: torch.full_like(value, 0.1) for name, value in dcp.get_model_state_dict(plain).items()}
    dcp.set_model_state_dict(model, values)
    see_same(run, values, "values that torch has set")
    run.step(2)
