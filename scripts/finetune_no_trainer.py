"""The same causal language modelling as `finetune.py`, as a plain accelerate loop: the only line about ZeRO is marked.

torchrun --nproc-per-node 2 scripts/finetune_no_trainer.py --zero-stage 3 --save-steps 50
torchrun --nproc-per-node 4 scripts/finetune_no_trainer.py --zero-stage 3 --save-steps 50 --resume

Every flag is one of `finetune.py`, with the same meaning; the short spellings are this script's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from finetune_console import (
    Help,
    UserError,
    check_output,
    everywhere,
    highest,
    number,
    peak_bytes,
    print_summary,
    run,
)
from finetune_data import embedded_corpus, language_modeling, load_text, load_tokenizer, pick_column
from finetune_flags import Parser, answer_help
from finetune_models import load_config, load_model, max_positions
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

import hf_zero as zero
from hf_zero.config import size_text
from hf_zero.huggingface.arguments import ZeroFlags


class Progress:
    """How far the run is: part of its checkpoints, as accelerate's own parts are.

    Args:
        rows: of a step, all ranks together. A checkpoint counts steps, so another number would be another place in the data.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.step = rows, 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
        if state.get("rows", self.rows) != self.rows:
            raise UserError(
                f"a step takes {self.rows} rows now and took {state['rows']} before the checkpoint: choose --batch-size and "
                "--accumulation such that their product with the number of ranks stays"
            )


@torch.no_grad()
def perplexity(accelerator: Accelerator, model: PreTrainedModel, loader: DataLoader) -> float:
    """exp of the mean loss; every block counts as many tokens, so the mean over blocks is the mean over tokens."""
    model.eval()
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return math.exp(torch.cat(losses).mean().item())


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(ZeroFlags, allow_abbrev=False, add_help=False, description=__doc__, formatter_class=Help)

    def flag(name: str, *short: str, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}", *short)), **settings)

    flag("model", default="gpt2-tiny", help="Hub id, local folder, or a model from scratch by its name")
    flag("dataset", help="Hub id or local file; without it, Python's standard library")
    flag("output-dir", default="runs/no-trainer", help="folder of the trained model and of checkpoints")
    flag("max-steps", "--steps", type=int, default=150, help="optimizer steps")
    flag("per-device-train-batch-size", "--batch-size", type=int, default=16, help="rows per rank and micro-step")
    flag("gradient-accumulation-steps", "--accumulation", type=int, default=1, help="micro-steps per step")
    flag("block-size", type=int, default=128, help="tokens per training row")
    flag("learning-rate", type=float, default=2e-3, help="its highest, after the warm-up")
    flag("save-steps", type=int, default=0, help="steps from checkpoint to checkpoint; 0: none")
    flag("resume-from-checkpoint", choices=("latest",), help="go on from the newest whole one, if there is one")
    parser.add_argument("--resume", dest="resume_from_checkpoint", action="store_const", const="latest")
    words = sys.argv[1:] if argv is None else list(argv)
    answer_help(words, parser, [action.dest for action in parser._actions])
    args = parser.parse_args(words)
    batch_size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    (flags,) = parser.parse_dict(vars(args), allow_extra_keys=True)
    check_output(args.output_dir)

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=False,  # it counts steps of this loop, at any number of ranks
        project_config=ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42),  # an order to come back to
        parallelism_config=zero.ZeroPlugin(**flags.settings()),  # <- all there is to ZeRO: zero.ZeroPlugin(stage=…)
    )
    saved = highest(len(list(Path(args.output_dir, "checkpoints").glob("checkpoint_*"))))
    if saved and args.save_steps and not args.resume_from_checkpoint:
        raise UserError(f"{args.output_dir!r} holds checkpoints: go on with --resume, or give another --output-dir")
    with accelerator.main_process_first():
        config = load_config("clm", args.model)
        texts = load_text(args.dataset) if args.dataset else embedded_corpus("clm")
        column = pick_column(texts["train"], None, ("text",), "a column called 'text'")
        vocabulary = min(config.vocab_size, 16384)
        tokenizer = load_tokenizer(None, config.model_type, texts["train"], column, vocabulary, max_positions(config))
        data = language_modeling("clm", texts, column, tokenizer, args.block_size, limits=(None, 128))
    set_seed(42)
    model = load_model("clm", args.model, config, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 10, args.max_steps)
    loader = DataLoader(data.train, batch_size, shuffle=True, drop_last=True, collate_fn=data.collator)
    held_out = DataLoader(data.eval, batch_size, collate_fn=data.collator)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    progress = Progress(batch_size * accumulation * accelerator.num_processes)
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint and saved:
        accelerator.load_state()

    before = perplexity(accelerator, model, held_out)
    began = progress.step
    bar = tqdm(total=args.max_steps, initial=began, disable=not accelerator.is_main_process)
    steps_per_epoch = math.ceil(len(loader) / accumulation)
    while progress.step < args.max_steps:
        epoch, done = divmod(progress.step, steps_per_epoch)
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, done * accumulation):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.step += 1
                bar.update()
                bar.set_postfix(loss=number(loss.item()))
                if args.save_steps and progress.step % args.save_steps == 0:
                    accelerator.project_configuration.iteration = progress.step  # the folder's name
                    accelerator.save_state()
                if progress.step >= args.max_steps:
                    break
    bar.close()
    after = perplexity(accelerator, model, held_out)

    weights = accelerator.get_state_dict(model)  # on every rank: gathering is a joint act; rank 0 has the values
    plain = accelerator.unwrap_model(model)

    def save() -> None:
        plain.save_pretrained(args.output_dir, state_dict=weights, is_main_process=accelerator.is_main_process)
        if accelerator.is_main_process:
            tokenizer.save_pretrained(args.output_dir)

    everywhere(save, f"saving the model to {args.output_dir!r}")
    peak = highest(peak_bytes(accelerator.device))
    rate = (progress.step - began) / max(bar.format_dict["elapsed"], 1e-9) * batch_size * accumulation
    if accelerator.is_main_process:
        print_summary(
            f"{args.model} · stage {flags.zero_stage} · {args.max_steps} steps on {accelerator.num_processes} rank(s)",
            {
                "perplexity": f"{number(before)} → {number(after)}",
                "tokens/s": number(rate * accelerator.num_processes * args.block_size),
                "peak memory, highest rank": size_text(peak),
                "model and tokenizer": args.output_dir,
            },
        )
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
