"""Weights that are read by others than the module that holds them, through the stock Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparing import Build, compare, llama
from harness import Tokens
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Fused(torch.autograd.Function):
    """As Liger's fused linear cross entropy: both gradients are worked out, piece by piece, in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        loss = hidden.new_zeros(())
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for rows in torch.arange(len(hidden)).chunk(2):
            with torch.enable_grad():
                part, whole = hidden[rows].detach().requires_grad_(), weight.detach().requires_grad_()
                piece = F.cross_entropy(part @ whole.T, labels[rows], reduction="sum") / len(hidden)
                of_hidden[rows], gradient = torch.autograd.grad(piece, (part, whole))
            of_weight += gradient
            loss += piece.detach()
        ctx.save_for_backward(of_hidden, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_hidden, of_weight = ctx.saved_tensors
        return given * of_hidden, given * of_weight, None


def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return Fused.apply(hidden, weight, labels)  # type: ignore[no-any-return]


def linear(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def shifted(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


class Reads(LlamaForCausalLM):
    """Its head is never called: the loss is computed from the head's weight, within the model's forward."""

    loss: Loss = staticmethod(fused)

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:  # type: ignore[override]
        hidden, labels = shifted(self.model(input_ids).last_hidden_state, labels)
        return CausalLMOutput(loss=self.loss(hidden, self.lm_head.weight, labels))  # type: ignore[arg-type]


class ReadsLinear(Reads):
    loss = staticmethod(linear)


class ReadsAgain(Reads):
    """The head is checkpointed: its weight is read in backward, too."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:  # type: ignore[override]
        hidden, labels = shifted(self.model(input_ids).last_hidden_state, labels)

        def head(part: Tensor) -> Tensor:
            return F.linear(part, self.lm_head.weight)

        logits = checkpoint(head, hidden, use_reentrant=False)
        return CausalLMOutput(loss=F.cross_entropy(logits, labels))  # type: ignore[arg-type]


class ReadsEmbedding(Reads):
    """Has no head: the embedding's weight is one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.lm_head
        self._tied_weights_keys = {}

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:  # type: ignore[override]
        hidden, labels = shifted(self.model(input_ids).last_hidden_state, labels)
        return CausalLMOutput(loss=linear(hidden, self.model.embed_tokens.weight, labels))  # type: ignore[arg-type]


class Redirected(Trainer):
    """As trainers with Liger's losses did: the model's forward is replaced by the loss for one call."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        bare = self.accelerator.unwrap_model(model)
        usual = bare.forward

        def instead(input_ids: Tensor, labels: Tensor) -> Tensor:
            bare.forward = usual
            hidden, labels = shifted(bare.model(input_ids).last_hidden_state, labels)
            return fused(hidden, bare.lm_head.weight, labels)

        bare.forward = instead
        return model(**inputs)  # type: ignore[no-any-return]


class Outside(Trainer):
    """The model gives hidden states; the loss reads a weight when the forward is over."""

    weight = "lm_head.weight"

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        states = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states
        hidden, labels = shifted(states[-1], inputs["labels"])
        return fused(hidden, self.accelerator.unwrap_model(model).get_parameter(self.weight), labels)


class OutsideEarly(Outside):
    """A weight that the forward has long been done with."""

    weight = "model.embed_tokens.weight"


def trained(model: Callable[[], nn.Module], kind: type[Trainer] = Trainer, **changes: Any) -> Build:
    def build(common: dict[str, Any]) -> Trainer:
        args = TrainingArguments(**{**common, **changes})
        return kind(model=model(), args=args, train_dataset=Tokens())

    return build


def adapted(tied: bool, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
        return get_peft_model(llama(tied), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **config))

    return make


TOKENS = {"trainable_token_indices": {"embed_tokens": [7, 8, 9]}}
CASES: dict[str, Build] = {
    "fused": trained(lambda: llama(kind=Reads)),
    "fused tied": trained(lambda: llama(True, kind=Reads)),
    "linear": trained(lambda: llama(kind=ReadsLinear), gradient_accumulation_steps=2),
    "linear tied": trained(lambda: llama(True, kind=ReadsLinear)),
    "linear checkpointing": trained(lambda: llama(kind=ReadsLinear), gradient_checkpointing=True),
    "read again": trained(lambda: llama(kind=ReadsAgain)),
    "read again tied": trained(lambda: llama(True, kind=ReadsAgain)),
    "embedding": trained(lambda: llama(kind=ReadsEmbedding)),
    "redirected": trained(llama, Redirected),
    "redirected tied": trained(lambda: llama(True), Redirected),
    "outside": trained(llama, Outside),
    "outside tied": trained(lambda: llama(True), Outside),
    "outside early": trained(llama, OutsideEarly),
    "tokens": trained(adapted(False, **TOKENS)),
    "tokens tied": trained(adapted(True, **TOKENS)),
    "saved head": trained(adapted(False, modules_to_save=["lm_head"])),
    "saved head and embedding": trained(adapted(False, modules_to_save=["lm_head", "embed_tokens"])),
}


SAVES = {"fused tied", "tokens", "tokens tied", "saved head and embedding"}


if __name__ == "__main__":
    compare(CASES, SAVES)
