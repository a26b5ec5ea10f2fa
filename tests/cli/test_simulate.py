"""hf-zero simulate: what it records without other ranks is what real ranks send."""

from __future__ import annotations

import json
import resource
from contextlib import nullcontext

import pytest
import torch
import transformers

import hf_zero as zero
from hf_zero.cli import main as cli
from hf_zero.cli.simulate import Valueless, recorded_step
from hf_zero.comm.recorded import absent_ranks

CASES = [(1, "no", 1), (1, "bf16", 2), (2, "no", 2), (2, "bf16", 1), (3, "no", 1), (3, "bf16", 2)]


def recorded(rank: int, world: int, collectives: bool = False) -> list[object]:
    """By case: (kind, bytes, unit, phase) of each collective, in order."""
    out: list[object] = []
    for stage, mixed_precision, accumulation in CASES:
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=63, n_positions=8)
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.zeros(1, 8, dtype=torch.long)

        def loss(model: torch.nn.Module = model, ids: torch.Tensor = ids) -> torch.Tensor:
            found: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return found

        config = zero.ZeroConfig(stage=stage)
        record, engine = recorded_step(model, loss, config, mixed_precision, accumulation, collectives=collectives)
        assert world == 1 or record.operations
        out.append([(each.kind, each.bytes, each.unit, each.phase) for each in record.operations])
        engine.detach()
    return out


def without_ranks(rank: int, world: int, size: int, collectives: bool, values: bool) -> list[object]:
    with absent_ranks(size), nullcontext() if values else Valueless(32):
        return recorded(0, size, collectives)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("collectives", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_order_and_bytes_are_those_of_real_ranks(pools, size, collectives):
    """With values and without."""
    real = pools[size].run(recorded, collectives, timeout_s=250)[0]
    assert pools[1].run(without_ranks, size, collectives, True, timeout_s=250)[0] == real
    assert pools[1].run(without_ranks, size, collectives, False, timeout_s=250)[0] == real


SMALL = ["simulate", "gpt2-tiny", "--sequence", "8", "--zero-stage", "3", "--mixed-precision", "no"]


def test_kept_units_are_planned_as_they_are_simulated(capsys):
    """The plan's formulas beside the engine's collectives."""
    ranks = ["--world-size", "8", "--zero-stage", "3", "--sequence", "8", "--batch", "1", "--json"]
    found = {}
    for room in ([], ["--keep-gathered", "4MB"]):
        assert cli.main(["simulate", "gpt2-tiny", *ranks, *room]) == 0
        simulated = json.loads(capsys.readouterr().out)
        assert cli.main(["plan", "gpt2-tiny", *ranks, *room]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert simulated["by_kind"]["gather"]["bytes_sent"] == plan["traffic"]["gather"]
        found[bool(room)] = plan, simulated
    plan, simulated = found[True]
    assert plan["kept"]
    assert simulated["total_s"] < found[False][1]["total_s"]
    assert simulated["planned_peak_bytes"] > found[False][1]["planned_peak_bytes"]


def test_one_rank_sends_nothing(capsys):
    assert cli.main([*SMALL, "--world-size", "1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["operations"] == []
    assert values["communication_s"] == values["exposed_s"] == 0 < values["compute_s"] == values["total_s"]


def test_replicas_keep_gathers_within_a_machine(capsys):
    """Two replicas of four ranks: a rank sends 3/4 of what is gathered in place of 7/8, and slices go across."""
    found = {}
    for replicas in ("1", "2"):
        assert cli.main([*SMALL, "--world-size", "8", "--nodes", "2", "--zero-replicas", replicas, "--json"]) == 0
        found[replicas] = json.loads(capsys.readouterr().out)
    one, two = found["1"]["by_kind"], found["2"]["by_kind"]
    assert two["gather"]["bytes_sent"] / one["gather"]["bytes_sent"] == pytest.approx((3 / 4) / (7 / 8), rel=1e-3)
    assert "across" not in one
    assert two["across"]["bytes_sent"] > 0
    assert {(each["ranks"], each["stride"]) for each in found["2"]["operations"] if each["kind"] == "across"} == {
        (2, 4)
    }


@pytest.mark.slow
def test_a_narrow_wire_sends_less(capsys):
    sent = []
    for wire in ("none", "int8"):
        assert cli.main([*SMALL, "--world-size", "8", "--zero-wire", wire, "--json"]) == 0
        sent.append(json.loads(capsys.readouterr().out)["by_kind"]["reduce"]["bytes_sent"])
    assert sent[0] > 3.5 * sent[1]


@pytest.mark.slow
def test_models_larger_than_memory(capsys):
    """Parameters alone are 1.4 GB; the engine's masters, gradients and states come to four times that."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert cli.main(["simulate", "gpt3-350m", "--world-size", "64", "--sequence", "8", "--json"]) == 0
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    found = json.loads(capsys.readouterr().out)
    numel = 355_871_744  # of its GPT-2 configuration, with the head tied
    assert found["by_kind"]["reduce"]["bytes_sent"] == pytest.approx(4 * numel * 63 / 64, rel=0.01)
    assert taken < 4 * numel / 2


def test_table_and_json(capsys):
    arguments = ["simulate", "gpt2-tiny", "--world-size", "64", "--nodes", "8", "--zero-stage", "3", "--sequence", "8"]
    assert cli.main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"gather", "reduce"} <= set(values["by_kind"])
    assert values["total_s"] >= max(values["compute_s"], values["communication_s"]) > 0


MEASURED = {
    "shares_memory": True,
    "collective": 1.5e9,
    "latency": 2e-4,
    "flops": {"float32": 7e10},
}


@pytest.mark.slow
def test_a_machine_that_was_measured(capsys, tmp_path):
    """Its rates price the step; on CPU ranks messages are gloo's, and a step is the sum of computation and communication."""
    path = tmp_path / "machine.json"
    command = [*SMALL, "--world-size", "2", "--json", "--machine", str(path)]
    found = {}
    for is_cpu in (True, False):
        path.write_text(json.dumps(MEASURED | {"shares_memory": is_cpu}))
        assert cli.main(command) == 0
        found[is_cpu] = json.loads(capsys.readouterr().out)
    none, card = found[True], found[False]
    assert none["compute_s"] == pytest.approx(none["flops"] / 7e10)
    messages = none["operations"]
    # A hop to the other rank for each, and its bytes.
    assert none["communication_s"] == pytest.approx(sum(2e-4 + each["bytes"] / 1.5e9 for each in messages), rel=1e-9)
    assert none["total_s"] == pytest.approx(none["compute_s"] + none["communication_s"])
    assert card["total_s"] == max(card["compute_s"], card["communication_s"])
    near = {"latency_s": 2e-4, "bandwidth": 1.5e9, "source": str(path), "all_reduce": None}
    assert none["network"]["near"] == near
    assert cli.main([*command, "--flops", "7e9"]) == 0
    assert json.loads(capsys.readouterr().out)["flops_per_s"] == 7e9


def test_an_all_reduce_has_a_speed_of_its_own(capsys, tmp_path):
    """Stage 0 on two ranks: two hops for each bucket, and its bytes by the all-reduce's rate; agreements are messages."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MEASURED | {"all_reduce": 5e8}))
    assert cli.main([*SMALL, "--world-size", "2", "--zero-stage", "0", "--json", "--machine", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    reduces = [each for each in found["operations"] if each["is_all_reduce"]]
    others = [each for each in found["operations"] if not each["is_all_reduce"]]
    assert {each["kind"] for each in reduces} == {"reduce"}
    expected_s = sum(2 * 2e-4 + each["bytes"] / 5e8 for each in reduces)
    expected_s += sum(2e-4 + each["bytes"] / 1.5e9 for each in others)
    assert found["communication_s"] == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize(
    ("lacking", "arguments", "message"),
    [
        ("latency", [], "has no latency"),
        ("collective", [], "has no collective"),
        ("flops", [], "has no flops['float32']"),
        ("nothing", ["--mixed-precision", "bf16"], "has no flops['bfloat16']"),
    ],
)
def test_what_a_machine_lacks_is_named(lacking, arguments, message, capsys, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({name: value for name, value in MEASURED.items() if name != lacking}))
    assert cli.main([*SMALL, "--world-size", "2", "--machine", str(path), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "hf_zero probe" in said


def test_refusals_are_one_line(capsys, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text('{"latency": -2}')
    assert cli.main([*SMALL, "--machine", str(path)]) == 2
    assert "latency must be a number that is not negative, found -2" in capsys.readouterr().err
    assert cli.main(["simulate", "gpt2-tiny", "--world-size", "10", "--nodes", "3"]) == 2
    assert "10 ranks do not divide by 3 nodes" in capsys.readouterr().err
