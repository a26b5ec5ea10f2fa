"""Plans: known tables, formulas by hand, budgets, refusals that say what would fit."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
import torch
import transformers
from torch import nn

import hf_zero as zero
from hf_zero import ZeroConfig
from hf_zero.config import STAGES
from hf_zero.core.layout import ALIGN_NUMEL, Layout, ParamSpec
from hf_zero.core.precision import Precision
from hf_zero.plan.activations import (
    Batch,
    activation_bytes,
    activation_traffic,
    attention_exchange,
    chunk_tokens,
    layer_bytes,
    logits_bytes,
)
from hf_zero.plan.costs import TIERS, Placement
from hf_zero.plan.machine import Machine
from hf_zero.plan.plan import LayoutBuilder, Plan, plan
from hf_zero.plan.shapes import Architecture
from hf_zero.plan.solve import PlanInputs
from hf_zero.plan.traffic import compute_flops
from hf_zero.tiers.tier import SIZES, padded

DEVICE, HOST, DISK = TIERS
MB = 10**6
FP32, BF16 = Precision.of("no", None), Precision.of("bf16", None)


def layout_of(model: nn.Module, shards: int, precision: Precision) -> Layout:
    builder = LayoutBuilder(model, precision)
    return builder.layout(builder.specs(dict.fromkeys(builder.names, 0)), shards)


def blocks(count: int, numel: int, shards: int, compute: str = "float32", **changes) -> Layout:
    """Units of one span each."""
    specs = [ParamSpec((f"h.{i}.w",), (numel,), "float32", compute, "float32", **changes) for i in range(count)]
    return Layout.build(((f"h.{i}", [spec]) for i, spec in enumerate(specs)), shards)


def make(layout: Layout, ranks: int, machine: Machine | None = None, precision: Precision = FP32, **settings) -> Plan:
    extra = {
        key: settings.pop(key)
        for key in ("batch", "backward_per_step", "optimizer_tensors", "in_files")
        if key in settings
    }
    config = ZeroConfig(**{"stage": 3, **settings})
    return plan(PlanInputs(layout, machine or Machine(), config, ranks, precision, **extra))


def on_meta(config: transformers.PretrainedConfig, cls: type) -> nn.Module:
    with torch.device("meta"):
        return cls(config)


# Known tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_7_5b_on_64_ranks_as_this_library_keeps_it(stage):
    """bf16 parameters where they stay, and at their owner float32 gradients, masters and two moments: 16 bytes."""
    policy = STAGES[stage]
    layout = blocks(1, 7_500_000_000, 64 if policy.shard else 1, "bfloat16")
    made = make(layout, 64, precision=BF16, stage=stage)
    whole = 2 * 7.5e9 * policy.keep_full + 16 * 7.5e9 / (64 if policy.shard else 1)
    assert made.memory.states == pytest.approx(whole, rel=1e-6)
    assert made.to_dict()["states_bytes_per_rank"] == made.memory.states


def test_100_mb_on_5_nodes_of_20_mb():
    """25M float32 parameters; each node has 20 MB of memory in all. Shards and slabs' worth stays, the rest is on disk."""
    layout = blocks(200, 125_000, 5)
    node = Machine(host_memory=20 * MB, disk_free=10_000 * MB, shares_memory=True)
    assert "which are one here, is short of" in make(layout, 5, node).shortfall
    made = make(layout, 5, node, offload_optimizer="auto", offload_params="auto", step_in_backward=True)
    memory = made.memory
    assert memory.at_peak(DEVICE) + memory.at_peak(HOST) <= 20 * MB
    assert memory.at_peak(DISK) > 0
    # Three float32 per element, and a fourth where parameters are in memory and masters on disk; memory is used to its end.
    states = memory.stored[DEVICE], memory.stored[HOST], memory.stored[DISK]
    total = sum(kinds["parameters"] + kinds["optimizer"] for kinds in states)
    assert 3 * 20 * MB <= total <= 4 * 20 * MB
    assert memory.at_peak(DEVICE) + memory.at_peak(HOST) > 19 * MB


def test_175b_on_1024_ranks_in_seconds():
    config = transformers.GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048, vocab_size=50257)
    model = on_meta(config, transformers.GPT2LMHeadModel)
    batch = Batch(1, 2048, True, architecture=Architecture.of(config))
    started = time.process_time()
    layout = layout_of(model, 1024, BF16)
    made = make(layout, 1024, precision=BF16, offload_optimizer="auto", offload_params="auto", batch=batch,
                device_memory="80GiB", host_memory="64GiB")  # fmt: skip
    assert time.process_time() - started < 30.0  # of a processor: minutes where cost grows with the square
    assert made.layout.numel == pytest.approx(175e9, rel=0.01)
    assert made.fits
    assert made.memory.states == pytest.approx(16 * 175e9 / 1024, rel=0.02)


@pytest.mark.parametrize(("ranks", "memory", "fits"), [(1, "8GiB", True), (1, "4GiB", False), (4, "4GiB", True)])
def test_bert_large_on_small_clusters(ranks, memory, fits):
    """340M parameters in float32: 16 bytes each on one card is 5 GiB."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    layout = layout_of(on_meta(config, transformers.BertForMaskedLM), ranks, FP32)
    batch = Batch(4, 128, architecture=Architecture.of(config))
    made = make(layout, ranks, batch=batch, device_memory=memory)
    assert made.memory.states == pytest.approx(16 * 335e6 / ranks, rel=0.01)
    assert made.fits == fits
    assert ("device_memory is short of" in made.shortfall) == (not fits)


# Formulas by hand ---------------------------------------------------------------------------------------------------


def test_offload_counts_by_hand():
    """Two ranks, bf16, 4 units of 2 Mi elements: all but the parameters on the host, gradients in float32."""
    n = 1 << 20  # of a slice
    made = make(blocks(4, 2 * n, 2, "bfloat16"), 2, precision=BF16, offload_optimizer="cpu")
    device, host = made.memory.peak[DEVICE], made.memory.peak[HOST]
    assert device["parameters"] == 4 * n * 2
    assert device["gradients"] == device["optimizer"] == 0
    assert device["gathered"] == 2 * 2 * n * 2  # one is left before the one after the next is fetched
    assert device["communication"] == 2 * n * 2 + 2 * n * 4 + n * 4  # one unit's gradients, its bucket, its mean
    assert (host["parameters"], host["gradients"], host["optimizer"]) == (0, 4 * n * 4, 4 * n * 12)
    assert host["staging"] == SIZES.block_numel * 2 * 2  # on their way up
    traffic = made.traffic
    assert (traffic["down"], traffic["up"], traffic["read"], traffic["write"]) == (4 * n * 4, 4 * n * 2, 0, 0)
    assert traffic["gather"] == (2 * 4 - 1) * n * 2  # the unit that ends the forward is still there in backward
    assert traffic["reduce"] == 4 * n * 4
    assert traffic["down"] + traffic["up"] == 6 * 4 * n


def test_gradients_alone():
    n = 1 << 20
    layout = blocks(2, n, 1, "bfloat16")
    once = make(layout, 1, precision=BF16, offload_optimizer="cpu")
    assert once.memory.stored[HOST]["gradients"] == 2 * n * 4
    assert once.traffic["down"] + once.traffic["up"] == 4 * 2 * n
    twice = make(layout, 1, precision=BF16, offload_optimizer="cpu", backward_per_step=2)
    assert twice.memory.stored[HOST]["gradients"] == 2 * n * 4
    assert twice.traffic["down"] == 2 * once.traffic["down"]
    stepped = make(layout, 1, precision=BF16, offload_optimizer="cpu", step_in_backward=True)
    assert stepped.memory.stored[HOST]["gradients"] == 0
    assert (
        stepped.memory.stored[HOST]["staging"] == SIZES.block_numel * 2 * 2 + 2 * n * 2
    )  # parameters up, gradients down
    stored = make(layout, 1, precision=BF16, offload_optimizer="cpu", step_in_backward=True, backward_per_step=2)
    assert stored.memory.stored[HOST]["gradients"] == 2 * n * 4
    offloaded = {"precision": BF16, "backward_per_step": 2, "offload_optimizer": "cpu"}
    every = (make(layout, 1, stage=stage, **offloaded).memory for stage in (1, 2))
    assert len({json.dumps(memory.to_dict()) for memory in every}) == 1, "one rank reduces nothing"


def test_frozen_spans_in_files_take_no_space_where_all_of_them_are():
    specs = [ParamSpec((name,), (1 << 16,), *["float32"] * 3, trainable=False, optimizer=-1) for name in "ab"]
    for known, nbytes in (("ab", 0), ("a", padded(8 << 16))):
        made = make(Layout.build([("u", specs)], 1), 1, offload_params="disk", in_files=frozenset(known))
        assert made.memory.stored[DISK]["parameters"] == nbytes


def test_arrays_on_disk_by_hand():
    n = SIZES.slab_numel * 2 + 1000 * ALIGN_NUMEL
    made = make(blocks(1, n, 1, "bfloat16"), 1, precision=BF16, offload_optimizer="disk", offload_params="disk")
    assert made.memory.stored[DISK]["optimizer"] == 3 * padded(4 * n)
    assert made.memory.stored[DISK]["parameters"] == padded(2 * n)
    assert made.memory.stored[DISK]["gradients"] == padded(4 * n)
    assert made.memory.stored[HOST]["gradients"] == 0
    # The ring, the buffer that the one unit is read to, and that of its gradient.
    staging = SIZES.slabs * SIZES.slab_numel * (12 + 4) + 2 * n + 2 * n
    assert made.memory.stored[HOST]["staging"] == staging
    assert made.traffic["write"] == 12 * n + 2 * n + 4 * n
    assert made.traffic["read"] == 12 * n + 2 * n + 4 * n  # its one unit is brought in once


def test_parameters_that_were_to_rest_slower_than_their_masters_rest_with_them():
    assert make(blocks(2, 1 << 21, 2), 2, offload_params="disk").placements == (Placement(DEVICE, DEVICE),) * 2


def test_frozen_spans_have_no_state():
    made = make(blocks(3, 1 << 16, 1, trainable=False), 1, offload_optimizer="cpu", offload_params="cpu")
    assert made.placements == (Placement(HOST),) * 3
    assert made.memory.states == 3 * (1 << 16) * 4
    assert made.traffic["down"] == made.traffic["reduce"] == 0


def test_what_no_optimizer_has_needs_no_wider_master():
    builder = LayoutBuilder(nn.Linear(4, 4).bfloat16(), BF16)
    for held, master in (({}, "bfloat16"), (dict.fromkeys(builder.names, 0), "float32")):
        assert {spec.master_dtype for unit in builder.specs(held) for spec in unit} == {master}


def test_every_offload_covers_every_element():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=997))
    for p in model.transformer.h[0].parameters():
        p.requires_grad_(False)
    for ranks, precision in ((1, FP32), (4, BF16)):
        layout = layout_of(model, ranks, precision)
        for optimizer in ("none", "cpu", "disk", "auto"):
            for params in ("none", "cpu", "disk", "auto"):
                made = make(layout, ranks, precision=precision, offload_optimizer=optimizer, offload_params=params)
                assert [each.optimizer is not None for each in made.placements] == [s.trainable for s in layout.spans]
                json.dumps(made.to_dict())


def test_auto_fills_the_host_before_the_disk():
    made = make(blocks(24, 1 << 20, 1), 1, Machine(disk_free=1 << 40), offload_optimizer="auto", offload_params="auto",
                device_memory="24MiB", host_memory="120MiB")  # fmt: skip
    assert made.fits
    assert {placement.parameters for placement in made.placements} == {DEVICE, HOST, DISK}
    assert made.memory.at_peak(HOST) > 110 << 20


# Time and activations -----------------------------------------------------------------------------------------------


def test_time_is_the_busiest_resource_of_each_phase():
    n = 1 << 20
    speeds = {"host_bandwidth": 28e6, "link_down": 1e6, "link_up": 2e6, "collective": 1e6}
    batch = Batch(1, 100)
    layout = blocks(4, 2 * n, 2)
    made = make(layout, 2, Machine(**speeds, flops={"float32": 1e9}), offload_optimizer="cpu", batch=batch)
    compute = compute_flops(layout, 100, False) / 1e9
    assert made.parts["passes compute"] == pytest.approx(compute)
    assert made.parts["step host"] == pytest.approx(4 * n * 28 / 28e6)
    passes = max(compute, (7 * n * 4 + 4 * n * 4) / 1e6, 4 * n * 4 / 1e6)
    step = max(4 * n * 28 / 28e6, 4 * n * 4 / 2e6)
    assert made.step.seconds == pytest.approx(passes + step)
    together = make(
        layout,
        2,
        Machine(**speeds, flops={"float32": 1e9}),
        offload_optimizer="cpu",
        batch=batch,
        step_in_backward=True,
    )
    assert together.step.seconds == pytest.approx(max(passes, step))
    whole = make(layout, 2, Machine(**speeds), stage=2).parts
    assert (whole["after gather"], "passes gather" in whole) == (4 * n * 4 / 1e6, False), "training waits for it"
    cpu = Machine(**speeds, flops={"float32": 1e9}, shares_memory=True)
    alone = make(layout, 2, cpu, offload_optimizer="cpu", batch=batch)
    assert alone.step.seconds == pytest.approx(sum(alone.parts.values()))  # one processor does it all


def test_an_unknown_speed_leaves_the_time_open():
    made = make(blocks(2, 1 << 16, 2), 2, Machine(link_down=1e9), offload_optimizer="cpu")
    assert made.step.seconds is None
    assert made.parts["passes down"] is not None
    assert any("no speed is known of gather, reduce, host" in reason for reason in made.reasons)


def test_activations_are_korthikantis():
    """34 s b h per layer in 16 bits without scores (arXiv 2205.05198, section 4.1), 2 s b h per layer with checkpointing."""
    architecture = Architecture(hidden=1024, layers=24, heads=16, intermediate=4096, vocab=1)
    assert layer_bytes(architecture, 2, 2) == 34 * 1024
    batch = Batch(2, 512, checkpointing=True, architecture=architecture)
    kept, *_ = activation_bytes(batch, ZeroConfig(), 2, False)
    assert kept == 2 * 512 * (24 * 2 + 34) * 1024
    device, host, _ = activation_bytes(batch, ZeroConfig(offload_activations="cpu"), 2, False)
    assert (device, host) == (2 * 512 * (34 + 2 * 2) * 1024, 2 * 512 * 24 * 2 * 1024)


def test_batches_by_hand():
    """Two key-value heads for four queries' and four ranks, a gated MLP, eight checkpointed layers of which four wait."""
    sizes = Architecture(
        hidden=64, layers=8, heads=4, intermediate=256, vocab=1 << 18, key_value_heads=2, is_gated=True
    )
    assert layer_bytes(sizes, 2, 4) == 2 * (4 * 64 + 64 + 4 * 256) + 4 * 2 * 64 + 2 * 64
    assert chunk_tokens(sizes.vocab) == 256
    shared, disk = ZeroConfig(sp_size=4), ZeroConfig(offload_activations="disk")
    assert Batch(2, 33).tokens(shared) == 2 * 9
    batch, again, one = (*(Batch(1, 16, each, sizes) for each in (False, True)), 16 * 64 * 2)
    assert attention_exchange(batch, shared, 2) == (2 * 2 * 8, 4 * (4 + 4) * 16 * 2 * 3 / 4)
    assert attention_exchange(again, shared, 2)[0] == 3 * 2 * 8
    assert activation_bytes(again, disk, 2, False)[1:] == (5 * one, 8 * padded(one))
    moved = {"down": 8 * one, "write": 8 * one, "read": 4 * one}
    assert activation_traffic(again, disk, 2, False, True) == {**moved, "up": 4 * one}
    assert activation_traffic(again, disk, 2, False, False) == {**moved, "up": 8 * one}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_against_what_autograd_keeps(checkpointing):
    """The estimate against the bytes that autograd saves for a real model, parameters aside."""
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, intermediate_size=688,
        vocab_size=512, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 512, (4, 128))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    found = sum(storage.nbytes() for storage in saved.values())
    names = [name for name, _ in model.named_parameters()]
    batch = Batch(4, 128, checkpointing, Architecture.of(config, names))
    estimate, *_ = activation_bytes(batch, ZeroConfig(), 4, False)
    if checkpointing:  # the hooks see the forward alone: the layers' inputs and the logits, no layer computed again
        estimate += 4 * 128 * (logits_bytes(batch.architecture, 4) - layer_bytes(batch.architecture, 4, 4))
    assert estimate == pytest.approx(found, rel=0.4)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_says_what_is_missing():
    """By the slowest placement: with the missing bytes added, it fits."""
    layout = blocks(24, 1 << 22, 2, "bfloat16")
    settings = {"precision": BF16, "offload_optimizer": "auto", "device_memory": "400MiB"}
    text = make(layout, 2, Machine(disk_free=0), **settings, host_memory="300MiB").shortfall
    assert "Use more offloading" in text
    for part in ("stage 3 on 2 ranks", "device_memory 400.00 MiB", "host_memory 300.00 MiB", "offload_dir is short of"):
        assert part in text, text
    (missing,) = re.findall(r"offload_dir is short of ([\d.]+) ([MG])iB", text)
    room = math.ceil(float(missing[0]) * (1 << (20 if missing[1] == "M" else 30)))
    assert make(layout, 2, Machine(disk_free=room), **settings, host_memory="300MiB").fits


def test_budgets_of_one_memory_are_one():
    """On a CPU device both tiers draw on the same bytes, unless each has a budget."""
    layout = blocks(8, 1 << 20, 1)
    machine = Machine(device_memory=150 << 20, host_memory=150 << 20, disk_free=1 << 40, shares_memory=True)
    made = make(layout, 1, machine, offload_optimizer="auto", offload_params="auto")
    assert made.memory.at_peak(DEVICE) + made.memory.at_peak(HOST) <= 150 << 20
    assert made.inputs.budgets["together"] == 150 << 20
    apart = make(layout, 1, machine, offload_optimizer="cpu", device_memory="150MiB", host_memory="150MiB")
    assert "together" not in apart.inputs.budgets


def test_settings_that_cannot_work_are_refused():
    layout = blocks(2, 1 << 10, 2)
    with pytest.raises(zero.ConfigError, match="stage 3"):
        make(layout, 2, stage=2, offload_params="cpu")


def test_a_budget_that_a_fixed_placement_misses_is_said_not_raised():
    made = make(blocks(4, 1 << 20, 1), 1, device_memory="1MiB")
    assert not made.fits
    room = made.memory.at_peak(DEVICE) - (1 << 20) - 1
    assert "is short of 1.01 MiB" in make(blocks(4, 1 << 20, 1), 1, device_memory=room).shortfall
