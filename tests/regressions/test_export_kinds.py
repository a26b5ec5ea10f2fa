"""Exports over what is already there: same kind replaced, another kind refused, everything else kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hf_zero as zero
from tests.kit.common import gpt2


def equal(one: Path, other: Path) -> bool:
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*nothing vouches")
def test_a_local_overwrite_keeps_files_of_the_user(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    mine = {
        "README.md": "# My words\n",
        "notes.txt": "mine",
        "runs/events.txt": "mine",
        "model.fp16.safetensors": "a variant",
        ".gitattributes": "*.bin filter=lfs",
        "tokenizer.json": "{}",
        "sub/model.safetensors": "of another model",
    }
    stale = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_config.json",
        "pytorch_model.bin",
    ]
    for name in [*mine, *stale]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(mine.get(name, "old"))
    (out / "link").symlink_to("notes.txt")
    with pytest.raises(zero.ConfigError, match="overwrite=True"):
        zero.export(tmp_path / "source", out)
    zero.export(tmp_path / "source", out, overwrite=True)
    assert {name: (out / name).read_text() for name in mine} == mine
    assert (out / "link").is_symlink()
    assert not [name for name in stale if (out / name).exists()]
    assert equal(out, tmp_path / "source")


TRAINERS = (
    "<!-- This model card has been generated automatically according to the information the Trainer had access to. -->"
)


@pytest.mark.filterwarnings("ignore:.*nothing vouches")
@pytest.mark.parametrize("theirs", ["{card}", f"# Mine\n{TRAINERS}", "# Mine\n## Bias\n[More Information Needed]\n"])
def test_a_local_export_keeps_an_edited_card(tmp_path: Path, theirs: str) -> None:
    """Also one that was begun as a program's: only a card with our own line, unedited, is replaced."""
    gpt2().save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    zero.export(tmp_path / "source", out)
    card = (out / "README.md").read_text()
    zero.export(tmp_path / "source", out, dtype="bfloat16", overwrite=True)
    (out / "README.md").write_text(theirs.replace("{card}", card) + "\nMy own words.\n")
    zero.export(tmp_path / "source", out, overwrite=True)
    assert (out / "README.md").read_text().endswith("My own words.\n")


@pytest.mark.filterwarnings("ignore:.*nothing vouches")
def test_an_export_takes_the_edited_card_of_its_source(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text(f"# Mine\n{TRAINERS}\nMy own words.\n")
    zero.export(tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text().endswith("My own words.\n")


def test_a_save_keeps_variants_and_warns_of_an_adapter(tmp_path: Path) -> None:
    model = gpt2()
    engine = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.ZeroConfig(stage=2))
    variants = ["model.fp16-00001-of-00002.safetensors", "model_ema-00001-of-00002.safetensors", "adapter_model.bin"]
    for name in [*variants, "model-00001-of-00002.safetensors", "pytorch_model.bin"]:
        (tmp_path / name).write_text("old")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.warns(UserWarning, match="holds an adapter"):
        engine.save(tmp_path)
    engine.detach()
    assert all((tmp_path / name).exists() for name in [*variants, "adapter_config.json"])
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert not (tmp_path / "pytorch_model.bin").exists()


def test_a_save_keeps_what_a_user_wrote_in_an_adapters_card(tmp_path: Path) -> None:
    """PEFT's own `save_pretrained` adds to the card of the folder. A save replaced it by a new one."""
    model = get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    engine = zero.shard(model, None, zero.ZeroConfig(stage=1))
    card = tmp_path / "README.md"
    engine.save(tmp_path)
    card.write_text(card.read_text().replace("[More Information Needed]", "my words", 1))
    engine.save(tmp_path)
    assert "my words" in card.read_text()
