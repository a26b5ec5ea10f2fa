"""The scripts without Hugging Face: an MLP on three ranks as on one, and private training with the noise it claims."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import finetune_private
import train_mlp
from common import images

import hf_zero as zero
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


TRAIN = ["--max-steps=5", "--max-train-samples=100", "--batch-size=40"]  # the third batch of an epoch has 20 images
COUNTS = (3, 0, 5)
"""Images of each rank."""
CLIP, EXPECTED, NOISE = 0.5, 7.0, 1.7


def trained(rank: int, world: int, folder: Path, *words: str) -> dict[str, float]:
    return train_mlp.main([*TRAIN, f"--output-dir={folder}", *words])


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.wide
def test_the_mlp_is_the_same_at_every_stage_and_on_any_number_of_ranks(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    (alone,) = pools[1].run(trained, tmp_path / "alone", "--zero-stage=0")
    expected = losses(tmp_path / "alone")
    assert len(expected) == 5
    assert expected[-1] < expected[0]
    for stage in (0, 2, 3):
        found, *_ = pools[3].run(trained, tmp_path / str(stage), f"--zero-stage={stage}")
        assert losses(tmp_path / str(stage)) == pytest.approx(expected, rel=2e-5)
        assert found["accuracy"] == pytest.approx(alone["accuracy"], abs=0.005)
    pools[3].run(trained, tmp_path / "resumed", "--zero-stage=3", "--max-steps=3")
    pools[3].run(trained, tmp_path / "resumed", "--zero-stage=1", "--resume")
    assert losses(tmp_path / "resumed") == pytest.approx(expected, rel=2e-5)


def private_gradients(rank: int, world: int, stage: int, counts: tuple[int, ...], **settings: Any) -> list[Tensor]:
    """Of one private backward; images come from one list, in the order of the ranks."""
    model = train_mlp.mlp([64, 64], 10)
    engine = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.ZeroConfig(stage=stage))
    first = sum(counts[:rank])
    batch = train_mlp.rows_of(images.digits().train, range(first, first + counts[rank]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1000 + rank)
    given = {"max_grad_norm": CLIP, "noise_multiplier": 0.0, "expected": EXPECTED, "generator": generator}
    norms = finetune_private.private_backward(engine, *batch, **{**given, **settings})
    assert len(norms) == counts[rank]
    found = [zero.full_gradient(param) for param in model.parameters()]
    engine.detach()
    return [gradient for gradient in found if gradient is not None]


def expected_gradients(count: int) -> list[Tensor]:
    """One process, one image at a time, clipped by torch's own function."""
    model = train_mlp.mlp([64, 64], 10)
    total = [torch.zeros_like(param) for param in model.parameters()]
    for row in range(count):
        pixels, classes = train_mlp.rows_of(images.digits().train, [row], torch.device("cpu"))
        nn.functional.cross_entropy(model(pixels), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for gradient, param in zip(total, model.parameters()):
            gradient += param.grad
            param.grad = None
    return [gradient / EXPECTED for gradient in total]


def clipped(rank: int, world: int, stage: int) -> None:
    found = private_gradients(rank, world, stage, COUNTS)
    for gradient, expected in zip(found, expected_gradients(sum(COUNTS)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    fewer = private_gradients(rank, world, stage, (3, 0, 4))
    moved = torch.stack([(a - b).square().sum() for a, b in zip(found, fewer)]).sum().sqrt()
    assert 0.5 < float(moved) * EXPECTED / CLIP < 1 + 1e-5, "how far one image moves the sum, in units of the bound"


def noisy(rank: int, world: int, stage: int) -> None:
    """No images: noise alone. Of all elements, then of each large parameter, in units of sigma * C."""
    for each, expected in ((False, 1.0), (True, math.sqrt(3))):
        found = private_gradients(rank, world, stage, (0,) * world, noise_multiplier=NOISE, each=each)
        parts = [torch.cat([gradient.flatten() for gradient in found])]
        parts += [gradient.flatten() for gradient in found if gradient.numel() > 4000]
        for part in parts:
            assert float(part.std()) * EXPECTED / (NOISE * CLIP) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("what", [clipped, noisy])
def test_gradients_are_clipped_by_sample_and_have_the_noise_that_is_claimed(
    pools: dict[int, RankPool], what: Callable[..., None], stage: int
) -> None:
    pools[3].run(what, stage)


def private(rank: int, world: int, folder: Path) -> float:
    words = ["--max-steps=3", "--batch-size=30", "--seed=1", f"--output-dir={folder}", "--zero-stage=3"]
    words += ["--max-train-samples=40", "--noise-multiplier=0"]
    with mock.patch.object(finetune_private, "poisson", wraps=finetune_private.poisson) as sampled:
        epsilon = finetune_private.main(words)["epsilon"]
    assert [(len(call.args[0]), call.args[3]) for call in sampled.call_args_list] == [(40, 0.75)] * 3
    return epsilon


def test_no_noise_is_no_privacy(pools: dict[int, RankPool], tmp_path: Path) -> None:
    assert pools[3].run(private, tmp_path) == [math.inf] * 3


def test_models_that_break_the_bound_are_refused() -> None:
    with pytest.raises(zero.ConfigError, match="'1' is a batch norm"):
        finetune_private.check_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(zero.ConfigError, match="'0' drops other values"):
        finetune_private.check_model(nn.Sequential(nn.Dropout(0.1)))
    finetune_private.check_model(nn.Sequential(nn.Dropout(0.0), nn.GroupNorm(1, 4)))


@pytest.mark.parametrize(("used", "times", "found"), [((0,), 1, "'1.bias': 0"), ((0, 1), 2, "'0.weight': 2")])
def test_a_parameter_without_noise_is_an_error(used: tuple[int, ...], times: int, found: str) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def backward() -> None:
        with finetune_private.noise_in_backward(model, 1.0, torch.Generator()):
            for _ in range(times):
                sum(model[number](torch.ones(1, 2)).sum() for number in used).backward()

    with pytest.raises(zero.StateError, match=found):
        backward()


def test_epsilon_is_the_accountants() -> None:
    pytest.importorskip("opacus")
    one, more = (finetune_private.spent(1.1, 0.01, steps, 1e-5) for steps in (1000, 4000))
    assert 0.5 < one < more < 10
    assert finetune_private.spent(2.2, 0.01, 1000, 1e-5) < one
    # Abadi et al., section 3.2: sigma 4, q 0.01, 10,000 steps, delta 1e-5 give 1.26; today's conversion is a little tighter.
    assert 1.0 < finetune_private.spent(4.0, 0.01, 10_000, 1e-5) < 1.26


def test_poisson_sampling_takes_each_image_of_a_rank_with_the_same_probability() -> None:
    data = images.digits().train
    generator = torch.Generator().manual_seed(0)
    draws = [finetune_private.poisson(data, 1, 3, 0.25, generator) for _ in range(50)]
    assert all(row % 3 == 1 for rows in draws for row in rows)
    assert len({len(rows) for rows in draws}) > 5
    assert sum(map(len, draws)) == pytest.approx(50 * 0.25 * len(range(1, len(data), 3)), rel=0.05)


def test_image_folders(tmp_path: Path) -> None:
    from PIL import Image

    for split, count in (("train", 5), ("test", 2)):
        for label, grey in (("cat", 0), ("dog", 255)):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (20, 12), grey).save(folder / f"{number}.png")
    found = images.image_folder(tmp_path, 8)
    assert (len(found.train), len(found.eval), found.labels) == (10, 4, ["cat", "dog"])
    pixels, number = found.eval[3]
    assert (tuple(pixels.shape), number) == ((3, 8, 8), 1)
    assert torch.equal(pixels, torch.ones(3, 8, 8))
    assert len(images.image_folder(tmp_path / "train", 8).eval) == 2  # every 5th, without a split of its own
    for bad in (tmp_path / "train" / "cat", tmp_path / "nothing"):
        with pytest.raises(ValueError, match="one folder of images per class"):
            images.image_folder(bad, 8)
