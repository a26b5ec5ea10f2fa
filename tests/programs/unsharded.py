"""`zero.unsharded`: all weights whole at once; forwards inside gather nothing, writes count, training goes on after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import adamw, gpt2
from tests.oracle import Run, program
from tests.programs.accessors import full_parameter
from tests.programs.usual import is_sharded, see_weights, without_memory

RANKS = {"ranks": (1, 2, 3)}


def _loss(run: Run, step: int) -> Tensor:
    ids = run.ids(step)
    return run.model(input_ids=ids, labels=ids).loss


def _step(run: Run, step: int) -> None:
    loss = _loss(run, step)
    loss.backward()
    run.see(loss, "loss")
    run.update()


@torch.no_grad()
def _evaluate(run: Run, what: str) -> None:
    run.see(run.model(input_ids=run.ids(90)).logits, f"evaluation {what}")


@program(reference="average", more=RANKS)
def used_inside(run: Run) -> None:
    model = run.trained_model(gpt2, adamw)
    engine = run.engine_of(model)
    _step(run, 0)
    _evaluate(run, "before")
    for in_compute_dtype in (False, True):
        with run.unsharded(model, in_compute_dtype=in_compute_dtype):
            for name, param in model.named_parameters():
                run.see(param.float(), f"{name} inside")
                run.see(param.is_contiguous(), f"whether {name} is whole")
            before = engine.traffic.to_dict() if engine is not None else {}
            for _ in range(2):
                _evaluate(run, "inside")
            prompt = run.ids(0)[:, :3]
            tokens = model.generate(prompt, max_new_tokens=2 + 3 * run.rank, do_sample=False, pad_token_id=0)
            run.see(tokens.shape[1] <= 5 + 3 * run.rank, "whether each rank generates as much as it likes")
            if run.rank == 0:
                _evaluate(run, "of one rank")
            with run.unsharded(model.transformer), run.gathered(model):
                run.see(model.lm_head.weight.float(), "weight in nested contexts")
            if engine is not None:
                assert engine.traffic.to_dict() == before, "something was sent inside"
            state = model.state_dict()
            run.see(state["lm_head.weight"].float() if run.rank == 0 else None, "weight of the state dict")
        if run.setting.stage == 3 and is_sharded(run.setting) and not run.setting.kept:
            assert all(map(without_memory, model.parameters())), "parameters are not released"
        _evaluate(run, "after")
        for step in (1, 2):
            _step(run, step)


class _LoopError(Exception):
    pass


@program(reference="average", more=RANKS)
def written_inside(run: Run) -> None:
    """Whole edits, edits of one rank, and edits before an error."""
    model = run.trained_model(gpt2, adamw)
    weight, bias = model.transformer.h[1].mlp.c_fc.weight, model.transformer.h[0].ln_1.bias
    past_torch = model.transformer.h[0].attn.c_proj.bias

    def edit(by: float) -> None:
        weight.data += by
        weight.data[3].zero_()
        with torch.no_grad():
            bias.fill_(by)
        past_torch.detach().numpy()[1:] = by
        model.transformer.ln_f.weight.data = torch.full((32,), by)

    _step(run, 0)
    with run.unsharded(model):
        edit(0.5)
        for name, value in model.state_dict().items():
            run.see(value, f"{name} of the state dict inside")
        _evaluate(run, "inside")
        if run.world > 1:
            with run.gathered([bias], modifier_rank=1), torch.no_grad():
                if run.is_plain or run.rank == 1:
                    bias.fill_(0.75)
            run.see(bias, "bias edited by rank 1")
    see_weights(run, model, "after edits:")
    try:
        with run.unsharded(model):
            edit(1.5)
            raise _LoopError
    except _LoopError:
        pass
    see_weights(run, model, "after edits and an error:")
    _evaluate(run, "after edits")
    _step(run, 1)


@program(reference="average", only={"ranks": (2, 3)}, tells=lambda setting: setting.ranks == 3)
def written_inside_by_rank(run: Run) -> None:
    """Raises the same error on every rank; a state dict restores the weight."""
    model = run.trained_model(gpt2, adamw)
    weight = model.transformer.h[1].mlp.c_fc.weight
    _step(run, 0)
    kept = {name: value.clone() for name, value in model.state_dict().items()}

    def write() -> None:
        with run.unsharded(model):
            weight.data.fill_(float(run.rank == run.world - 1))

    run.refuses(zero.RankMismatchError, f"with other values on rank {run.world - 1}", write)
    model.load_state_dict(kept)
    _step(run, 1)


@program(reference="average")
def trained_inside(run: Run) -> None:
    """Is refused, but for a forward: its backward may come after the context."""
    model = run.trained_model(gpt2, adamw)
    engine, state = run.engine_of(model), model.state_dict()
    with run.unsharded(model):
        loss = _loss(run, 0)
        for act in (
            lambda: loss.backward(),
            lambda: run.optimizer.step(),
            lambda: model.load_state_dict(state),
            lambda: zero.set_full_parameter(model.lm_head.weight, torch.zeros(model.lm_head.weight.shape)),
            lambda: engine.detach(),
            lambda: engine.offload_states(),
            lambda: engine.load("nowhere"),
            lambda: engine.bind(adamw(model)),
        ):
            run.refuses(zero.StateError, "inside zero.unsharded", act)
        loss = _loss(run, 0)
    loss.backward()
    run.see(loss, "loss of a forward inside")
    run.update()
    for step in (1, 2):
        _step(run, step)
    see_weights(run, model)


@program(only={"deferred": (True,)})
def unsharded_before_sharding(run: Run) -> None:
    layer = run.build(lambda: nn.Linear(4, 4))

    def enter() -> None:
        with zero.unsharded(layer):
            pass

    run.refuses(zero.StateError, r"(born|created) under zero\.Init", enter)


@program(reference="average", only={"precision": ("bf16",)})
def digits_of_what_is_not_written_inside(run: Run) -> None:
    """Parameters in the compute dtype show rounded values; masters of those that stay as they are keep all digits."""
    model = run.mlp()
    run.step(0)
    expected = {name: full_parameter(run, param).clone() for name, param in model.named_parameters()}
    with run.unsharded(model, in_compute_dtype=True), torch.no_grad():
        model[0].weight[3, 5] = expected["0.weight"][3, 5] = 0.5
    now = {name: full_parameter(run, param) for name, param in model.named_parameters()}
    run.see([name for name in now if not torch.equal(now[name], expected[name])], "differing")
