"""A GPT-2-shaped model under ZeRO, started by Ray Train: `python scripts/launch/ray_train.py --workers 16`. Needs `ray[train]`.

Ray opens the process group and names the device; what is in `train` is the code that torchrun would start.
"""

from __future__ import annotations

import argparse
from typing import Any


def train(settings: dict[str, Any]) -> None:
    import torch
    from ray.train import Checkpoint, get_context, report
    from ray.train.torch import get_device
    from transformers import GPT2Config, GPT2LMHeadModel

    import hf_zero as zero

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4)).to(get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=settings["stage"]))
    generator = torch.Generator().manual_seed(get_context().get_world_rank())
    for step in range(settings["steps"]):
        ids = torch.randint(model.config.vocab_size, (4, 128), generator=generator).to(get_device())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report({"step": step, "loss": loss.item()})
    engine.save(settings["output"])  # on all ranks
    report({}, checkpoint=Checkpoint.from_directory(settings["output"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="train on CPU workers")
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--output-dir", default="/tmp/hf_zero_ray", help="a folder that every worker sees")
    given = parser.parse_args()

    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"stage": given.zero_stage, "steps": given.max_steps, "output": given.output_dir},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=not given.cpu),
        torch_config=TorchConfig(backend="gloo" if given.cpu else "nccl"),
    ).fit()


if __name__ == "__main__":
    main()
