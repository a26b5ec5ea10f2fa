"""Publish a checkpoint of a training run: verify it, make a clean model folder, write its card, upload it.

    python scripts/export_to_hub.py runs/gpt2-tiny-clm/checkpoint-150 --output model --dtype bfloat16
    python scripts/export_to_hub.py runs/gpt2-tiny-clm/checkpoint-150 --push-to-hub user/model --private

`hf-zero export` does the same; this script is meant to be read and changed. The token is that of `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.console import UserError, print_summary, run
from transformers.trainer_utils import get_last_checkpoint

import hf_zero as zero
from hf_zero.config import size_text


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint, or a run's folder: then its last checkpoint")
    parser.add_argument("--output", type=Path, help="where to put the model folder")
    parser.add_argument("--push-to-hub", metavar="USER/REPO", help="where to upload it")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch to upload to")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="cast the weights")
    options = parser.parse_args(argv)
    if options.output is None and options.push_to_hub is None:
        raise UserError("say where to: --output DIR, --push-to-hub USER/REPO, or both")
    return options


def find_checkpoint(folder: Path) -> Path:
    """Return `folder` if it has weights, else its last checkpoint."""
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder. Give a checkpoint, or the folder of a run.")
    if any(folder.glob("*.safetensors")):
        return folder
    last = get_last_checkpoint(str(folder))
    if last is None:
        raise UserError(f"{str(folder)!r} holds neither weights nor checkpoints")
    return Path(last)


def main(argv: Sequence[str] | None = None) -> None:
    """Verify, export, upload."""
    options = parse(sys.argv[1:] if argv is None else argv)
    checkpoint = find_checkpoint(options.folder)
    target = zero.export(
        checkpoint,
        options.output,
        dtype=options.dtype,
        push_to_hub=options.push_to_hub,
        private=options.private,
        revision=options.revision,
    )
    rows = {"checkpoint": str(checkpoint), "uploaded to": options.push_to_hub or ""}
    if target is not None:
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        rows |= {"model folder": str(target), "size": size_text(size)}
    print_summary("exported", {name: value for name, value in rows.items() if value})


if __name__ == "__main__":
    run(main)
