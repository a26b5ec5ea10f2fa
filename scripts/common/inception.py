"""An Inception-v3-like CNN as a transformers model: branches side by side, factorised convolutions, batch norms.

After Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (arXiv 1512.00567), without the auxiliary
head; convolutions are padded to keep their size, so that small images pass too. `width` scales every channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

Conv = tuple[int, tuple[int, int], int]  # channels, kernel, stride
Branch = Sequence[Any]  # of Conv; "avg" and "max" pool, a list of branches ends side by side


def conv(channels: int, height: int, width: int | None = None, stride: int = 1) -> Conv:
    return channels, (height, width or height), stride


def _a(pooled: int) -> list[Branch]:
    return [
        [conv(64, 1)],
        [conv(48, 1), conv(64, 5)],
        [conv(64, 1), conv(96, 3), conv(96, 3)],
        ["avg", conv(pooled, 1)],
    ]


def _c(inner: int) -> list[Branch]:
    n = inner
    return [
        [conv(192, 1)],
        [conv(n, 1), conv(n, 1, 7), conv(192, 7, 1)],
        [conv(n, 1), conv(n, 7, 1), conv(n, 1, 7), conv(n, 7, 1), conv(192, 1, 7)],
        ["avg", conv(192, 1)],
    ]


_E: list[Branch] = [
    [conv(320, 1)],
    [conv(384, 1), [[conv(384, 1, 3)], [conv(384, 3, 1)]]],
    [conv(448, 1), conv(384, 3), [[conv(384, 1, 3)], [conv(384, 3, 1)]]],
    ["avg", conv(192, 1)],
]
STEM: Branch = [conv(32, 3, stride=2), conv(32, 3), conv(64, 3), "max", conv(80, 1), conv(192, 3), "max"]
BLOCKS: list[list[Branch]] = [
    _a(32),
    _a(64),
    _a(64),
    [[conv(384, 3, stride=2)], [conv(64, 1), conv(96, 3), conv(96, 3, stride=2)], ["max"]],
    _c(128),
    _c(160),
    _c(160),
    _c(192),
    [
        [conv(192, 1), conv(320, 3, stride=2)],
        [conv(192, 1), conv(192, 1, 7), conv(192, 7, 1), conv(192, 3, stride=2)],
        ["max"],
    ],
    _E,
    _E,
]


class InceptionConfig(PreTrainedConfig):
    model_type = "inception_like"

    def __init__(self, width: float = 1.0, image_size: int = 299, num_channels: int = 3, **kwargs: Any) -> None:
        self.width, self.image_size, self.num_channels = width, image_size, num_channels
        super().__init__(**kwargs)


class SideBySide(nn.Module):
    """Branches over one input, their channels one after the other."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.cat([branch(pixels) for branch in self.branches], dim=1)


def build(branch: Branch, channels: int, width: float) -> tuple[nn.Module, int]:
    """Return the layers of a branch over `channels`, and its number of output channels."""
    layers: list[nn.Module] = []
    for part in branch:
        if part == "avg":
            layers.append(nn.AvgPool2d(3, stride=1, padding=1))
        elif part == "max":
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        elif isinstance(part, tuple):
            out, kernel, stride = part
            out, padding = max(4, round(out * width)), (kernel[0] // 2, kernel[1] // 2)
            layers.append(
                nn.Sequential(
                    nn.Conv2d(channels, out, kernel, stride, padding, bias=False),
                    nn.BatchNorm2d(out, eps=1e-3),
                    nn.ReLU(),
                )
            )
            channels = out
        else:
            built = [build(inner, channels, width) for inner in part]
            layers.append(SideBySide([layer for layer, _ in built]))
            channels = sum(out for _, out in built)
    return nn.Sequential(*layers), channels


class InceptionForImageClassification(PreTrainedModel):
    config_class = InceptionConfig
    base_model_prefix = "inception"
    main_input_name = "pixel_values"
    _no_split_modules = ["SideBySide"]

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__(config)
        self.stem, channels = build(STEM, config.num_channels, config.width)
        blocks = []
        for block in BLOCKS:
            layers, channels = build([block], channels, config.width)
            blocks.append(layers)
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Linear(channels, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **_: Any) -> ImageClassifierOutput:
        """`pixel_values` of shape (batch, channels, height, width); the loss is the mean over the batch."""
        found = self.stem(pixel_values)
        for block in self.blocks:
            found = block(found)
        logits = self.classifier(found.mean((2, 3)))
        return ImageClassifierOutput(loss=None if labels is None else cross_entropy(logits, labels), logits=logits)
