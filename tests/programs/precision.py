"""bf16 and fp16 wherever a model is entered, for generation, and for matrices that no linear layer has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit import families
from tests.models import VOCAB, LanguageModel, gpt2, ids, mlp, t5, token_loss
from tests.oracle import Run, program
from tests.programs.usual import trained_on

SPECIAL = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def bart() -> nn.Module:
    layers = {
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 2))
    }
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
        decoder_start_token_id=2, forced_eos_token_id=2, **layers, **SPECIAL,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def text(rank: int, step: int) -> dict[str, Tensor]:
    tokens = ids(rank, step, length=6 + rank)
    return {"input_ids": tokens, "labels": tokens[:, :5].contiguous()}


def speaks(name: str, make: Callable[[], nn.Module], batch: Callable[[int, int], dict[str, Tensor]]) -> None:
    """Trained, and asked to speak."""

    def run_it(run: Run) -> None:
        model = run.build(make).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = run.shard(model, optimizer)
        for step in range(2):
            loss = model(**batch(run.rank, step)).loss
            loss.backward()
            run.see(loss, "loss")
            optimizer.step()
            optimizer.zero_grad()
        prompt = {key: value for key, value in batch(0, 9).items() if key != "labels"}
        options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        found = model.eval().generate(**prompt, **options)
        run.see(found.sequences, "words")
        for scores in found.scores:
            run.see(scores.isfinite(), "words that may be")
            run.see(scores.masked_fill(~scores.isfinite(), 0.0).float(), "scores")

    program(run_it, name=f"{name}_speaks")


speaks("t5", t5, text)
speaks("bart", bart, text)


# Entered elsewhere than at the top ---------------------------------------------------------------------------------------


def clip() -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 8,
    }
    words = {"vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": 2, **sizes}
    pixels = {"image_size": 16, "patch_size": 8, **sizes}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=words, vision_config=pixels, projection_dim=8))


class Valued(nn.Module):
    """A language model with a value head, called around its `forward` as reinforcement learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()
        self.value = nn.Linear(32, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.values(tokens)

    def values(self, tokens: Tensor) -> Tensor:
        return self.value(self.model.transformer(tokens).last_hidden_state)


PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
Entry = Callable[[Any, Tensor], Any]
"""(model, tokens) -> what a part of it answers."""
ENTRIES: dict[str, tuple[Callable[[], nn.Module], list[Entry]]] = {
    "clip": (
        clip,
        [
            lambda m, tokens: m.get_image_features(pixel_values=PIXELS),
            lambda m, tokens: m.get_text_features(input_ids=tokens),
            lambda m, tokens: m.vision_model(PIXELS),
        ],
    ),
    "value_head": (Valued, [lambda m, tokens: m.values(tokens), lambda m, tokens: m.model.transformer(tokens)]),
    "blocks": (
        LanguageModel,
        [
            lambda m, tokens: m.body.blocks[1](m.body.embed(tokens)),
            lambda m, tokens: m.body.blocks[1].up(torch.ones(2, 16)),
            lambda m, tokens: m.body.blocks[1].norm(torch.ones(2, 16)),
            lambda m, tokens: m.heads[0](m.body(tokens)),
        ],
    ),
    "t5": (t5, [lambda m, tokens: m.encoder(tokens)]),
    "bart": (bart, [lambda m, tokens: m.model.encoder.layers[0].self_attn(torch.ones(2, 3, 16))]),
}


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else getattr(output, "pooler_output", output[0])


def entered(name: str, make: Callable[[], nn.Module], entries: list[Entry]) -> None:
    def run_it(run: Run) -> None:
        run.trained_model(lambda: make().eval(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        for step, call in enumerate(entries * 2):
            output = first(call(run.model, run.ids(step)))
            run.see(str(output.dtype), "its type")
            run.see(output, "an answer")
            output.float().square().mean().backward()
            run.update()
            run.see(torch.is_autocast_enabled("cpu"), "autocast outside")

    more = {"precision": ("fp32", "bf16", "fp16")}
    program(run_it, name=f"{name}_entered", reference="average", more=more)


for _name, (_make, _entries) in ENTRIES.items():
    entered(_name, _make, _entries)


class Interrupted(nn.Module):
    """In its middle autocast is off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = mlp(depth=1), nn.Linear(16, 16), mlp(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float() + torch.tanh(F.linear(x.float(), torch.eye(16)))
        return self.last(self.inner(x))


@program(reference="average")
def autocast_is_left(run: Run) -> None:
    """On an exception too; what the model turns off stays off."""
    model = run.trained_model(Interrupted)
    for step in range(3):
        with contextlib.suppress(RuntimeError):
            model.first(torch.ones(2, 9))
        run.see(torch.is_autocast_enabled("cpu"), "autocast after an exception in a part")
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 9))
        run.see(torch.is_autocast_enabled("cpu"), "autocast after an exception")
        run.see(str(model.inner(torch.ones(2, 16)).dtype), "the type of a part")
        run.step(step)


# Matrices outside linear layers ------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """torch's attention, packed and with keys of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.packed = nn.MultiheadAttention(16, 2, batch_first=True)
        self.apart = nn.MultiheadAttention(16, 2, batch_first=True, kdim=8, vdim=8)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.packed(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + self.apart(hidden, hidden[..., :8], hidden[..., 8:])[0]
        return self.head(hidden)


def mixtral(experts: str) -> nn.Module:
    model = families.mixtral(hidden_size=16, intermediate_size=24, max_position_embeddings=32, use_cache=False)
    model.config._experts_implementation = experts
    return model


@trained_on(Attending, steps=3)
def attention(run: Run, step: int) -> Tensor:
    rows = run.ids(step)
    return token_loss(run.model(rows), rows)


def _routed(run: Run, step: int) -> Tensor:
    rows = run.ids(step)
    return run.model(input_ids=rows, labels=rows).loss


@trained_on(lambda: mixtral("eager"), steps=3)
def eager_experts(run: Run, step: int) -> Tensor:
    return _routed(run, step)


@trained_on(lambda: mixtral("grouped_mm"), steps=3)
def grouped_experts(run: Run, step: int) -> Tensor:
    return _routed(run, step)


class Empty(LanguageModel):
    """Its first parameter has no element; the embedding comes next, and no optimizer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks[0].nothing = nn.Parameter(torch.empty(0))


def but_the_embedding(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "embed" not in name], lr=1e-2, eps=1e-3)


@program(more={"precision": ("fp32", "fp16")})
def scaled_with_an_empty_parameter(run: Run) -> None:
    model = run.trained_model(Empty, but_the_embedding)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, bad in enumerate([0, None, 1, None]):
        rows = run.ids(step)
        loss = token_loss(model(rows), rows) * (float("inf") if run.rank == bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.see(scaler.get_scale(), "the scale")
