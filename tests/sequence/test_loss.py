"""`chunked_loss`: the numbers of the stock loss, without its logits; named errors."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import VOCAB, bert, generator, gpt2, ids, llama, t5
from tests.sequence.models import batch, whole

SMALL = partial(patch, "hf_zero.plan.activations._CHUNK_BYTES", 4 * VOCAB * 5)
"""Chunks of five tokens."""
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


def gemma() -> nn.Module:
    """A cap on logits."""
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, final_logit_softcapping=0.5))  # type: ignore[arg-type]


def cohere() -> nn.Module:
    """A factor on logits."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return transformers.CohereForCausalLM(transformers.CohereConfig(**sizes, logit_scale=3.0))  # type: ignore[arg-type]


def granite() -> nn.Module:
    """A divisor of logits."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, logits_scaling=0.3))  # type: ignore[arg-type]


def bart() -> nn.Module:
    """A constant row that is added to logits."""
    sizes = {
        "vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    }  # fmt: skip
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))  # type: ignore[arg-type]
    model.final_logits_bias.normal_()
    return model


def big_bird() -> nn.Module:
    """A head whose parent's hooks gather it, and have ended when the loss is computed."""
    sizes = {**SIZES, "sep_token_id": 2, "attention_type": "original_full", "hidden_dropout_prob": 0.0}
    config = transformers.BigBirdConfig(**sizes, attention_probs_dropout_prob=0.0)
    return transformers.BigBirdForPreTraining(config)


def lora() -> nn.Module:
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[arg-type]


MODELS: dict[str, Any] = {
    "llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "gemma": gemma, "cohere": cohere, "granite": granite, "lora": lora,
    "bart": bart, "big bird": big_bird,
}  # fmt: skip


def start(build: Any, chunked: Any, stage: int = 2, precision: str = "no", **settings: Any) -> tuple[Any, zero.Engine]:
    torch.manual_seed(2)
    model = build().train()
    trained = [param for param in model.parameters() if param.requires_grad]
    config = zero.ZeroConfig(stage=stage, chunked_loss=chunked, stall_s=20, **settings)
    return model, zero.shard(model, torch.optim.SGD(trained, lr=0.1), config, mixed_precision=precision)


def data(rank: int, step: int) -> dict[str, Tensor]:
    given = ids(rank, step, 2, 9)
    labels = given.clone()
    labels[0, :4] = -100
    return {"input_ids": given, "labels": labels}


def numbers(rank: int, build: Any, chunked: Any, stage: int, precision: str) -> list[Tensor]:
    """Losses and gradients: a mean, then two micro-batches with a number of items, one of them without labels."""
    model, engine = start(build, chunked, stage, precision)
    out = model(**data(rank, 0))
    out.loss.backward()
    found = [out.loss.detach()]
    with engine.no_sync():
        last = data(rank, 1)
        last["labels"][:] = -100
        more = (
            {}
            if isinstance(model, (transformers.T5ForConditionalGeneration, transformers.BartForConditionalGeneration))
            else {"num_items_in_batch": torch.tensor(20)}
        )
        if more:
            model(**last, **more).loss.backward()
    loss = model(**data(rank, 2), **more).loss
    loss.backward()
    found.append(loss.detach())
    found += [each for p in model.parameters() if p.requires_grad and (each := zero.full_gradient(p)) is not None]
    engine.detach()
    return found


def off(found: list[Tensor], wanted: list[Tensor]) -> float:
    assert len(found) == len(wanted)
    scale = torch.stack([each.float().norm() for each in wanted]).max()
    return max(float((a - b).float().norm() / max(b.float().norm(), 1e-3 * scale)) for a, b in zip(found, wanted))


def equal(rank: int, world: int) -> dict[str, float]:
    rows = [
        ("llama", 3, "no"), ("llama", 1, "bf16"), ("gpt2", 3, "no"), ("gpt2", 0, "no"), ("bert", 2, "no"), ("t5", 2, "no"),
        ("gemma", 3, "no"), ("cohere", 2, "no"), ("granite", 2, "no"), ("lora", 3, "no"), ("gpt2", 2, "bf16"),
        ("bart", 3, "no"), ("big bird", 3, "no"),
    ]  # fmt: skip
    found = {}
    for name, stage, precision in rows:
        wanted = numbers(rank, MODELS[name], False, stage, precision)
        with SMALL():
            worst = off(numbers(rank, MODELS[name], True, stage, precision), wanted)
        found[f"{name} {stage} {precision}"] = worst / (2e-6 if precision == "no" else 1e-2)
    return found


@pytest.mark.gloo
def test_the_stock_numbers(two: RankPool) -> None:
    for found in two.run(equal, timeout_s=300):
        assert {name: value for name, value in found.items() if not value <= 1} == {}


def test_many_chunks_add_up_in_float32() -> None:
    """A sum of 190 chunks in bfloat16 is off by almost two percent."""
    gradients = []
    for chunked in (False, True):
        model, engine = start(lambda: llama().bfloat16(), chunked)
        rows = ids(0, 0, 64, 16)
        with SMALL():
            model(input_ids=rows, labels=rows).loss.backward()
        gradients.append(zero.full_gradient(model.lm_head.weight))
        engine.detach()
    assert off(gradients[1:], gradients[:1]) < 5e-3  # type: ignore[arg-type]


def in_double(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """A loss of the user's own, in the type of the logits."""
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def test_sums_of_chunks_are_as_exact_as_the_weights() -> None:
    gradients = []
    for chunked in (False, True):
        model, engine = start(lambda: llama().double(), chunked)
        model.loss_function = in_double
        rows = ids(0, 0, 8, 16)
        with SMALL():
            model(input_ids=rows, labels=rows).loss.backward()
        gradients.append(zero.full_gradient(model.lm_head.weight))
        engine.detach()
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-14)


def divided(rank: int, world: int) -> float:
    """With `sp_size`, a part of which has no labels."""
    given = batch(0)
    given["labels"][:, 11:] = -100
    given["labels"][:, 2] = given["input_ids"][:, 2]
    torch.manual_seed(2)
    loss, gradients = whole(llama(), [given], True)
    model, engine = start(llama, True, 3, sp_size=2)
    with SMALL():
        out = model(**engine.local_sequence(given))
        out.loss.backward()
    found = {name: zero.full_gradient(param) for name, param in model.named_parameters()}
    engine.detach()
    return off([out.loss.detach(), *(found[name] for name in gradients)], [loss, *gradients.values()])  # type: ignore[list-item]


@pytest.mark.gloo
def test_with_sequence_parallelism(two: RankPool) -> None:
    assert max(two.run(divided)) < 2e-6


def made_by(act: Any, numel: int) -> int:
    """The number of tensors of `numel` elements that `act` makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            self.found += isinstance(made, Tensor) and made.numel() == numel
            return made

    with Count() as count:
        act()
    return count.found


def test_logits_are_not_made() -> None:
    model, engine = start(llama, True)
    given = data(0, 0)
    with SMALL():
        assert made_by(lambda: model(**given).loss.backward(), 18 * VOCAB) == 0
        by_position = (given["input_ids"], None, None, None, None, given["labels"])
        assert made_by(lambda: model(*by_position).loss.backward(), 18 * VOCAB) == 0
        model.eval()
        with torch.no_grad():
            assert made_by(lambda: model(**given).loss, 18 * VOCAB) == 0
    engine.detach()
    model, engine = start(llama, "auto")
    with SMALL():
        assert made_by(lambda: model(**given).loss.backward(), 18 * VOCAB) > 0  # small enough
    engine.detach()


def test_logits_that_are_read() -> None:
    wanted_model, wanted_engine = start(llama, False)
    model, engine = start(llama, True)
    given = data(0, 0)
    wanted, out = wanted_model(**given), model(**given)
    assert out.logits.shape == wanted.logits.shape
    with torch.no_grad():  # what is read first without a graph has one where a loss needs it
        assert torch.equal(out.logits.exp(), wanted.logits.exp())
    assert torch.equal(out.logits[:, -1].argmax(-1), wanted.logits[:, -1].argmax(-1))
    assert torch.equal(out.logits.detach(), wanted.logits.detach())
    for index in (-1, [1, VOCAB - 1], slice(VOCAB - 3, None), [*reversed(range(VOCAB))]):  # words, not hidden features
        assert torch.equal(model(**given).logits[..., index], wanted.logits[..., index])
    out, wanted = model(**given), wanted_model(**given)
    assert torch.equal(out.logits.to("cpu", torch.float64), wanted.logits.double())  # a device's name
    assert out.logits.to("meta").is_meta
    for each, found in ((wanted_model, wanted), (model, out)):
        (found.loss + F.softmax(found.logits, -1).square().mean()).backward()  # a loss of the user's own
        assert each is not None
    for a, b in zip(model.parameters(), wanted_model.parameters()):
        torch.testing.assert_close(zero.full_gradient(a), zero.full_gradient(b), rtol=1e-5, atol=1e-7)
    late = model(**given)
    late.loss.backward()
    engine.optimizers[0].step()
    with pytest.raises(zero.StateError, match=r"before optimizer\.step\(\)"):
        late.logits.argmax(-1)
    assert isinstance(model(given["input_ids"]).logits.argmax(-1), Tensor)
    assert model.generate(given["input_ids"][:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)
    copied = copy.deepcopy(model)
    assert copied(**given).logits.requires_grad  # a plain module
    engine.detach()
    wanted_engine.detach()
    assert torch.isfinite(model(**given).logits).all()


def read(rank: int, world: int) -> bool:
    """Logits of a head whose weight another module's hooks gather, before the backward and after it."""
    found = []
    for chunked in (False, True):
        model, engine = start(bert, chunked, 3)
        out = model(**data(rank, 0))
        loss = out.loss + F.softmax(out.logits, -1).square().mean()
        loss.backward()
        trained = [param for param in model.parameters() if param.requires_grad]
        gradients = [each for param in trained if (each := zero.full_gradient(param)) is not None]
        out = model(**data(rank, 1))
        out.loss.backward()
        found.append([loss.detach(), *gradients, out.logits.detach()])
        engine.detach()
    return off(found[1], found[0]) < 2e-6


@pytest.mark.gloo
def test_logits_of_a_tied_head_are_read_at_stage_3(two: RankPool) -> None:
    assert two.run(read) == [True, True]


def test_a_trainer_that_evaluates(tmp_path: Path) -> None:
    def predicted(chunked: Any) -> tuple[Any, Any]:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        torch.manual_seed(1)
        rows = [{name: each[0] for name, each in data(0, number).items()} for number in range(4)]
        args = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True,
            parallelism_config=zero.ZeroPlugin(chunked_loss=chunked),
        )  # fmt: skip
        trainer = transformers.Trainer(
            llama(),
            args,
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=lambda each: {"sum": each.predictions.sum()},
        )
        trainer.train()
        found = trainer.evaluate()
        return found["eval_loss"], found["eval_sum"]

    wanted, found = predicted(False), predicted(True)
    assert found == pytest.approx(wanted, rel=1e-5)


class Own(nn.Module):
    """A loss that needs logits one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor, labels: Tensor | None = None, way: str = "softmax") -> dict[str, Tensor]:
        logits = self.lm_head(x)
        return {"loss": logits.softmax(-1).square().mean() if way == "softmax" else x.mean(), "logits": logits}


class Smoothed(Own):
    """A cross entropy with settings of its own."""

    def forward(self, x: Tensor, labels: Tensor | None = None, way: str = "mean") -> dict[str, Tensor]:
        losses = F.cross_entropy(self.lm_head(x), labels, ignore_index=3, label_smoothing=0.2, reduction=way)
        return {"loss": losses.square().mean()}


@pytest.mark.parametrize("way", ["mean", "sum", "none"])
def test_settings_of_a_cross_entropy(way: str) -> None:
    found = []
    for chunked in (False, True):
        model, engine = start(Smoothed, chunked)
        loss = model(torch.linspace(-1, 1, 48).view(6, 8), labels=torch.tensor([0, 3, 1, 2, 3, 4]), way=way)["loss"]
        loss.backward()
        found.append([loss.detach(), *(zero.full_gradient(param) for param in model.parameters())])
        engine.detach()
    for wanted, mine in zip(*found):
        torch.testing.assert_close(mine, wanted)


def headed() -> nn.Module:
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head"]))  # type: ignore[arg-type]


def test_second_derivatives() -> None:
    """They would silently be zero."""
    model, engine = start(llama, True)
    with pytest.raises(zero.ConfigError, match="create_graph=True"):
        torch.autograd.grad(model(**data(0, 0)).loss, [model.lm_head.weight], create_graph=True)
    engine.detach()


def test_hooks_of_a_head() -> None:
    """They see and change logits, which are never made in chunks."""
    losses = []
    for chunked in (False, "auto"):
        model, engine = start(llama, chunked)
        model.lm_head.register_forward_hook(lambda module, args, logits: logits * 2)
        with patch("hf_zero.sequence.chunked_loss.LOSS_BYTES", 0):
            losses.append(float(model(**data(0, 0)).loss.detach()))
        engine.detach()
    assert losses[0] == losses[1]
    model, engine = start(llama, True)
    for register in (model.lm_head.register_forward_hook, model.lm_head.register_full_backward_hook):
        handle = register(lambda *_: None)
        with pytest.raises(zero.ConfigError, match="head has hooks of user code"):
            model(**data(0, 0))
        handle.remove()
    out = model(**data(0, 0))
    for act in (out.logits.retain_grad, lambda: out.logits.register_hook(print)):
        with pytest.raises(zero.ConfigError, match="waits for the gradient of logits"):
            act()
    assert torch.isfinite(out.loss)
    engine.detach()


def test_refusals() -> None:
    for build, found in ((partial(nn.Linear, 4, 4), "no output embedding"), (headed, "has Linear")):
        with pytest.raises(zero.ConfigError, match=found):
            start(build, True)
        start(build, "auto")[1].detach()
    x, labels = torch.randn(3, 8, generator=generator(1)), torch.zeros(3, dtype=torch.long)
    model, engine = start(Own, True)
    with pytest.raises(zero.ConfigError, match=r"calls softmax\(\) on its logits"):
        model(x, labels=labels)
    with pytest.raises(zero.ConfigError, match="has no effect"):
        model(x, labels=labels, way="none")
    engine.detach()
    model, engine = start(Own, "auto")
    assert torch.isfinite(model(x, labels=labels)["loss"])
    engine.detach()
    with pytest.raises(zero.ConfigError, match="chunked_loss must be True, False or 'auto'"):
        zero.ZeroConfig(chunked_loss="yes")
