"""Export of checkpoints and plain model folders: what comes out, what stays behind, what is refused, what a card says."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import hf_zero as zero
from hf_zero.checkpoint.cards import RUN_FILE, RunFacts
from hf_zero.checkpoint.manifest import MANIFEST, Manifest
from hf_zero.cli import main as cli
from tests.faults.faults import CHANGES, faults
from tests.kit.common import bert, gpt2, sign
from tests.kit.health import peak_growth_bytes
from tests.kit.injection import Forked
from tests.kit.jobs.harness import files_under, flip

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def _plain_folders() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nothing vouches for its bytes")
        yield


def checkpoint(folder: Path, max_shard_size: str = "50GB") -> Path:
    """What training leaves: a model, and all that does not belong to it."""
    gpt2().save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "optimizer").mkdir()
    save_file({"exp_avg": torch.zeros(4)}, folder / "optimizer" / "exp_avg.safetensors")
    for name in (
        "optimizer/optimizer.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "zero_state.json",
    ):
        (folder / name).write_text("{}")
    for name in ("scheduler.pt", "rng_state_0.pth", "training_args.bin", "events.out.tfevents.1"):
        (folder / name).write_bytes(b"\x80\x04")
    for name in ("merges.txt", "chat_template.jinja", "modeling_own.py", "LICENSE"):
        (folder / name).write_text("text")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    log = [
        {"step": 0, "eval_loss": 9.0},
        {"step": 2, "eval_loss": 5.0},
        {"step": 3, "eval_loss": 4.5, "eval_runtime": 1.0},
    ]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1.0, "log_history": log}))
    return sign(folder, {"stage": 3, "world_size": 2, "hf_zero": "1.2.3"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_shard_size", ["50GB", "30KB"])
def test_equals_save_pretrained_of_the_cast_model(tmp_path: Path, dtype: str, max_shard_size: str) -> None:
    model = bert()
    model.register_buffer("counts", torch.arange(3))  # integers are not cast
    model.save_pretrained(tmp_path / "source", max_shard_size=max_shard_size)
    model.to(DTYPES[dtype]).save_pretrained(tmp_path / "expected", max_shard_size=max_shard_size)
    out = zero.export(tmp_path / "source", tmp_path / "out", dtype=dtype)
    assert out == tmp_path / "out"
    sharded = max_shard_size == "30KB"
    for name in files_under(tmp_path / "expected"):
        if not sharded:
            assert (out / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
    weights = [
        {k: v for f in sorted(p.glob("*.safetensors")) for k, v in load_file(f).items()}
        for p in (out, tmp_path / "expected")
    ]
    assert set(weights[0]) == set(weights[1])
    for key, value in weights[1].items():
        assert weights[0][key].dtype == value.dtype
        assert torch.equal(weights[0][key], value), key
    loaded = AutoModelForMaskedLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == DTYPES[dtype]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    if sharded:
        mine, theirs = (
            json.loads((p / "model.safetensors.index.json").read_text()) for p in (out, tmp_path / "expected")
        )
        assert mine["metadata"]["total_size"] == theirs["metadata"]["total_size"]
        assert len(files_under(out)) > 5
        assert all((out / name).stat().st_size < 40_000 for name in mine["weight_map"].values())


def test_only_the_model(tmp_path: Path) -> None:
    out = zero.export(checkpoint(tmp_path / "checkpoint-3"), tmp_path / "out")
    assert files_under(out) == sorted(
        ["LICENSE", "README.md", "additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json"]
        + ["generation_config.json", "merges.txt", "model.safetensors", "modeling_own.py", "tokenizer.json"]
        + ["tokenizer_config.json", "vocab.json"]
    )
    for name in set(files_under(out)) - {"README.md"}:
        assert (out / name).read_bytes() == (tmp_path / "checkpoint-3" / name).read_bytes(), name
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() == gpt2().num_parameters()


def test_the_files_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", max_shard_size="30KB")
    kept = zero.export(source, tmp_path / "kept")
    names = [name for name in files_under(source) if name.startswith("model") and name != "modeling_own.py"]
    assert len(names) > 2
    assert [name for name in files_under(kept) if name.startswith("model") and name != "modeling_own.py"] == names
    for name in names:
        assert (kept / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel tells no peak here")
def test_memory_is_a_chunk_not_a_tensor(tmp_path: Path) -> None:
    """One tensor of 192 MiB."""
    size = 192 << 20
    header = json.dumps({"big": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    (tmp_path / "source").mkdir()
    with open(tmp_path / "source" / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # zeros that take no disk
    zero.export(checkpoint(tmp_path / "small"), tmp_path / "first", dtype="bfloat16")  # what is loaded once
    assert peak_growth_bytes(lambda: zero.export(tmp_path / "source", tmp_path / "out", dtype="bfloat16")) < 16 << 20
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > size // 2


def test_peft_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(gpt2(), config)
    model.add_adapter("other", config)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    for folder in ("source", "source/checkpoint-4"):  # the folder of a run has checkpoints of its own
        model.save_pretrained(tmp_path / folder)
    out = zero.export(sign(tmp_path / "source", {}), tmp_path / "out", dtype="bfloat16")
    assert not (out / "checkpoint-4").exists()
    assert {"adapter_model.safetensors", "other/adapter_model.safetensors", "other/adapter_config.json"} <= set(
        files_under(out)
    )
    for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        before, after = load_file(tmp_path / "source" / name), load_file(out / name)
        assert all(torch.equal(after[key], value.bfloat16()) for key, value in before.items())
    loaded = peft.PeftModel.from_pretrained(gpt2(), out)
    assert any("lora" in name for name, _ in loaded.named_parameters())
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "peft"
    assert "More Information Needed" not in card.content


# Refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda f: flip(f / "model.safetensors"), "model.safetensors is damaged"),
        (lambda f: flip(f / "optimizer" / "exp_avg.safetensors"), "exp_avg.safetensors is damaged"),
        (lambda f: os.truncate(f / "model.safetensors", 100), "model.safetensors has 100 bytes"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / MANIFEST).unlink(), "is no complete checkpoint"),
        (lambda f: shutil.rmtree(f), "is not a folder"),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, damage: Any, part: str) -> None:
    source = checkpoint(tmp_path / "source")
    damage(source)
    with pytest.raises(zero.CheckpointError, match=part):
        zero.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda f: next(f.glob("model-00002-*")).unlink(), "model-00002-of-.* is missing"),
        (lambda f: os.truncate(next(f.glob("model-00002-*")), 500), "model-00002-of-.*cut short"),
        (
            lambda f: shutil.copy(next(f.glob("model-00001-*")), next(f.glob("model-00002-*"))),
            "which .*index.json places in",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../y.safetensors"}}'),
            "leads out of the folder",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"),
        (lambda f: [p.unlink() for p in f.glob("model*")], "has no weights"),
    ],
)
def test_damaged_plain_folders(tmp_path: Path, damage: Any, part: str) -> None:
    """Without a manifest, headers and index are all there is to go by."""
    gpt2().save_pretrained(tmp_path / "source", max_shard_size="30KB")
    damage(tmp_path / "source")
    with pytest.raises(zero.CheckpointError, match=part):
        zero.export(tmp_path / "source", tmp_path / "out")


def test_a_plain_folder_is_warned_about(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "source")
    with pytest.warns(UserWarning, match="nothing vouches"):
        zero.export(tmp_path / "source", tmp_path / "out")
    assert "hf_zero" not in (tmp_path / "out" / "README.md").read_text(), "it was not trained with it"


def test_weights_that_were_added_later(tmp_path: Path) -> None:
    """Readers prefer model.safetensors to the index and files that the manifest vouches for."""
    source = checkpoint(tmp_path / "source", max_shard_size="30KB")
    gpt2().save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", source)
    with pytest.raises(zero.CheckpointError, match="added later"):
        zero.export(source, tmp_path / "out")


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    """Found in the middle of writing: the earlier export stays, nothing is left beside it."""
    source = checkpoint(tmp_path / "source")
    out = zero.export(source, tmp_path / "out")
    before = {name: (out / name).read_bytes() for name in files_under(out)}
    model = gpt2()
    model.transformer.ln_f.weight.data[0] = 1e5
    model.save_pretrained(source)
    sign(source, {})
    with pytest.raises(zero.ConfigError, match="ln_f.weight.*1e\\+05"):
        zero.export(source, out, dtype="float16", overwrite=True)
    assert before == {name: (out / name).read_bytes() for name in files_under(out)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    zero.export(source, out, dtype="bfloat16", overwrite=True)


def test_an_export_killed_at_any_call(tmp_path: Path) -> None:
    """A new output appears at once. In an existing one, no reader finds a mix, and the next export succeeds."""
    source = checkpoint(tmp_path / "source")
    other = gpt2()
    other.transformer.ln_f.weight.data[0] = 7.0
    other.save_pretrained(tmp_path / "older")
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("source", "older")}

    def export(output: Path, kill: int) -> bool:
        def run() -> None:
            with faults(tmp_path, CHANGES, kill, "kill"):
                zero.export(source, output, overwrite=True)

        return Forked(run).wait()[0] != 0

    for start in ("nothing", "an export"):
        for kill in itertools.count(0, 3):
            out = tmp_path / f"{start} {kill}" / "out"
            out.parent.mkdir()
            if start == "an export":
                zero.export(tmp_path / "older", out)
            was_killed = export(out, kill)
            if start == "nothing":
                assert not out.exists() or {"config.json", "model.safetensors"} <= set(files_under(out))
            elif (out / "config.json").exists():  # or `from_pretrained` refuses the folder
                assert (out / "model.safetensors").read_bytes() in weights.values()
            zero.export(source, out, overwrite=True)
            assert (out / "model.safetensors").read_bytes() == weights["source"]
            assert not list(out.parent.rglob(".*zero_saving*"))
            if not was_killed:
                break


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), (torch.float16, torch.float16)])
def test_names_of_dtypes(tmp_path: Path, dtype: Any, expected: torch.dtype) -> None:
    out = zero.export(checkpoint(tmp_path / "source"), tmp_path / "out", dtype=dtype)
    assert out is not None
    assert load_file(out / "model.safetensors")["transformer.ln_f.weight"].dtype == expected
    assert json.loads((out / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


def test_quantised_weights(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(zero.ConfigError, match="quantised"):
        zero.export(tmp_path / "source", tmp_path / "out", dtype="float32")
    zero.export(tmp_path / "source", tmp_path / "out")


def test_outputs_that_are_not_replaced(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    (out / ".zero_saving-x").mkdir(parents=True)
    zero.export(source, out)  # empty, but for what an export that was killed has left
    assert not (out / ".zero_saving-x").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(zero.ConfigError, match="is not empty.*overwrite=True"):
        zero.export(source, out)
    (out / "README.md").write_text("My model.")
    zero.export(checkpoint(tmp_path / "shards", max_shard_size="30KB"), out, overwrite=True)
    assert not (out / "model.safetensors").exists()
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "README.md").read_text() == "My model."
    for inside in (source, source / "inner", tmp_path):
        with pytest.raises(zero.ConfigError, match="lie in one another"):
            zero.export(source, inside, overwrite=True)


@pytest.mark.parametrize("options", [{}, {"output": "o", "dtype": "int8"}])
def test_settings(tmp_path: Path, options: dict[str, Any]) -> None:
    if "output" in options:
        options = {**options, "output": tmp_path / "out"}
    with pytest.raises(zero.ConfigError):
        zero.export(checkpoint(tmp_path / "source"), **options)


# Cards --------------------------------------------------------------------------------------------------------------


def test_card_of_a_run(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    facts = RunFacts(
        base_model="openai-community/gpt2",
        datasets=["user/corpus", "/local/corpus"],
        license="apache-2.0",
        metrics={"eval_accuracy": 0.25},
        precision="bf16",
        versions={"torch": "2.13.0"},
        hyperparameters={"learning_rate": 1e-3, "hub_token": "secret", "output_dir": "/home/me"},
    )
    facts.write(source)
    assert RunFacts.read(source) == facts
    card = zero.card_for(source, model_id="user/fine")
    assert card.data.to_dict() == {
        "base_model": "openai-community/gpt2",
        "datasets": ["user/corpus"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "metrics": ["accuracy"],
        "pipeline_tag": "text-generation",
        "tags": ["hf_zero", "zero-stage-3"],
    }
    for part in (
        "| evaluation loss | 9 before, 4.5 after |",
        "| accuracy | 0.25 |",
        "| training | 3 steps, 1 epochs |",
        "| ZeRO | stage 3 on 2 ranks |",
        "hf_zero 1.2.3",
        "torch 2.13.0",
        'AutoModelForCausalLM.from_pretrained("user/fine")',
        'AutoTokenizer.from_pretrained("user/fine")',
        "| learning_rate | 0.001 |",
    ):
        assert part in card.content, part
    assert "secret" not in card.content
    assert "/home/me" not in card.content
    given = zero.card_for(source, license="mit", datasets="user/data").data
    assert (given.license, given.datasets) == ("mit", ["user/data"])


def test_card_says_only_what_is_known(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    state = json.loads((source / "trainer_state.json").read_text())
    (source / "trainer_state.json").write_text(json.dumps({**state, "global_step": 4}))
    text = str(zero.card_for(source))
    assert "loss" not in text, "the last evaluation was of other weights"
    for absent in ("None", "license", "base_model", "Hyperparameters", "Memory", "offload"):
        assert absent not in text
    with pytest.raises(zero.ConfigError, match="colour"):
        zero.card_for(source, colour="red")
    (source / RUN_FILE).write_text('{"format": "hf_zero_run", "version": 1, "stage": "three"}')
    with pytest.raises(zero.CheckpointError, match="stage"):
        zero.card_for(source)


NONSENSE = [
    ("trainer_state.json", "log_history", 5),
    ("trainer_state.json", "global_step", "abc"),
    ("config.json", "architectures", 5),
    (RUN_FILE, "metrics", {"loss": "low"}),
    (RUN_FILE, "datasets", [5]),
]


@pytest.mark.parametrize(("name", "key", "value"), NONSENSE)
def test_a_card_names_what_it_cannot_show(tmp_path: Path, name: str, key: str, value: Any) -> None:
    (tmp_path / name).write_text(json.dumps({"format": "hf_zero_run", "version": 1, key: value}))
    with pytest.raises(zero.CheckpointError, match=rf"{name}: {key}"):
        zero.card_for(tmp_path)


def test_a_card_that_a_person_wrote_is_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\nMy model.")
    out = zero.export(source, tmp_path / "out")
    assert (out / "README.md").read_text().endswith("My model.")


# Command line -------------------------------------------------------------------------------------------------------


def test_verify_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "source")
    assert cli.main(["verify", str(source)]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"{len(Manifest.read(source).files)} files" in said
    assert "GB/s" in said
    flip(source / "merges.txt")
    assert cli.main(["verify", str(source)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "merges.txt is damaged" in said.err


def test_export_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "source")
    assert cli.main(["export", str(source), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors")["transformer.ln_f.weight"].dtype == torch.bfloat16
    assert cli.main(["export", str(source)]) == 2
    assert "Choose where to export: --output" in capsys.readouterr().err


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run's folder it takes the last checkpoint."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import export_to_hub

    for step in (2, 10):
        checkpoint(tmp_path / "run" / f"checkpoint-{step}")
    export_to_hub.main([str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--dtype", "float16"])
    assert "checkpoint-10" in "".join(capsys.readouterr().out.replace("│", "").split())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float16
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="neither weights nor checkpoints"):
        export_to_hub.main([str(tmp_path / "nothing"), "--output", str(tmp_path / "out2")])
