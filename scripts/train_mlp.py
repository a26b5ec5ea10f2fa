"""A plain `nn.Module` under ZeRO without Hugging Face: an MLP on handwritten digits, `zero.shard` and torchrun.

    torchrun --nproc-per-node 3 scripts/train_mlp.py --zero-stage 3
    torchrun --nproc-per-node 3 scripts/train_mlp.py --zero-stage 3 --resume    # continues, on any number of ranks
    torchrun --nproc-per-node 3 --max-restarts 5 scripts/train_mlp.py --save-steps 20 --resume    # restarts itself

Ranks split one batch as evenly as possible. `engine.weigh` gives every image the same weight, so that any number of ranks
trains the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from common.images import Images, digits, image_folder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import hf_zero as zero

SIDE = 8


@dataclass
class Progress:
    """State of the training loop, stored in checkpoints."""

    step: int = 0
    losses: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "losses": self.losses}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.step, self.losses = int(state["step"]), list(state["losses"])  # type: ignore[call-overload]


def flags() -> argparse.ArgumentParser:
    """Return a parser with the flags that every plain training run has."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--zero-stage", type=int, default=2, help="0: plain data parallel; 1, 2, 3")
    parser.add_argument("--zero-offload-optimizer", default="none", help="none, cpu, disk or auto")
    parser.add_argument("--dataset", help="a folder with one folder of images per class; without it, the digits")
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 64], help="widths of the hidden layers")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, of all ranks together")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--max-train-samples", type=int, help="use only so many images")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/mlp"))
    return parser


def start() -> torch.device:
    """Join the ranks that torchrun started, if any; return the device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def load(options: argparse.Namespace) -> Images:
    """Load the digits, or the given folder."""
    return image_folder(options.dataset, SIDE, channels=1) if options.dataset else digits(SIDE)


def mlp(widths: Sequence[int], classes: int) -> nn.Module:
    """Build the same model on every rank. No BatchNorm: its statistics depend on how ranks split the batch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip([SIDE * SIDE, *widths], widths):
        layers.append(nn.Sequential(nn.Linear(before, after), nn.LayerNorm(after), nn.GELU()))
    return nn.Sequential(*layers, nn.Linear([SIDE * SIDE, *widths][-1], classes))


def rows_of(data: Dataset, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch; without rows it has no images."""
    if not rows:
        return torch.zeros(0, 1, SIDE, SIDE, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    pixels, classes = zip(*(data[row] for row in rows))
    return torch.stack(pixels).to(device), torch.tensor([int(number) for number in classes], device=device)


@torch.no_grad()
def accuracy(engine: zero.Engine, data: Dataset, device: torch.device) -> float:
    """Return the share of held-out images that are classified correctly. Each rank checks its share; collective."""
    engine.model.eval()
    pixels, classes = rows_of(data, range(engine.rank, len(data), engine.world_size), device)  # type: ignore[arg-type]
    right = int((engine.model(pixels).argmax(1) == classes).sum())
    engine.model.train()
    return sum(engine.exchange(right)) / len(data)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; return the last loss and the accuracy."""
    parser = flags()
    parser.description = __doc__
    parser.add_argument(
        "--save-steps", type=int, default=0, help="steps from checkpoint to checkpoint; 0: one at the end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest whole checkpoint, or start fresh"
    )
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    device = start()
    images = load(options)
    model = mlp(options.hidden, len(images.labels)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    config = zero.ZeroConfig(stage=options.zero_stage, offload_optimizer=options.zero_offload_optimizer)
    engine = zero.shard(model, optimizer, config)
    rank, world, progress = engine.rank, engine.world_size, Progress()
    newest = zero.latest_checkpoint(options.output_dir) if options.resume else None
    if newest is not None:
        engine.load(newest, objects={"progress": progress})
    elif options.resume and rank == 0:
        print(f"No checkpoint in {options.output_dir}: training starts fresh.", flush=True)

    def save() -> None:
        engine.save(options.output_dir / f"checkpoint-{progress.step}", objects={"progress": progress})
        zero.prune_checkpoints(options.output_dir, keep=2)

    size = min(options.max_train_samples or len(images.train), len(images.train))  # type: ignore[arg-type]
    batches = -(-size // options.batch_size)  # the last one may be smaller
    while progress.step < options.max_steps:
        epoch, batch = divmod(progress.step, batches)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()
        rows = order[batch * options.batch_size : (batch + 1) * options.batch_size]
        pixels, classes = rows_of(images.train, rows[rank::world], device)
        loss = engine.weigh(cross_entropy(model(pixels), classes), len(classes))
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.losses.append(sum(engine.exchange(loss.item())) / world)  # the mean over all images of the batch
        if rank == 0 and progress.step % 10 == 0:
            print(f"step {progress.step}: loss {progress.losses[-1]:.4f}", flush=True)
        if options.save_steps and progress.step % options.save_steps == 0 and progress.step < options.max_steps:
            save()

    result = {"loss": progress.losses[-1], "accuracy": accuracy(engine, images.eval, device)}
    save()
    if rank == 0:
        (options.output_dir / "losses.json").write_text(json.dumps(progress.losses))
        print(f"{world} rank(s), stage {options.zero_stage}: accuracy {result['accuracy']:.1%}; {options.output_dir}")
    engine.detach()
    return result


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
