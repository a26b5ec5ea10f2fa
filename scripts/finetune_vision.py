"""Train an image classifier (ViT, ResNet, Inception) under ZeRO with the stock `transformers.Trainer`.

    torchrun --nproc-per-node 2 scripts/finetune_vision.py --zero-stage 3                       # resnet-tiny on digits
    torchrun --nproc-per-node 2 scripts/finetune_vision.py --model resnet-50 --dataset images/  # images/CLASS/*.png

Every image of a step has the same weight, on any number of ranks, in batches of any size. Pixels are in [-1, 1].
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.arguments import DataArguments, answer_help
from common.console import UserError, check_output, check_space, examples, run

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel


TINY_STEPS = 60
_VIT_TINY = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "vit-tiny": ("vit", _VIT_TINY),
    "vit-base": ("vit", {}),
    "resnet-tiny": ("resnet", {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "resnet-50": ("resnet", {}),
    "inception-tiny": ("inception", {"width": 0.0625, "image_size": 32}),
    "inception-v3": ("inception", {}),
}
"""Model type and settings of each built-in model."""


@dataclass
class VisionArguments(DataArguments):
    """Arguments of this script."""

    model: str | None = field(
        default="resnet-tiny",
        metadata={"help": f"Hub id, local folder, or a model from scratch: {', '.join(BUILT_IN)}"},
    )
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "folder/CLASS/*.png, or folder/train/CLASS/*.png and test/; without it, scikit-learn's digits"
        },
    )
    image_size: int | None = field(default=None, metadata={"help": "pixels of a side; by default the model's own"})


def defaults(script: VisionArguments, given: set[str]) -> dict[str, Any]:
    """Return the Trainer's arguments where the user gave none."""
    from common.flags import run_defaults

    scratch = script.model in BUILT_IN
    chosen = run_defaults(script, given, name="images", scratch=scratch, steps=TINY_STEPS)
    return chosen | ({"learning_rate": 3e-3 if script.tiny else 1e-3} if scratch else {})


def _config(name: str) -> PreTrainedConfig:
    from common.inception import InceptionConfig
    from transformers import AutoConfig

    if name not in BUILT_IN:
        return AutoConfig.from_pretrained(name)
    kind, settings = BUILT_IN[name]
    return InceptionConfig(**settings) if kind == "inception" else AutoConfig.for_model(kind, **settings)


def load_model(name: str, size: int | None, labels: Sequence[str]) -> tuple[PreTrainedModel, int]:
    """Return the model for these classes, and the side of its images in pixels.

    Raises:
        UserError: neither a built-in name, nor a folder or Hub id of an image classifier.
    """
    from common.inception import InceptionConfig, InceptionForImageClassification
    from transformers import AutoModelForImageClassification

    numbers: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    try:
        config = _config(name)
        own = int(getattr(config, "image_size", None) or (32 if name.endswith("-tiny") else 224))
        for key, value in {"num_labels": len(labels), **numbers}.items():
            setattr(config, key, value)
        if hasattr(config, "image_size"):
            config.image_size = size or own
        if isinstance(config, InceptionConfig):
            model: PreTrainedModel = InceptionForImageClassification(config)
        elif name in BUILT_IN:
            model = AutoModelForImageClassification.from_config(config)
        else:
            model = AutoModelForImageClassification.from_pretrained(name, config=config, ignore_mismatched_sizes=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no image model {name!r}: expected one of {', '.join(BUILT_IN)}, a local folder or a Hub id that can be "
            f"reached from here; found {type(error).__name__}: {error}"
        ) from error
    return model, size or own


def collate(rows: Sequence[tuple[Tensor, Any]]) -> dict[str, Tensor]:
    """Turn rows of (pixels, class number) into the model's keywords."""
    import torch

    pixels, classes = zip(*rows)
    return {"pixel_values": torch.stack(pixels), "labels": torch.tensor([int(number) for number in classes])}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; return the final evaluation metrics."""
    words = sys.argv[1:] if argv is None else argv
    answer_help(words, VisionArguments, __doc__)
    with examples():
        from common.metrics import class_metrics
    from common.flags import parse_flags
    from common.images import digits, image_folder
    from common.run import each_item_alike, train_and_save
    from torch.utils.data import Subset
    from transformers import Trainer, set_seed

    import hf_zero as zero

    script, args = parse_flags(words, (VisionArguments, zero.ZeroTrainingArguments), defaults, __doc__)
    check_output(args.output_dir)
    name = str(script.model)
    labels = [str(number) for number in range(10)]
    if script.dataset:
        labels = image_folder(script.dataset, 1).labels
    set_seed(args.seed)
    model, side = load_model(name, script.image_size, labels)
    images = image_folder(script.dataset, side) if script.dataset else digits(side, channels=3)
    check_space(args.output_dir, model)
    limits = (script.max_train_samples, script.max_eval_samples or (128 if script.tiny else None))
    train, held_out = (
        Subset(data, range(min(limit or len(data), len(data))))  # type: ignore[arg-type]
        for data, limit in zip((images.train, images.eval), limits)
    )
    args.remove_unused_columns = False  # rows are tuples: there are no columns
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        compute_metrics=class_metrics(),
        compute_loss_func=each_item_alike,
        callbacks=[zero.ZeroCallback(verbose=script.verbose)],
    )
    return train_and_save(trainer, title=f"{name} · images of {side} x {side}")


if __name__ == "__main__":
    run(main)
