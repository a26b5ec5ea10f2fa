"""Buffers: in training, in evaluation, written by a forward or between steps; other values on each rank."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.utils.checkpoint import checkpoint

from tests.models import Convolutions, mlp
from tests.oracle import Run, program
from tests.programs.usual import FP32, LOWEST, Build

TIERS = {"tier": ("none", "cpu", "cpu/cpu")}


class Normed(nn.Module):
    """Batch norms. With `recompute`, blocks run once more in backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Linear(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.head(x)


class Tracker(nn.Module):
    """An average assigned again, a queue written in place, counters, several types, a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("queue", torch.zeros(4, 8), persistent=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("rare", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("still", torch.arange(5))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.queue[int(self.seen) % 4] = x[0]
                self.seen += 1
                if x.sum() > 0:  # on some ranks only
                    self.rare[int(self.seen) % 3] = True
                self.phase.mul_(torch.complex(x.mean(), torch.tensor(0.5)))
                self.brief.add_(x.mean())
        return self.head(x + self.mean + self.queue.mean(0)) * (1 + self.rare.float().sum())


class Growing(nn.Module):
    """A queue that is empty at first, and longer after each of the first forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 8), nn.Linear(8, 3)
        self.register_buffer("queue", torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.training:
            self.queue = torch.cat([self.queue, x.detach().mean(0, keepdim=True)])[-4:]
        return self.head(x + self.queue.mean(0))


class Quantized(nn.Module):
    """What quantization-aware training observes and rounds: a layer, a batch norm, an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.stem, self.norm, self.head = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(F.relu(self.norm(self.stem(self.quant(x))))))


def quantized(traced: bool) -> nn.Module:
    """An operator writes its observers' extremes, scales and zero points; torch counts no such write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if traced:
            mapping = quantization.get_default_qat_qconfig_mapping("fbgemm")
            return quantize_fx.prepare_qat_fx(Quantized().train(), mapping, (torch.zeros(2, 16),))
        model = Quantized().train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(model)


class Hidden(nn.Module):
    """Writes through `.data`: one buffer in each forward, one from the third on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("late", torch.zeros(8))
        self.register_buffer("still", torch.ones(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.calls += 1
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        if self.calls >= 3:
            self.late.data.lerp_(x.detach().mean(0), 0.5)
        return self.head(x - self.mean * self.still + self.late)


def _evaluated_alone(run: Run, x: Tensor, who: int, step: int) -> None:
    """With rank 0's buffers on any rank, as a forward of DDP has them."""
    plain = run.trained[-1].plain
    is_whole = run.setting.stage == 3 or step % 2 > 0
    grad = contextlib.nullcontext if is_whole and step % 3 == 0 else (torch.no_grad, torch.inference_mode)[step % 2]
    with run.unsharded(run.model) if is_whole else contextlib.nullcontext():
        if run.rank == who:
            plain.eval()
            with grad():
                output = plain(x).detach().clone()
            plain.train()
            if who == 0:  # on another rank a plain module has its own
                run.see(output, f"evaluation {step} of one rank")
        if run.world > 1:
            dist.barrier()
    if not run.is_plain and run.world > 1:
        firsts = [[buffer.clone() for buffer in plain.buffers()]]
        dist.broadcast_object_list(firsts, 0)
        if run.rank == who and not all(map(torch.equal, plain.buffers(), firsts[0])):
            raise AssertionError("the rank that evaluated has other buffers than rank 0")


def _see_saved(run: Run, step: int) -> None:
    """A checkpoint has rank 0's buffers, whichever rank evaluated."""
    plain = run.trained[-1].plain
    persistent = plain.state_dict().keys()
    run.save(run.model, f"saved {step}")
    if run.rank == 0:
        saved = {} if run.is_plain else load_file(run.folder / f"saved {step}" / "model.safetensors")
        for name, buffer in plain.named_buffers():
            if name in persistent:
                run.see(buffer if run.is_plain else saved[name], f"saved {name}")


def _script(run: Run, what: str, shape: tuple[int, ...]) -> None:
    """`t` a step, `a` a micro-step in `no_sync`, `d` two forwards and a backward, `e` evaluation, `w` a write between steps,
    `W` the same write on every rank, `o` and `O` observers off and on, `1` and `L` evaluation by the first or the last rank
    alone, `s` a checkpoint."""
    model = run.model
    for step, each in enumerate(what):
        x = run.inputs(step, *shape) + run.rank
        if each == "e":
            model.eval()
            with torch.no_grad():
                run.see(model(x), f"evaluation {step} of {what}")
            model.train()
        elif each in "1L":
            _evaluated_alone(run, x, 0 if each == "1" else run.world - 1, step)
            continue
        elif each == "s":
            _see_saved(run, step)
            continue
        elif each in "oO":
            model.apply(quantization.disable_observer if each == "o" else quantization.enable_observer)
        elif each == "w":
            with torch.no_grad():
                next(model.buffers()).add_(float(run.rank))
        elif each == "W":
            with torch.no_grad():
                next(model.buffers()).fill_(float(step))
        else:
            with run.no_sync(model) if each == "a" else contextlib.nullcontext():
                outputs = [model(x + k) for k in range(2 if each == "d" else 1)]
                torch.stack(outputs).square().mean().backward()
            run.see(torch.stack(outputs), f"outputs {step} of {what}")
            if each != "a":
                run.update()
        for name, buffer in model.named_buffers():
            run.see(buffer, f"{name.removeprefix('module.')} after {step} of {what}")


def _buffers(name: str, build: Build, *scripts: str, shape: tuple[int, ...] = (4, 16), **only: Any) -> None:
    """In no_sync stages 2 and 3 add up in another order, and batch norms amplify that rounding: hence `loose`."""

    def run_it(run: Run) -> None:
        for what in scripts:
            run.trained_model(build, lambda model: torch.optim.SGD(model.parameters(), lr=0.02))
            _script(run, what, shape)

    program(run_it, name=name, only={**FP32, **TIERS, "deferred": (False,), **only}, loose=20.0)


_buffers("convolutions", Convolutions, "tttett", shape=(4, 3, 8, 8))
_buffers("norms", Normed, "tatteaattet", "attett")
if not LOWEST:  # DDP itself fails
    _buffers("norms_in_two_forwards", Normed, "tdtedt")
_buffers("norms_written_before_an_evaluation", Normed, "tWettWLet", stage=(1, 2))
_buffers("recomputed", lambda: Normed(recompute=True), "ttet")
_buffers("tracker", Tracker, "ttattett", "tttwtt")
_buffers("growing", Growing, "tttatettt")
_buffers("quantized", lambda: quantized(False), "tttettat", "ottttttOtttt")
_buffers("quantized_and_traced", lambda: quantized(True), "tttettat")
_buffers("norms_evaluated_by_one_rank", Normed, "t1t1Lt1LLtsLt", debug=(False, True))
_buffers("tracked_and_evaluated_by_one_rank", Tracker, "t1tL1Ltts")
_buffers("hidden_writes", Hidden, "tttttttttt")


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(16, 3)
        self.register_buffer("rotary", torch.arange(16.0), persistent=False)

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        self.rotary = self.rotary if rotary is None else rotary
        return self.head(self.body(x * self.rotary))


@program(reference="average")
def made_under_inference_mode(run: Run) -> None:
    """Such buffers have no versions and take no writes."""
    model = run.trained_model(Rotated)
    for step in range(3):
        with torch.inference_mode():
            run.see(model(run.inputs(step), torch.arange(16.0) + step * (1 + run.rank)), "evaluation")
        if step == 1:
            with torch.no_grad():
                run.see(model(run.inputs(step), model.rotary.clone()), "evaluation")
        loss = model.head(model.body(run.inputs(step + 9))).square().mean()
        loss.backward()
        run.see(loss, "loss")
        run.update()
