"""Images for the scripts, as tensors: scikit-learn's handwritten digits, or a folder with one folder of files per class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, TensorDataset

from hf_zero.errors import needs

from .console import UserError

HELD_OUT = 5  # every 5th image, where a folder has no split of its own
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass
class Images:
    """Two splits of (pixels, class number), pixels of shape (channels, side, side) in [-1, 1]."""

    train: Dataset[tuple[Tensor, int]]
    eval: Dataset[tuple[Tensor, int]]
    labels: list[str]


def digits(side: int = 8, channels: int = 1) -> Images:
    """Return the 1,797 digits of 8 x 8 pixels that scikit-learn carries (UCI ML repository), enlarged to `side`.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    with needs("examples"):
        from sklearn.datasets import load_digits
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    if side != 8:
        images = interpolate(images, (side, side), mode="bilinear")
    images = images.expand(-1, channels, -1, -1).contiguous()
    held_out = torch.arange(len(images)) % HELD_OUT == 0
    numbers = torch.tensor(classes, dtype=torch.int64)
    parts = [TensorDataset(images[rows], numbers[rows]) for rows in (~held_out, held_out)]
    return Images(*parts, [str(number) for number in range(10)])


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files and their classes, read when they are asked for."""

    def __init__(self, files: Sequence[tuple[Path, int]], read: Callable[[Path], Tensor]) -> None:
        self.files, self.read = list(files), read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        path, number = self.files[row]
        return self.read(path), number


def image_folder(folder: str | Path, side: int, channels: int = 3) -> Images:
    """`folder/CLASS/*.png`, or `folder/train/CLASS/…` with `validation` or `test` next to `train`.

    Raises:
        UserError: no images, or fewer than two classes; the message lists what was found.
    """
    top = Path(folder)
    train = top / "train" if (top / "train").is_dir() else top
    held_out = next((top / name for name in ("validation", "val", "test") if (top / name).is_dir()), None)
    labels = sorted(path.name for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    if len(labels) < 2:
        raise UserError(f"{str(train)!r} must hold one folder of images per class, at least 2, found {labels}")

    def listed(root: Path) -> list[tuple[Path, int]]:
        files = [
            (path, number)
            for number, label in enumerate(labels)
            for path in sorted((root / label).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not files:
            raise UserError(f"{str(root)!r} has no images ({', '.join(SUFFIXES)}) in folders {labels}")
        return files

    read = partial(_pixels, side=side, channels=channels)
    files = listed(train)
    if held_out is not None:
        return Images(ImageFiles(files, read), ImageFiles(listed(held_out), read), labels)
    return Images(
        ImageFiles([file for row, file in enumerate(files) if row % HELD_OUT], read),
        ImageFiles(files[::HELD_OUT], read),
        labels,
    )


def _pixels(path: Path, side: int, channels: int) -> Tensor:
    with needs("examples"):
        import numpy
        from PIL import Image
    with Image.open(path) as image:
        scaled = image.convert("L" if channels == 1 else "RGB").resize((side, side), Image.Resampling.BILINEAR)
        pixels = torch.tensor(numpy.asarray(scaled), dtype=torch.float32)
    return pixels.view(side, side, channels).permute(2, 0, 1).contiguous() / 127.5 - 1
