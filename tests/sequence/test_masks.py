"""Masks, packed rows and adapters equal one process; what cannot be divided ends in a named error at the latest in the
first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import VOCAB, bert, gpt2, llama, t5
from tests.sequence.models import batch, mixtral, whole
from tests.sequence.test_parity import error, made, start

pytestmark = pytest.mark.gloo
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": VOCAB}


def adapted() -> nn.Module:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)  # type: ignore[arg-type]


def gpt_oss() -> nn.Module:
    """Attention sinks, which its attention passes along and reads from the module."""
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1, sliding_window=5)
    )


def afmoe() -> nn.Module:
    """It passes masks to attention by keyword."""
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24}
    config = transformers.AfmoeConfig(
        **sizes, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1, sliding_window=5
    )
    return transformers.AfmoeForCausalLM(config)


def opt() -> nn.Module:
    """It counts positions without the padding, and learns one embedding for each."""
    sizes = {**SMALL, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))


def counting() -> nn.Module:
    """One that only the first forward can find."""
    model: Any = opt()
    model.model.decoder.__class__ = type("Counting", (type(model.model.decoder),), {})
    return model  # type: ignore[no-any-return]


def paligemma() -> nn.Module:
    """Its text model gets a mask that is made already."""
    sizes = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
    }
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **sizes},
        vision_config={"model_type": "siglip_vision_model", **vision, "patch_size": 8},
        projection_dim=32,
        image_token_index=1,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def given(kind: str) -> dict[str, Any]:
    """A batch of 2 x 12 tokens, odd: 13, with padding on one side, or with several sequences in a row."""
    length = 13 if kind.endswith("odd") else 12
    made = batch(0, 1, 2, length)
    if kind == "packed":
        made["position_ids"] = torch.tensor([[*range(5), *range(7)], [*range(3), *range(4), *range(5)]])
    elif kind != "full":
        made["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        first = {"left": slice(0, 5), "left odd": slice(0, 5), "one token": slice(1, length)}
        made["attention_mask"][1, first.get(kind, slice(8, length))] = 0
        made["labels"][made["attention_mask"] == 0] = -100
        if kind == "boolean":
            made["attention_mask"] = made["attention_mask"].bool()
    return made


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any], str, bool]] = {
    "llama packed": (llama, {}, "packed", True),
    "llama packed eager": (llama, {"attn_implementation": "eager"}, "packed", True),
    "llama left": (llama, {}, "left", True),
    "llama whose frequencies grow with the length": (
        llama,
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
        "right",
        True,
    ),
    "llama with frequencies for long rows": (
        llama,
        {"rope_parameters": LONG, "max_position_embeddings": 32},
        "full",
        True,
    ),
    "llama left odd": (llama, {}, "left odd", True),
    "llama left odd eager": (llama, {"attn_implementation": "eager"}, "left odd", True),
    "llama with a row of one token, which has no label": (llama, {}, "one token", True),
    "llama with a boolean mask": (llama, {}, "boolean", True),
    "gpt2 right eager": (gpt2, {"n_head": 4, "attn_implementation": "eager"}, "right", True),
    "mixtral packed": (mixtral, {}, "packed", True),
    "mixtral left": (mixtral, {}, "left", True),
    "bert left odd": (bert, {"num_attention_heads": 4}, "left odd", False),
    "bert left eager": (bert, {"num_attention_heads": 4, "attn_implementation": "eager"}, "left", False),
    "gpt-oss right": (gpt_oss, {}, "right", True),
    "paligemma right": (paligemma, {}, "right", True),
    "afmoe left": (afmoe, {}, "left", True),
    "opt left": (opt, {}, "left", True),
    "llama adapted": (adapted, {}, "full", True),
}


def masked(rank: int, world: int) -> dict[str, float]:
    found = {}
    for name, (build, changes, kind, shifts) in CASES.items():
        reference = made(build, **changes)
        loss, gradients = whole(reference, [given(kind)], shifts)
        model: Any = made(build, **changes)
        engine = start(model, 2)
        *_, last = model.modules()
        last.eval()
        out = model(**engine.local_sequence(given(kind)))
        assert not last.training
        out.loss.backward()
        found[name] = error(model, out.loss.detach(), loss, gradients)
        with torch.no_grad():  # whole samples, also with our attention in place
            logits = model(**given(kind)).logits
            real = given(kind).get("attention_mask", torch.ones(2, 12)).bool()
            torch.testing.assert_close(logits[real], reference(**given(kind)).logits[real])
        engine.detach()
        assert model.config._attn_implementation == reference.config._attn_implementation
    return found


def test_masks(two: RankPool) -> None:
    for found in two.run(masked):
        assert {name: value for name, value in found.items() if value > 1e-6} == {}


def message(act: Any) -> str:
    """The named error of `act`, on one rank."""
    try:
        act()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def classifier() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, pad_token_id=0
    )
    return transformers.LlamaForSequenceClassification(config)


def pretraining() -> nn.Module:
    """Logits of tokens and of the whole sample, under names of its own."""
    sizes = {**SMALL, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.BertForPreTraining(transformers.BertConfig(**sizes))


class OverAllForMaskedLM(transformers.BertForMaskedLM):
    """Divides its loss by tokens without labels, too."""

    def forward(self, labels: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        out = super().forward(**kwargs)
        losses = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        out.loss = losses / labels.numel()  # type: ignore[assignment]
        return out


def over_all() -> nn.Module:
    return OverAllForMaskedLM(transformers.BertConfig(**SMALL, num_attention_heads=4, intermediate_size=48))


def choices() -> nn.Module:
    """Rows x choices x tokens."""
    sizes = {**SMALL, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.BertForMultipleChoice(transformers.BertConfig(**sizes))


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL))


class Cumulative(nn.Module):
    """What a recurrent layer does, and no configuration tells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class Shaped(nn.Module):
    """What a model does that takes its number of tokens for granted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (4, -1))[:, :, 1].repeat_interleave(x.shape[1] // 4, 1)


def llama4() -> nn.Module:
    """It counts positions in layers without rotary embeddings, far beyond the tokens that the first forward compares."""
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size_mlp": 48}
    options = {"layer_types": ["full_attention"], "no_rope_layers": [0], "num_local_experts": 1}
    config = transformers.Llama4TextConfig(**sizes, **options, intermediate_size=48, floor_scale=11)
    return transformers.Llama4ForCausalLM(config)


def refused(rank: int, world: int) -> dict[str, str]:
    found = {
        "heads": message(lambda: start(llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24), 2)),
        "encoder and decoder": message(lambda: start(t5(), 2)),
        "positions of its own": message(lambda: start(llama4(), 2)),
        "recurrent": message(lambda: start(mamba(), 2)),
        "no transformer": message(lambda: start(nn.Linear(2, 2), 2)),
        "router": message(lambda: start(mixtral(output_router_logits=True), 2)),
        "ranks": message(lambda: start(llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48), 3)),
    }
    model: Any = llama()
    engine = start(model, 2)
    square = torch.ones(2, 1, 12, 12)
    mrope = torch.arange(12).expand(3, 2, 12)
    found |= {
        "other rows": message(lambda: engine.local_sequence(batch(rank))),
        "not divided": message(lambda: model(**batch(0))),
        "4-D mask": message(lambda: engine.local_sequence({**batch(0, 1, 2, 12), "attention_mask": square})),
        "positions of images": message(lambda: engine.local_sequence({**batch(0, 1, 2, 12), "position_ids": mrope})),
        "one label per sample": message(lambda: engine.local_sequence({**batch(0), "labels": torch.tensor([0, 1])})),
        "divided twice": message(lambda: engine.local_sequence(engine.local_sequence(batch(0)))),
        "weighed": message(lambda: engine.weigh(torch.ones(()), 1)),
        "chosen arguments": message(
            lambda: model(**{name: engine.local_sequence(batch(0))[name] for name in ("input_ids", "labels")})
        ),
        "attentions": message(lambda: model(**engine.local_sequence(batch(0)), output_attentions=True)),
        "a configuration of two models": message(lambda: start(type(model)(model.config), 2)),
    }
    assert torch.isfinite(model(**engine.local_sequence(batch(0))).loss)  # goes on after refusals
    engine.detach()
    start(type(model)(model.config), 2).detach()
    engine = start(llama(), 2, debug=True)
    engine.local_sequence(batch(0))
    found["other rows later"] = message(lambda: engine.local_sequence(batch(rank)))
    engine.detach()
    first_parts_full = {**batch(0), "position_ids": torch.tensor([[*range(14), *range(8)]])}
    model = pretraining().bert
    engine = start(model, 2)
    out = model(**engine.local_sequence({"input_ids": batch(0)["input_ids"]}))
    assert out.last_hidden_state.shape[1] == 11
    assert out.pooler_output is None  # the first token of a part is not that of the sample
    engine.detach()
    for name, build, layer, rows in (
        ("tokens meet elsewhere", llama, Cumulative, batch(0)),
        ("packed rows that the model does not tell apart", gpt_oss, None, first_parts_full),
        ("code for whole sequences", llama, Shaped, batch(0)),
        ("positions that later padding changes", counting, None, {**batch(0), "attention_mask": torch.ones(2, 22)}),
        ("a mask passed on", paligemma, None, batch(0, 1, 2, 13)),
        ("an output per sample", pretraining, None, {"input_ids": batch(0)["input_ids"]}),
        ("an output per sample of few tokens", pretraining, None, {"input_ids": batch(0)["input_ids"][:, :3]}),
        ("a loss over all tokens", over_all, None, batch(0)),
        ("choices", choices, None, {"input_ids": batch(0)["input_ids"].view(2, 2, 11)}),
    ):
        model = made(build)
        if layer is not None:
            model.model.layers[0].mlp = layer()
        engine = start(model, 2)
        found[name] = message(lambda model=model, engine=engine, rows=rows: model(**engine.local_sequence(rows)))
        engine.detach()
    return found


def test_refusals(two: RankPool) -> None:
    first, second = two.run(refused)
    assert first == second
    for name, text in {
        "heads": "ConfigError: sp_size=2 does not divide the 3 attention heads of LlamaForCausalLM. Choose one of 1, 3",
        "encoder and decoder": "one of the encoder and one of the decoder",
        "positions of its own": "attn_temperature_tuning",
        "recurrent": "MambaForCausalLM has Conv1d",
        "no transformer": "found Linear, which is none",
        "router": "output_router_logits",
        "ranks": "sp_size=3 does not divide 2 ranks into groups of one size: choose one of 1, 2",
        "other rows": "RankMismatchError: the 2 ranks of a group divide one batch, and theirs differ in input_ids, labels",
        "other rows later": "RankMismatchError: the 2 ranks of a group divide one batch",
        "not divided": "StateError: a forward of LlamaForCausalLM trains on whole sequences",
        "4-D mask": "attention_mask has the shape (2, 1, 12, 12)",
        "positions of images": "position_ids has the shape (3, 2, 12)",
        "one label per sample": "leave sp_size out for one label per sample",
        "divided twice": "StateError: local_sequence got what local_sequence returned",
        "weighed": "with sp_size=2 the model's loss is the mean over the tokens of all ranks",
        "chosen arguments": "a forward without position_ids and shift_labels",
        "attentions": "output_attentions",
        "a configuration of two models": "ConfigError: sp_size=2 replaces attention in a model's configuration",
        "tokens meet elsewhere": "Its tokens meet outside of attention",
        "packed rows that the model does not tell apart": "Its tokens meet outside of attention",
        "positions that later padding changes": "counts positions in its own way",
        "a mask passed on": "sp_size=2 does not divide rows of 13 tokens",
        "an output per sample": "Its tokens meet outside of attention",
        "an output per sample of few tokens": "Its tokens meet outside of attention",
        "a loss over all tokens": "its loss is no mean over labels",
        "choices": "ConfigError: sequence parallelism divides self-attention over one sequence",
        "code for whole sequences": "on a part of a sequence raises",
    }.items():
        assert text in first[name], name
