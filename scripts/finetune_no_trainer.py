"""Train a causal language model like `finetune.py`, in a plain accelerate loop. The one line about ZeRO is marked.

torchrun --nproc-per-node 2 scripts/finetune_no_trainer.py --zero-stage 3 --save-steps 50
torchrun --nproc-per-node 4 scripts/finetune_no_trainer.py --zero-stage 3 --save-steps 50 --resume

Every flag is one of `finetune.py`, with the same meaning; the short spellings are this script's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.arguments import answer_help
from common.console import (
    Interrupted,
    UserError,
    check_output,
    everywhere,
    examples,
    highest,
    number,
    peak_bytes,
    print_summary,
    run,
)

from hf_zero.config import size_text
from hf_zero.plan.shapes import CONFIGS

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel


@dataclass
class LoopArguments:
    """Arguments of this script."""

    model: str = field(
        default="gpt2-tiny", metadata={"help": "Hub id, local folder, or a model from scratch by its name"}
    )
    dataset: str | None = field(
        default=None, metadata={"help": "Hub id or local file; without it, Python's standard library"}
    )
    output_dir: str = field(
        default="runs/no-trainer", metadata={"help": "folder of the trained model and of checkpoints"}
    )
    max_steps: int = field(default=150, metadata={"help": "optimizer steps", "aliases": ["--steps"]})
    per_device_train_batch_size: int = field(
        default=16, metadata={"help": "rows per rank and micro-step", "aliases": ["--batch-size"]}
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "micro-steps per step", "aliases": ["--accumulation"]}
    )
    block_size: int = field(default=128, metadata={"help": "tokens per training row"})
    learning_rate: float = field(default=2e-3, metadata={"help": "highest learning rate, after the warm-up"})
    save_steps: int = field(default=0, metadata={"help": "steps between checkpoints; 0: none"})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "latest: continue from the newest whole checkpoint, or start fresh"}
    )


class Progress:
    """The position of the run, part of its checkpoints.

    Args:
        rows: of a step, on all ranks. A checkpoint counts steps: another number of rows would
            continue at another position of the data.
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


def perplexity(accelerator: Accelerator, model: PreTrainedModel, loader: DataLoader) -> float:
    """exp of the mean loss; blocks have equal numbers of tokens, so their mean is the mean over tokens."""
    import torch

    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return math.exp(torch.cat(losses).mean().item())


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, save."""
    words = sys.argv[1:] if argv is None else list(argv)
    answer_help(words, LoopArguments, __doc__, main=())
    with examples():
        from common.data import embedded_corpus, language_modeling, load_text, load_tokenizer, pick_column
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
    from common.flags import Help, Parser, print_all_help
    from common.models import load_config, load_model, max_positions
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm
    from transformers import get_cosine_schedule_with_warmup

    import hf_zero as zero
    from hf_zero.huggingface.arguments import ZeroFlags

    kinds: Any = [LoopArguments, ZeroFlags]
    parser: Any = Parser(kinds, allow_abbrev=False, add_help=False, description=__doc__, formatter_class=Help)
    parser.add_argument("--resume", dest="resume_from_checkpoint", action="store_const", const="latest")
    print_all_help(words, parser)
    args, flags = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    if args.resume_from_checkpoint not in (None, "latest"):
        raise UserError(f"--resume-from-checkpoint {args.resume_from_checkpoint}: expected latest")
    batch_size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    check_output(args.output_dir)

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=False,  # it counts steps of this loop, at any number of ranks
        project_config=ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42),  # an order to come back to
        parallelism_config=zero.ZeroPlugin(**flags.settings()),  # <- all there is to ZeRO: zero.ZeroPlugin(stage=…)
    )
    zero.ZeroConfig(**flags.settings()).check_world_size(accelerator.num_processes)
    saved = highest(len(list(Path(args.output_dir, "checkpoints").glob("checkpoint_*"))))
    if saved and args.save_steps and not args.resume_from_checkpoint:
        raise UserError(f"{args.output_dir!r} has checkpoints: continue with --resume, or choose another --output-dir")
    if args.resume_from_checkpoint and not saved and accelerator.is_main_process:
        print(f"No checkpoint in {args.output_dir}: training starts fresh.", flush=True)
    with accelerator.main_process_first():
        config = load_config("clm", args.model)
        texts = load_text(args.dataset) if args.dataset else embedded_corpus("clm")
        column = pick_column(texts["train"], None, ("text",), "a column called 'text'")
        vocabulary = min(config.vocab_size, 16384)
        source = None if args.model in CONFIGS else args.model
        limit = max_positions(config)
        tokenizer = load_tokenizer(source, config.model_type, texts["train"], column, vocabulary, limit)
        block_size = min(args.block_size, limit, tokenizer.model_max_length)
        data = language_modeling("clm", texts, column, tokenizer, block_size, limits=(None, 128))
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
    engine = zero.engine_of(model)
    recorder = engine.record(args.output_dir, first_step=progress.step)  # for hf-zero report
    bar = tqdm(total=args.max_steps, initial=progress.step, disable=not accelerator.is_main_process)
    steps_per_epoch = math.ceil(len(loader) / accumulation)
    try:
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
    except KeyboardInterrupt:
        done = f"Interrupted after step {progress.step}. "
        newest = sorted(
            Path(args.output_dir, "checkpoints").glob("checkpoint_*"), key=lambda each: each.stat().st_mtime
        )
        if not newest:
            raise Interrupted(f"{done}No checkpoint in {args.output_dir}: set --save-steps to have one.") from None
        raise Interrupted(
            f"{done}Newest checkpoint: {newest[-1]}. To continue, repeat the command with --resume"
        ) from None
    bar.close()
    recorder.close()
    after = perplexity(accelerator, model, held_out)

    weights = accelerator.get_state_dict(model)  # on every rank: a collective; rank 0 has the values
    plain = accelerator.unwrap_model(model)

    def save() -> None:
        plain.save_pretrained(args.output_dir, state_dict=weights, is_main_process=accelerator.is_main_process)
        if accelerator.is_main_process:
            tokenizer.save_pretrained(args.output_dir)

    everywhere(save, f"saving the model to {args.output_dir!r}")
    peak = highest(peak_bytes(accelerator.device))
    tokens_per_s = recorder.throughput()[1] * accelerator.num_processes
    if accelerator.is_main_process:
        print_summary(
            f"{args.model} · stage {flags.zero_stage} · {args.max_steps} steps on {accelerator.num_processes} rank(s)",
            {
                "perplexity": f"{number(before)} → {number(after)}",
                "tokens/s": number(tokens_per_s),
                "peak memory, highest rank": size_text(peak),
                "model and tokenizer": args.output_dir,
            },
        )
    accelerator.end_training()


if __name__ == "__main__":
    run(main)
