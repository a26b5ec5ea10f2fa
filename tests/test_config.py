"""Settings are checked once and say what is allowed."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

import hf_zero as zero


@pytest.mark.parametrize("stage", [7, -1, "3", 2.0, True, None])
def test_bad_stage(stage):
    with pytest.raises(zero.ConfigError, match="stage must be 0, 1, 2 or 3"):
        zero.ZeroConfig(stage=stage)


def test_errors_are_also_the_standard_ones():
    with pytest.raises(ValueError, match="reduce_dtype must be one of"):
        zero.ZeroConfig(reduce_dtype="int8")
    with pytest.raises(zero.ConfigError, match="mixed_precision must be"):
        zero.shard(nn.Linear(2, 2), mixed_precision="fp8")
    with pytest.raises(zero.ConfigError, match="wire='int4' was removed. Use wire='int8'"):
        zero.ZeroConfig(stage=2, wire="int4")


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_names_of_a_dtype(name):
    config = zero.ZeroConfig(reduce_dtype=name)
    assert config.reduce_dtype == "bfloat16"
    assert pickle.loads(pickle.dumps(config)) == config


def test_stage_table():
    assert [
        (p.shard, p.keep_full, p.reduce_each_backward) for p in (zero.ZeroConfig(stage=i).policy for i in range(4))
    ] == [
        (False, True, False),
        (True, True, False),
        (True, True, True),
        (True, False, True),
    ]


@pytest.mark.parametrize(
    ("world", "settings", "keeps"),
    [
        (2, {}, False),
        (1, {}, True),
        (1, {"offload_params": "cpu", "offload_optimizer": "cpu"}, False),
        (2, {"replicas": 2}, True),
    ],
)
def test_what_has_every_element_keeps_full_parameters(world, settings, keeps):
    assert zero.ZeroConfig(stage=3, **settings).policy_for(world).keep_full is keeps


def test_patterns_of_weights_in_full_precision():
    for given in ("*.gate.*, head.weight", ("*.gate.*", "head.weight"), ["*.gate.*", "head.weight"]):
        assert zero.ZeroConfig(full_precision=given).full_precision == ("*.gate.*", "head.weight")
    assert zero.ZeroConfig().full_precision == ()
    for wrong in (None, 3, (1,)):
        with pytest.raises(zero.ConfigError, match="full_precision must be names or patterns"):
            zero.ZeroConfig(full_precision=wrong)
