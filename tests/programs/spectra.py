"""Complex parameters: trained, measured, clipped, saved and loaded."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import generator
from tests.oracle import Run, program
from tests.programs.clearing import Spectral
from tests.programs.usual import Optimize, of_groups


class Spectrum(nn.Module):
    """A layer in the frequency domain, between real ones."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, 5, dtype=dtype) / 3)
        self.shift = nn.Parameter(torch.randn(5, dtype=dtype))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        spectrum = torch.fft.rfft(x.float()).to(self.filter.dtype) @ self.filter + self.shift
        return self.last(torch.fft.irfft(spectrum, n=8).to(x.dtype))


def _train(run: Run, optimizer: Optimize, dtype: torch.dtype = torch.complex64) -> None:
    run.trained_model(lambda: Spectrum(dtype), optimizer)
    for step in range(4):
        run.model(torch.randn(4, 8, generator=generator(run.rank, step))).float().square().mean().backward()
        run.sync_gradients()
        for order in (2.0, 1.0, 3.0, math.inf, 0.0):
            grads = [p.grad for p in run.model.parameters()]
            run.see(nn.utils.get_total_norm(grads, order).double(), f"torch's norm of order {order}")
            run.see(bool(nn.utils.get_total_norm(grads, -math.inf) > 0), "no padding is among the elements")
            if order > 0:
                run.clip_grad_norm_(run.model, math.inf, norm_type=order)
        if step == 1:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        else:
            run.clip_grad_norm_(run.model, 0.1)
        if step == 2:
            run.see(nn.utils.clip_grad_norm_(of_groups(run), 0.05).double(), "the norm over the groups")
        run.update()


def _saved(run: Run) -> None:
    run.save(run.model)
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    run.load(run.model)
    run.model(torch.ones(4, 8)).float().square().mean().backward()
    run.update()


MORE = {"ranks": (1, 2)}


@program(reference="average", more=MORE)
def adam(run: Run) -> None:
    _train(run, lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3))
    _saved(run)


@program(reference="average", more=MORE)
def full_matrices(run: Run) -> None:
    _train(run, lambda model: Spectral(model.parameters(), lr=0.1))
    _saved(run)


@program(reference="average")
def doubles(run: Run) -> None:
    """Their values have no type in a checkpoint."""
    _train(run, lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3), torch.complex128)
    run.refuses(zero.CheckpointError, r"complex128.*torch\.save", lambda: run.save(run.model))
