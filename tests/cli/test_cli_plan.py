"""hf-zero plan and hf-zero probe as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.cli import main as cli
from hf_zero.cli.models import find_model
from hf_zero.core.precision import Precision
from tests.kit.common import gpt2, optimizer_for, take_steps

GB = 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache and a width of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache" / "hf_zero"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "gpt2"
    gpt2(n_layer=3, n_embd=64).save_pretrained(path)
    return path


def run(capsys, *arguments: object) -> str:
    status = cli.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    assert status == 0, out.err
    return out.out


def refused(capsys, *arguments: object, status: int = 2) -> str:
    assert cli.main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().err


def test_one_stage_with_all_details(capsys, folder):
    out = run(capsys, "plan", folder, "--world-size", 2, "--zero-stage", 3, "--mixed-precision", "bf16",
              "--zero-offload-optimizer", "cpu", "--batch", 2, "--sequence", 16, "--host-memory", "1GiB")  # fmt: skip
    for word in ("device", "host", "gathered", "communication", "staging", "activations (estimate)", "budget",
                 "down", "up", "optimizer, on the host", "as offload_optimizer='cpu' says",
                 "an estimate for 2 x 16 tokens"):  # fmt: skip
        assert word in out, word


def test_json_has_the_split_by_state_and_tier(capsys, folder):
    values = json.loads(run(capsys, "plan", folder, "--world-size", 2, "--zero-stage", 2, "--json",
                            "--zero-offload-optimizer", "disk"))  # fmt: skip
    assert values["parameters"] == sum(p.numel() for p in gpt2(n_layer=3, n_embd=64).parameters())
    assert values["states_bytes_per_rank"] == sum(values["states"].values())
    for kind in ("parameters", "gradients", "optimizer"):
        assert values["states"][kind] == sum(values["rest"][tier][kind] for tier in ("device", "host", "disk"))
    assert values["rest"]["disk"]["optimizer"] > 0
    assert values["rest"]["device"]["optimizer"] == 0


def test_all_stages_side_by_side(capsys, folder):
    plans = json.loads(run(capsys, "plan", folder, "--world-size", 4, "--json"))
    assert [made["stage"] for made in plans] == [0, 1, 2, 3]
    sizes = [made["states_bytes_per_rank"] for made in plans]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]
    out = run(capsys, "plan", folder, "--world-size", 4, "--zero-offload-params", "cpu")
    assert "stage 0: offload_params='cpu' needs stage 3" in out


def test_headers_alone_are_enough(capsys, folder, tmp_path):
    """The same layout and bytes from a file's header as from the configuration."""
    (folder / "config.json").rename(tmp_path / "config.json")
    headers = json.loads(run(capsys, "plan", folder, "--zero-stage", 3, "--json"))
    one_file = json.loads(run(capsys, "plan", folder / "model.safetensors", "--zero-stage", 3, "--json"))
    (tmp_path / "config.json").rename(folder / "config.json")
    config = json.loads(run(capsys, "plan", folder, "--zero-stage", 3, "--json"))
    assert headers["rest"] == one_file["rest"] == config["rest"]
    assert headers["peak"] == config["peak"]


def test_units_by_name(tmp_path):
    tensors = {f"h.{i}.{kind}": torch.zeros(64, 64) for i in (0, 1, 10, 2) for kind in ("a.weight", "b.weight")}
    tensors |= {
        "wte.weight": torch.zeros(500, 64),
        "norm.weight": torch.zeros(64),
        "h.0.scale": torch.zeros(3, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    units = find_model(str(tmp_path), None).layout(Precision.of("bf16", None), 1).units
    assert [unit.name for unit in units] == ["wte", "h.0", "h.1", "h.2", "h.10"]
    last = {slot.spec.name for span in units[-1].spans for slot in span.slots}
    assert last == {"h.10.a.weight", "h.10.b.weight", "norm.weight"}
    specs = {slot.spec.name: slot.spec for unit in units for span in unit.spans for slot in span.slots}
    assert (specs["wte.weight"].compute_dtype, specs["h.1.a.weight"].compute_dtype) == ("float32", "bfloat16")
    assert not specs["h.0.scale"].trainable


def test_a_number_and_the_papers_table(capsys):
    found = []
    for stage in range(4):
        values = json.loads(run(capsys, "plan", "--parameters", "7.5B", "--world-size", 64, "--zero-stage", stage, "--json",
                                "--mixed-precision", "bf16"))  # fmt: skip
        assert values["parameters"] == 7_500_000_000
        found.append(f"{values['zero_paper_states_bytes_per_rank'] / GB:.1f}")
    assert found == ["120.0", "31.4", "16.6", "1.9"]


def test_a_sweep_as_table_json_and_picture(capsys, tmp_path):
    picture = tmp_path / "sweep.png"
    out = run(capsys, "plan", "--parameters", "7.5B", "--mixed-precision", "bf16", "--sweep", "--plot", picture)
    assert "…" not in out  # no figure is cut off, however narrow
    for cell in ("112 GiB", "29.2 GiB", "15.5 GiB", "1.75 GiB", "1,024", "disk", "141 GB"):
        assert cell in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(run(capsys, "plan", "--parameters", "7.5B", "--mixed-precision", "bf16", "--sweep", "--json"))
    assert {row["world_size"] for row in rows} == {1 << power for power in range(11)}
    assert {row["offload"] for row in rows} == {"none", "cpu", "disk"}
    row = next(r for r in rows if (r["stage"], r["offload"], r["world_size"]) == (3, "disk", 64))
    assert row["states_bytes_by_tier"]["device"] == 0
    assert row["states_bytes_by_tier"]["disk"] == pytest.approx(7.5e9 / 64 * 18, rel=5e-3)  # with gradients


def test_auto_for_a_machine_in_a_file(capsys, folder, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"device_memory": 10**6, "host_memory": 2 * 10**9, "disk_free": 10**9, "link_down": 1e10,
                                "link_up": 1e10, "host_bandwidth": 1e10, "device_bandwidth": 1e12}))  # fmt: skip
    values = json.loads(run(capsys, "plan", folder, "--world-size", 1, "--zero-stage", 2, "--machine", path, "--json",
                            "--zero-offload-optimizer", "auto", "--zero-offload-params", "auto"))  # fmt: skip
    assert values["fits"]
    assert values["peak_bytes"]["device"] <= 10**6
    assert values["peak_bytes"]["host"] > 0
    assert values["step_s"] > 0


def test_units_that_stay_gathered_are_shown(capsys):
    arguments = ["plan", "gpt2", "--world-size", 8, "--zero-stage", 3]
    bare, kept = (json.loads(run(capsys, *arguments, *more, "--json")) for more in ((), ("--keep-gathered", "200MiB")))
    assert not bare["kept"]
    assert kept["kept"]
    assert kept["traffic"]["gather"] < bare["traffic"]["gather"]
    assert "stay gathered from forward to backward" in " ".join(
        run(capsys, *arguments, "--keep-gathered", "200MiB").split()
    )


def test_what_does_not_fit_is_said(capsys, folder):
    error = refused(capsys, "plan", folder, "--world-size", 2, "--zero-stage", 2, "--zero-offload-optimizer", "auto",
                    "--device-memory", "100KB", "--host-memory", "1GB", status=1)  # fmt: skip
    assert "What would fit: device_memory of" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either a model or --parameters"),
        (("--parameters", "many"), "expected a number such as 7.5B"),
        (("--parameters", "1B", "--plot", "x.png"), "add --sweep"),
        (("--parameters", "1B", "--world-size", "0"), "--world-size must be at least 1"),
        (("--parameters", "1B", "--machine", "/nowhere.json"), "not a machine file"),
        (("--parameters", "1B", "--device-memory", "lots", "--zero-stage", "1"), "--device-memory: expected a size"),
        (("--parameters", "1B", "--device-memory", "-5GiB"), "--device-memory: expected a size"),
        (("--parameters", "1B", "--sweep", "--plot", "/nowhere/x.png"), "no folder /nowhere"),
        (("--parameters", "-7B"), "expected a number such as 7.5B"),
    ],
)
def test_arguments_that_cannot_be(capsys, arguments, message):
    assert message in refused(capsys, "plan", *arguments)


def test_a_probe_is_kept_and_used(capsys, cache, folder, tmp_path):
    before = json.loads(run(capsys, "plan", folder, "--world-size", 1, "--zero-stage", 3, "--batch", 1, "--json"))
    assert before["step_s"] is None
    AcceleratorState._reset_state(True)  # the command is a process of its own; tests before this one were not
    GradientState._reset_state()
    (tmp_path / "disk").mkdir()
    measured = json.loads(run(capsys, "probe", "--json", "--offload-dir", tmp_path / "disk"))
    assert measured["disk_read"] > 0
    (kept,) = cache.iterdir()
    assert json.loads(kept.read_text()) == measured
    after = json.loads(run(capsys, "plan", folder, "--world-size", 1, "--zero-stage", 3, "--batch", 1, "--json"))
    assert after["step_s"] > 0
    assert after["budgets"] == {}  # a plan for another machine is not held to this one's memory


@pytest.mark.slow
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
    assert 1e7 < measured["collective"] < 1e12
    (kept,) = cache.iterdir()
    assert json.loads(kept.read_text()) == measured


def sent(rank: int, world: int, folder: str, settings: dict[str, object]) -> dict[str, int]:
    """Bytes of the second step."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings))
    for step in range(2):
        engine.traffic.reset()
        take_steps(model, optimizer, rank, step)
    found = {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}
    engine.detach()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "replicas", "wire"), [(2, 2, "int8"), (3, 2, "none"), (1, 1, "int8"), (1, 4, "fp8"), (2, 4, "none")]
)
def test_replicas_and_wire_are_planned_as_they_are_sent(capsys, folder, pools, stage, replicas, wire):
    values = json.loads(run(capsys, "plan", folder, "--world-size", 4, "--zero-stage", stage, "--json",
                            "--zero-replicas", replicas, "--zero-wire", wire))  # fmt: skip
    measured = pools[4].run(sent, str(folder), {"stage": stage, "replicas": replicas, "wire": wire})[0]
    planned = values["traffic"]
    assert planned["gather"] == measured["gather"]
    assert planned["across"] == measured.get("across", 0)
    assert planned["reduce"] - planned["across"] == measured["reduce"]
    shown = run(capsys, "plan", folder, "--world-size", 4, "--zero-stage", stage, "--zero-replicas", replicas,
                "--zero-wire", wire)  # fmt: skip
    assert ("go to other replicas" in shown) == (replicas > 1)
    assert (f"travel as {wire} codes" in shown) == (wire != "none")


def test_stages_and_ranks_that_replicas_and_codes_do_not_go_with(capsys, folder):
    out = run(capsys, "plan", folder, "--world-size", 4, "--zero-replicas", 2, "--zero-wire", "int8")
    assert "needs stage 1, 2 or 3" in out
    assert "does not divide 4 ranks" in refused(capsys, "plan", folder, "--world-size", 4, "--zero-stage", 3,
                                                "--zero-replicas", 3)  # fmt: skip
    rows = json.loads(run(capsys, "plan", folder, "--sweep", "--zero-replicas", 4, "--zero-wire", "int8", "--json"))
    assert {row["stage"] for row in rows} == {1, 2, 3}
    assert min(row["world_size"] for row in rows) == 4
