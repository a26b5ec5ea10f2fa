"""Differentially private training (DP-SGD) under ZeRO: per-sample clipping and noise on each rank, before the reduce.

    torchrun --nproc-per-node 2 scripts/finetune_private.py --zero-stage 3 --noise-multiplier 1.0 --max-grad-norm 1.0

One step, after Abadi et al., "Deep Learning with Differential Privacy" (arXiv 1607.00133, algorithm 1):

    1. Every image of every rank takes part with probability q (Poisson sampling, which is what the accountant assumes).
    2. The norm of each image's own gradient is measured, by `torch.autograd.grad` over micro-batches of one image: nothing
       is reduced, nothing leaves the rank.
    3. One backward of the sum of losses, each multiplied by min(1, C / norm): its gradient is the sum of clipped gradients.
    4. In that backward every parameter's gradient gets this rank's noise before the engine has it. Over all ranks the noise
       has the standard deviation sigma * C (`--noise total`: each rank adds 1 / sqrt(ranks) of it), or each rank's alone has
       (`--noise each`, where the ranks do not trust each other: docs/PRIVACY.md).
    5. The sum is divided by the *expected* number of images.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Subset
from train_mlp import accuracy, flags, load, mlp, rows_of, start

import hf_zero as zero
from hf_zero.errors import needs


def sample_norms(model: nn.Module, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the norm of each image's gradient over all trained parameters. Local: no gradients are communicated."""
    params = [param for param in model.parameters() if param.requires_grad]
    norms = []
    for row in range(len(classes)):
        loss = cross_entropy(model(pixels[row : row + 1]), classes[row : row + 1])
        grads = torch.autograd.grad(loss, params)
        norms.append(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())
    return torch.stack(norms).float() if norms else pixels.new_zeros(0)


def check_model(model: nn.Module) -> None:
    """
    Raises:
        ConfigError: a layer makes an image's gradient depend on other images or on chance, so its bound would not hold.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise zero.ConfigError(f"{name!r} is a batch norm, which mixes images: use GroupNorm or LayerNorm")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            raise zero.ConfigError(
                f"{name!r} drops other values when a gradient is measured than when it is used: p = 0"
            )


@contextmanager
def noise_in_backward(model: nn.Module, deviation: float, generator: torch.Generator) -> Iterator[None]:
    """Add normal noise of this standard deviation to the gradients of the one backward inside, before they are reduced.

    Raises:
        StateError: a trained parameter got no gradient, and so no noise, or got more than one: the guarantee would not hold.
    """
    counts: dict[str, int] = {}

    def add(name: str, gradient: Tensor) -> Tensor:
        counts[name] += 1
        noise = torch.empty(gradient.shape, dtype=torch.float32, device=generator.device)
        noise.normal_(0.0, deviation, generator=generator) if deviation else noise.zero_()
        return gradient + noise.to(gradient)

    handles = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            counts[name] = 0
            handles.append(param.register_hook(lambda gradient, name=name: add(name, gradient)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    wrong = {name: count for name, count in counts.items() if count != 1}
    if wrong:
        raise zero.StateError(
            f"expected one gradient of each parameter in this backward, found {wrong}: every trained parameter must be used, "
            "and activation checkpointing must be off, for noise to be added once"
        )


def private_backward(
    engine: zero.Engine,
    pixels: Tensor,
    classes: Tensor,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    expected: float,
    generator: torch.Generator,
    each: bool = False,
) -> Tensor:
    """Leave (sum of clipped gradients + noise) / `expected` as the gradient. A collective; ranks may have any number of images.

    Args:
        expected: images in a step, of all ranks together: their number times the probability of each. Not the number drawn.
        each: noise of the full deviation on every rank.

    Returns:
        The norms before clipping, of this rank's images. They are private: do not publish them.
    """
    model = engine.model
    real = len(classes)
    most = max(engine.exchange(real))
    # At stage 3 a forward is a collective: every rank makes as many. Ranks with fewer add images of weight 0.
    if real < max(most, 1):
        stand_in = max(most, 1) - real
        pixels = torch.cat([pixels, pixels.new_zeros(stand_in, *pixels.shape[1:])])
        classes = torch.cat([classes, classes.new_zeros(stand_in)])
    norms = sample_norms(model, pixels, classes)
    factors = (max_grad_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
    factors[real:] = 0.0
    scale = engine.world_size / expected  # the engine takes the mean over ranks
    deviation = noise_multiplier * max_grad_norm / (1.0 if each else math.sqrt(engine.world_size))
    with noise_in_backward(model, scale * deviation, generator):
        losses = cross_entropy(model(pixels), classes, reduction="none")
        ((losses * factors).sum() * scale).backward()
    return norms[:real]


def poisson(data: Dataset, rank: int, world: int, probability: float, generator: torch.Generator) -> list[int]:
    """Draw this rank's images of one step: each of its own images has the same probability."""
    own = range(rank, len(data), world)  # type: ignore[arg-type]
    drawn = torch.rand(len(own), generator=generator) < probability
    return [row for row, taken in zip(own, drawn.tolist()) if taken]


def spent(noise_multiplier: float, probability: float, steps: int, delta: float) -> float:
    """Return epsilon after `steps`, by opacus's RDP accountant; infinite without noise.

    Raises:
        ConfigError: opacus is not installed.
    """
    if not noise_multiplier:
        return math.inf
    with needs("privacy"):
        from opacus.accountants import RDPAccountant
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, probability, steps)]
    return float(accountant.get_epsilon(delta))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; return accuracy and epsilon."""
    parser = flags()
    parser.description = (__doc__ or "").partition("\n")[0]
    parser.set_defaults(learning_rate=0.5, batch_size=128, output_dir="runs/private")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="C: the bound on each image's gradient")
    parser.add_argument("--noise-multiplier", type=float, default=1.0, help="sigma: standard deviation of noise / C")
    parser.add_argument(
        "--noise", choices=("total", "each"), default="total", help="sigma of the noise: of the sum, or of each rank"
    )
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument(
        "--seed", type=int, help="of sampling and noise, for tests: the guarantee needs it to be secret"
    )
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    device = start()
    images = load(options)
    size = min(options.max_train_samples or len(images.train), len(images.train))  # type: ignore[arg-type]
    train = Subset(images.train, range(size))
    model = mlp(options.hidden, len(images.labels)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)  # Adam would see noise in every state
    config = zero.ZeroConfig(stage=options.zero_stage, offload_optimizer=options.zero_offload_optimizer)
    check_model(model)
    engine = zero.shard(model, optimizer, config)
    rank, world = engine.rank, engine.world_size
    # Must differ between ranks: equal noise would be known, and would add up to more than the accountant assumes.
    seed = secrets.randbits(62) if options.seed is None else options.seed * world + rank
    noise, draws = torch.Generator(device).manual_seed(seed), torch.Generator().manual_seed(seed + (1 << 62))
    probability = min(1.0, options.batch_size / size)
    epsilon = spent(options.noise_multiplier, probability, options.max_steps, options.delta)
    if rank == 0:
        print(f"({epsilon:.2f}, {options.delta:g})-differentially private after {options.max_steps} steps", flush=True)
    for _ in range(options.max_steps):
        pixels, classes = rows_of(train, poisson(train, rank, world, probability, draws), device)
        private_backward(
            engine,
            pixels,
            classes,
            max_grad_norm=options.max_grad_norm,
            noise_multiplier=options.noise_multiplier,
            expected=probability * size,
            generator=noise,
            each=options.noise == "each",
        )
        optimizer.step()
        optimizer.zero_grad()
    result = {"accuracy": accuracy(engine, images.eval, device), "epsilon": epsilon}
    engine.save(f"{options.output_dir}/checkpoint")
    if rank == 0:
        print(f"{world} rank(s), stage {options.zero_stage}: accuracy {result['accuracy']:.1%}, epsilon {epsilon:.2f}")
    engine.detach()
    return result


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
