"""hf-zero plan and hf-zero probe as they are typed: names of models, tables, and settings that fit."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from transformers import GPT2LMHeadModel, TrainingArguments

import hf_zero as zero
from hf_zero.cli import main as cli
from hf_zero.plan.machine import measurements_path as measured_file
from tests.cli.test_hostile_input import refused
from tests.kit.common import gpt2

EIGHT = 8_030_261_248


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache and a width of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "cache" / "hf_zero"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "gpt2"
    gpt2(n_layer=3, n_embd=64).save_pretrained(path)
    return path


def run(capsys, *arguments: object, status: int = 0) -> str:
    found = cli.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    assert found == status, out.err
    return out.out


def values_of(capsys, *arguments: object, status: int = 0):
    return json.loads(run(capsys, "plan", *arguments, "--json", status=status))


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("7B", 6_940_798_976), ("124,439,808", 124_439_808), ("350_000K", 354_823_168),
        ("gpt2", 124_439_808), ("GPT2-XL", 1_557_611_200), ("gpt2-tiny", 2_615_424),
        ("meta-llama/Meta-Llama-3-8B", EIGHT), ("llama3-8b", EIGHT), ("Llama-3.1-8B-Instruct", EIGHT),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096), ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
    ],
)  # fmt: skip
def test_names_that_need_no_network(name, count, capsys):
    values = values_of(capsys, name, "--zero-stage", 3)
    assert values["parameters"] == count
    assert ("assumed" in values["structure"]) == name[0].isdecimal()


def test_an_unknown_name_fails_at_once_with_the_closest(capsys, monkeypatch):
    """Without torch: `python -m hf_zero` loads it after the name is found."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started = time.process_time()
    assert "Did you mean llama-3-8b" in refused(capsys, "plan", "lama-3-8b")
    assert "plan its size: hf-zero plan 7B" in refused(capsys, "plan", "Qwen/Qwen2.5-7B-Instruct")
    assert time.process_time() - started < 2
    code = "import sys; from hf_zero.cli.main import main; main(['plan', 'lama-3-8b']); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "False\n"


def test_quantized_weights_are_said_not_to_be_counted(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert values_of(capsys, folder, "--zero-stage", 3)["structure"] == "its quantization is not counted"


def test_paths_come_first(tmp_path, monkeypatch, capsys):
    model = gpt2(n_layer=2, n_embd=32)
    model.save_pretrained(tmp_path / "7B")
    monkeypatch.chdir(tmp_path)
    numel = sum(param.numel() for param in model.parameters())
    for given in ("7B", "7B/config.json", "./7B", str(tmp_path / "7B")):
        assert values_of(capsys, given, "--zero-stage", 3)["parameters"] == numel, given


def test_lora_trains_a_small_part(capsys, folder, tmp_path):
    """Of every matrix of the blocks, as PEFT counts it; the base is frozen in bfloat16, or in 4 bits."""
    full = values_of(capsys, "llama3-8b", "--zero-stage", 3, "--world-size", 1)
    lora = values_of(capsys, "llama3-8b", "--zero-stage", 3, "--world-size", 1, "--lora", 16)
    assert lora["parameters"] - lora["trainable"] == full["parameters"] == EIGHT
    assert lora["trainable"] == 16 * 32 * (4096 * 2 + 2 * (4096 + 1024) + 4096 * 2 + 3 * (4096 + 14336))
    assert lora["stored_bytes"]["device"] == pytest.approx(2 * EIGHT + 18 * lora["trainable"], rel=1e-3)
    quantized = values_of(capsys, "llama3-8b", "--zero-stage", 3, "--world-size", 1, "--lora", 16, "--load-in-4bit")
    assert quantized["trainable"] == lora["trainable"]
    assert quantized["stored_bytes"]["device"] < 0.45 * lora["stored_bytes"]["device"]
    assert "(0.52% trainable)" in run(capsys, "plan", "llama3-8b", "--lora", 16)
    adapted = get_peft_model(gpt2(n_layer=3, n_embd=64), LoraConfig(r=4, target_modules=["c_attn", "c_fc", "c_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "adapter")
    trainable = sum(param.numel() for param in adapted.parameters() if param.requires_grad)
    for arguments in ((tmp_path / "adapter",), (folder, "--lora", 4)):
        assert values_of(capsys, *arguments, "--zero-stage", 3)["trainable"] == trainable
    assert "adapter already" in refused(capsys, "plan", tmp_path / "adapter", "--lora", 4)


# Answers ------------------------------------------------------------------------------------------


def suggested(out: str) -> tuple[list[str], TrainingArguments]:
    """The words of the command, and the arguments that the code makes."""
    (command,) = re.findall(r"^    (torchrun .*)$", out, re.MULTILINE)
    (code,) = re.findall(r"^    (TrainingArguments\(.*?^    \))$", out, re.MULTILINE | re.DOTALL)
    code = code.replace("bf16=True", "bf16=False")  # the Trainer asks the GPU
    return shlex.split(command), eval(code, {"zero": zero, "TrainingArguments": TrainingArguments})


def plan_flags(words: list[str]) -> list[str]:
    """A script's flags as those of `plan`."""
    out: list[str] = []
    renamed = {"--per-device-train-batch-size": "--batch", "--gradient-accumulation-steps": "--accumulation"}
    for word in words[words.index("out") + 1 :]:
        out += ["--mixed-precision", "bf16"] if word == "--bf16" else [renamed.get(word, word)]
    return out


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama-3-8b", ["--world-size", "4", "--batch", "4", "--sequence", "4096"]),
        ("llama-3-8b", ["--world-size", "1", "--lora", "16"]),
        ("7B", ["--world-size", "2", "--accumulation", "2"]),
    ],
)
def test_what_is_suggested_fits(model, more, capsys):
    """By the planner itself, with the flags of the command."""
    memory = ["--device-memory", "24GiB", "--host-memory", "100GiB"]
    out = run(capsys, "plan", model, *more, *memory)
    assert out.splitlines()[0].startswith(f"{model}: ")
    assert "24.00 GiB fits stage" in out
    words, arguments = suggested(out)
    assert arguments.parallelism_config.config.stage == int(words[words.index("--zero-stage") + 1])
    asked = [*more[:2], *plan_flags(words), *memory]
    for flag in ("--sequence", "--lora"):
        asked += more[more.index(flag) :][:2] if flag in more else []
    values = values_of(capsys, model, *asked)
    assert values["fits"]
    assert values["peak_bytes"]["device"] <= 24 << 30


def test_rows_that_do_not_fit_together_are_taken_one_by_one(capsys):
    memory = ["--sequence", "1024", "--device-memory", "4GiB", "--host-memory", "100GiB"]
    out = run(capsys, "plan", "gpt2-124m", "--batch", "32", "--accumulation", "2", *memory)
    assert "one sequence at a time" in " ".join(out.split())
    _, arguments = suggested(out)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (1, 64)


def test_each_size_of_gpu_has_settings(capsys):
    out = run(capsys, "plan", "7B")
    assert "bf16, 8 ranks, batch 1 of 2,048 tokens per rank" in " ".join(out.split())
    for size in ("8 GB", "12 GB", "16 GB", "24 GB", "40 GB", "48 GB", "80 GB", "141 GB"):
        assert size in out
    assert suggested(out)[1].gradient_checkpointing in (True, False)
    assert "torchrun --nnodes 2 --node-rank NODE --master-addr" in run(capsys, "plan", "7B", "--world-size", 16)
    words, arguments = suggested(
        run(capsys, "plan", "gpt2-tiny", "--zero-offload-optimizer", "cpu", "--zero-step-in-backward")
    )
    assert (words[words.index("--max-grad-norm") + 1], arguments.max_grad_norm) == ("0", 0)


def test_one_peak_has_one_number(capsys):
    """The answer, the table of GPUs and the table of stages print the same bytes for the same settings."""
    out = " ".join(run(capsys, "plan", "llama3-8b", "--world-size", 8, "--device-memory", "40GiB").split())
    (answer,) = re.findall(r"fits stage 3: (\S+ GiB) of device memory", out)
    assert f"│ {answer} │ yes │" in out
    out = run(capsys, "plan", "llama3-8b", "--world-size", 8)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    by_gpu = {row[1]: row[2] for row in rows if len(row) == 4 and row[0]}
    by_stage = {f"stage {row[0]}": row[4] for row in rows if len(row) == 5}
    assert {name: by_stage[name] for name in by_gpu.keys() & by_stage.keys()} == {
        name: by_gpu[name] for name in ("stage 2", "stage 3")
    }


def test_what_does_not_fit_exits_with_1(capsys):
    little = [word for name in ("device-memory", "host-memory", "disk-space") for word in (f"--{name}", "8GiB")]
    out = run(capsys, "plan", "70B", "--world-size", 1, *little, status=1)
    assert "Nothing fits" in out
    out = run(capsys, "plan", "7B", "--zero-stage", 2, "--device-memory", "24GiB", status=1)
    assert "24.00 GiB fits stage 3" in out
    assert "device_memory is short of" in " ".join(out.split())
    out = run(capsys, "plan", "7B", "--world-size", 1, "--host-memory", "1GiB")
    assert "141 GB GPUs fit stage 2" in out
    assert "on cpu" not in out


@pytest.mark.parametrize("more", [(), ("--zero-stage", "3"), ("--device-memory", "8GiB")])
def test_no_table_is_wider_than_the_terminal(capsys, more):
    tables = [line for line in run(capsys, "plan", "7B", *more).splitlines() if line and line[0] in "│┃┏├└┡"]
    assert tables
    assert all(len(line) <= 80 for line in tables)
    assert not any("…" in line or "0.00 " in line for line in tables)


def test_colour_only_in_a_terminal(capsys, monkeypatch):
    assert "\x1b" not in run(capsys, "plan", "7B")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in run(capsys, "plan", "7B")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in run(capsys, "plan", "7B")


# Numbers ------------------------------------------------------------------------------------------


def test_one_stage_with_all_details(capsys, folder):
    out = run(capsys, "plan", folder, "--world-size", 2, "--zero-stage", 3, "--zero-offload-optimizer", "cpu",
              "--batch", 2, "--sequence", 16, "--host-memory", "1GiB")  # fmt: skip
    in_one_line = " ".join(out.split())
    assert "tokens per rank stage 3 + optimizer on cpu: " in in_one_line
    assert "--nproc-per-node RANKS -m hf_zero probe" in in_one_line
    for word in ("device", "host", "gathered", "communication", "staging", "activations (estimate)", "budget",
                 "down, to host memory", "up, to the device",
                 "optimizer, on the host", "as offload_optimizer='cpu' says"):  # fmt: skip
        assert word in out, word


def test_json_has_the_split_by_state_and_tier(capsys, folder):
    values = values_of(capsys, folder, "--world-size", 2, "--zero-stage", 2, "--zero-offload-optimizer", "disk")
    assert values["parameters"] == sum(p.numel() for p in gpt2(n_layer=3, n_embd=64).parameters())
    assert values["states_bytes_per_rank"] == sum(values["states"].values())
    for kind in ("parameters", "gradients", "optimizer"):
        assert values["states"][kind] == sum(values["stored"][tier][kind] for tier in ("device", "host", "disk"))
    assert values["stored"]["disk"]["optimizer"] > 0
    assert values["stored"]["device"]["optimizer"] == 0


@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_a_folder_is_planned_as_it_is_loaded(mode, capsys, tmp_path):
    """In the type that it was saved in; a frozen base keeps no float32."""
    gpt2(n_layer=3, n_embd=64).bfloat16().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        GPT2LMHeadModel.from_pretrained(tmp_path / "base"), LoraConfig(r=4, target_modules=["c_fc"])
    )
    adapted.save_pretrained(tmp_path / "adapter")
    for name, model in (("adapter", adapted), ("base", GPT2LMHeadModel.from_pretrained(tmp_path / "base"))):
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3), mixed_precision=mode)
        values = values_of(capsys, tmp_path / name, "--world-size", 1, "--zero-stage", 3, "--mixed-precision", mode)
        assert values["states"] == engine.plan.to_dict()["states"], name
        engine.detach()


def test_all_stages_side_by_side(capsys, folder):
    plans = values_of(capsys, folder, "--world-size", 4)
    assert [made["stage"] for made in plans] == [0, 1, 2, 3]
    sizes = [made["states_bytes_per_rank"] for made in plans]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]
    out = run(capsys, "plan", folder, "--world-size", 4, "--zero-offload-params", "cpu")
    assert "stage 0: offload_params='cpu' needs stage 3" in out
    out = run(capsys, "plan", folder, "--world-size", 4, "--zero-replicas", 2, "--zero-wire", "int8")
    assert "needs stage 1, 2 or 3" in out


def test_auto_for_a_machine_in_a_file(capsys, folder, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"device_memory": 2 * 10**6, "host_memory": 2 * 10**9, "disk_free": 10**9, "link_down": 1e10,
                                "link_up": 1e10, "host_bandwidth": 1e10, "device_bandwidth": 1e12,
                                "flops": {"bfloat16": 1e12, "float32": 1e12}}))  # fmt: skip
    values = values_of(capsys, folder, "--world-size", 1, "--zero-stage", 2, "--machine", path, "--sequence", 16,
                       "--zero-offload-optimizer", "auto", "--zero-offload-params", "auto")  # fmt: skip
    assert values["fits"]
    assert values["peak_bytes"]["device"] <= 2 * 10**6
    assert values["peak_bytes"]["host"] > 0
    assert values["step_s"] > 0


def test_long_sequences(capsys):
    """Bytes of the inputs of 32 blocks, of chunks of logits, and what attention exchanges."""
    eight = (
        "plan",
        "llama-3-8b",
        "--mixed-precision",
        "no",
        "--zero-stage",
        3,
        "--batch",
        1,
        "--sequence",
        131072,
        "--zero-sp-size",
        8,
        "--json",
    )
    options = ("--gradient-checkpointing", "--zero-offload-activations")
    plain, cpu, disk = (json.loads(run(capsys, *eight, *options, where)) for where in ("none", "cpu", "disk"))
    one = 131072 // 8 * 4096 * 4
    assert [cpu["peak"][tier]["activations"] for tier in ("host", "disk")] == [32 * one, 0]
    assert [disk["peak"][tier]["activations"] for tier in ("host", "disk")] == [5 * one, 32 * one]
    assert plain["peak"]["device"]["activations"] - cpu["peak"]["device"]["activations"] == 30 * one
    assert cpu["traffic"]["down"] == cpu["traffic"]["up"] == disk["traffic"]["write"] == 32 * one
    assert disk["traffic"]["read"] == 28 * one
    # Queries, outputs, keys and values, each rank its 7/8, in forward, recomputation and backward.
    assert cpu["traffic"]["sequence"] == 3 * 32 * one * (2 + 2 / 4) * 7 / 8
    chunked = json.loads(run(capsys, *eight, *options, "cpu", "--zero-chunked-loss", "true"))
    assert chunked["peak"]["device"]["activations"] < cpu["peak"]["device"]["activations"] / 3
    printed = run(capsys, *eight[:-1], "--zero-stage", 3, "--device-memory", "80GB", *options, "cpu")
    assert "inputs of checkpointed blocks: on cpu" in " ".join(printed.split())


def test_units_that_stay_gathered_are_shown(capsys):
    arguments = ["gpt2", "--world-size", 8, "--zero-stage", 3]
    bare, kept = (values_of(capsys, *arguments, *more) for more in ((), ("--keep-gathered", "200MiB")))
    assert not bare["kept"]
    assert kept["kept"]
    assert kept["traffic"]["gather"] < bare["traffic"]["gather"]


def fresh() -> None:
    """The command is a process of its own; tests before this one were not."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_a_probe_is_kept_and_used(capsys, cache, folder, tmp_path):
    """A file of another version, or a damaged one, is no error in plans and training, and is replaced."""
    cache.mkdir(parents=True)
    measured_file().write_text('{"speed": 1}')
    before = values_of(capsys, folder, "--world-size", 1, "--zero-stage", 3, "--sequence", 16)
    assert before["step_s"] is None
    fresh()
    Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin()).prepare(torch.nn.Linear(2, 2))
    fresh()
    (tmp_path / "disk").mkdir()
    measured = json.loads(run(capsys, "probe", "--json", "--offload-dir", tmp_path / "disk"))
    for name in ("host_bandwidth", "device_bandwidth", "link_down", "link_up", "disk_read", "disk_write"):
        assert 1e7 < measured[name] < 1e13, name
    assert measured["collective"] is None
    assert set(measured["flops"]) == {"float32", "bfloat16", "float16"}
    assert all(rate > 1e7 for rate in measured["flops"].values())
    assert list((tmp_path / "disk").iterdir()) == []
    (kept,) = cache.iterdir()
    assert json.loads(kept.read_text()) == measured
    after = values_of(capsys, folder, "--world-size", 1, "--zero-stage", 3, "--sequence", 16)
    assert after["step_s"] > 0
    assert after["budgets"] == {}  # a plan for another machine is not held to this one's memory


@pytest.mark.wide
@pytest.mark.gloo
def test_a_probe_under_torchrun_measures_collectives(cache, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "hf_zero",
    ]
    (tmp_path / "disk").mkdir()
    out = subprocess.run(
        [*command, "probe", "--json", "--offload-dir", str(tmp_path / "disk")],
        check=True, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    measured = json.loads(out.stdout)
    assert 1e6 < measured["collective"] < 1e12
    assert 0 <= measured["latency"] < 1
    (kept,) = cache.iterdir()
    assert json.loads(kept.read_text()) == measured
