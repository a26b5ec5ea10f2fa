"""Uploads over what a repository already holds, through the real client: <out> <the URL of a Hub on this machine>."""

from __future__ import annotations

import os
import sys

os.environ.update(HF_ENDPOINT=sys.argv[2], HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(HF_HOME=os.path.join(sys.argv[1], "cache"), HF_TOKEN="hf_good")

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from harness import OUT, Tokens, arguments, check, fresh, gpt2, raised, watch  # noqa: E402
from huggingface_hub import HfApi, snapshot_download  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer  # noqa: E402

import hf_zero as zero  # noqa: E402
from hf_zero.cli import main as cli  # noqa: E402

API = HfApi(endpoint=sys.argv[2])


def put(repo: str, **files: str | bytes) -> None:
    """Files that a user has uploaded."""
    API.create_repo(repo, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        API.upload_file(path_or_fileobj=data, path_in_repo=name, repo_id=repo)


def listed(repo: str) -> dict[str, bytes]:
    folder = Path(snapshot_download(repo, cache_dir=OUT / "fetched" / str(len(os.listdir(OUT))), force_download=True))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full(scale: float = 1.0, **how: Any) -> Path:
    folder = OUT / f"full{scale}{''.join(map(str, how.values()))}"
    model = gpt2()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    model.save_pretrained(folder, **how)
    return folder


def adapter() -> Path:
    folder = OUT / "adapter"
    base = full()
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def same(repo: str, folder: Path) -> bool:
    pushed = AutoModelForCausalLM.from_pretrained(repo, force_download=True)
    mine = AutoModelForCausalLM.from_pretrained(folder)
    return all(torch.equal(a, b) for a, b in zip(pushed.parameters(), mine.parameters(), strict=True))


USER = {
    "model.fp16.safetensors": "a variant",
    "model-00001-of-00002.fp16.safetensors": "a variant's shard",
    "model-best-of-3.safetensors": "mine",
    "other/model.safetensors": "in a folder",
    "tokenizer.json": "{}",
    "notes.md": "mine",
    "README.md": "# My words\n",
}


def shards() -> dict[str, Any]:
    """One file, then shards, then other shards, then one file; everything else of the repository survives."""
    repo, found = "user/shards", []
    put(repo, **USER)
    before = listed(repo)
    for number, size in enumerate(("50GB", "30KB", "60KB", "50GB")):
        source = full(1.0 + number, max_shard_size=size)
        zero.export(source, push_to_hub=repo)
        found.append(same(repo, source))
    after = listed(repo)
    return {
        "loaded": found,
        "lost": [name for name in before if after.get(name) != before[name]],
        "weights": sorted(name for name in after if name.startswith("model") and name not in before),
    }


def adapter_over_full() -> dict[str, Any]:
    repo = "user/full"
    zero.export(full(), push_to_hub=repo)
    before = listed(repo)
    said = raised(lambda: zero.export(adapter(), push_to_hub=repo))
    untouched = listed(repo) == before
    typed = cli.main(["export", str(adapter()), "--push-to-hub", repo])
    zero.export(adapter(), push_to_hub=repo, overwrite=True)
    return {
        "said": said,
        "untouched": untouched,
        "typed": typed,
        "after": sorted(listed(repo)),
        "right": same(repo, adapter()),
    }


def full_over_adapter() -> dict[str, Any]:
    repo = "user/lora"
    put(
        repo,
        **{"critic/adapter_config.json": "{}", "critic/adapter_model.safetensors": "x", "adapter_notes.txt": "mine"},
    )
    zero.export(adapter(), push_to_hub=repo)
    before = listed(repo)
    said = raised(lambda: zero.export(full(3.0), push_to_hub=repo))
    untouched = listed(repo) == before
    zero.export(full(3.0), push_to_hub=repo, overwrite=True)
    return {"said": said, "untouched": untouched, "after": sorted(listed(repo)), "right": same(repo, full(3.0))}


def pickles() -> dict[str, Any]:
    repo = "user/pickled"
    put(repo, **{"pytorch_model.bin": "old", "pytorch_model.fp16.bin": "variant", "training_args.bin": "mine"})
    said = raised(lambda: zero.export(full(), push_to_hub=repo))
    zero.export(full(), push_to_hub=repo, overwrite=True)
    return {"said": said, "after": sorted(listed(repo))}


def branches() -> dict[str, Any]:
    """A new branch starts with what `main` holds: it is refused before it is made."""
    repo = "user/branched"
    zero.export(full(), push_to_hub=repo)
    said = raised(lambda: zero.export(adapter(), push_to_hub=repo, revision="lora"))
    made = API.revision_exists(repo, "lora")
    zero.export(adapter(), push_to_hub=repo, revision="lora", overwrite=True)
    return {"said": said, "made": made, "main": same(repo, full())}


def cards() -> dict[str, Any]:
    """A generated card is replaced by the next export; an edited one stays."""
    repo = "user/cards"
    zero.export(full(), push_to_hub=repo)
    first = listed(repo)["README.md"]
    zero.export(full(2.0, max_shard_size="30KB"), push_to_hub=repo, dtype="bfloat16")
    second = listed(repo)["README.md"]
    put(repo, **{"README.md": second.replace(b"# ", b"# Edited: ", 1)})
    zero.export(full(), push_to_hub=repo)
    edited = listed(repo)["README.md"]
    put(repo, **{"README.md": b"# Begun\n[More Information Needed]\n"})
    zero.export(full(), push_to_hub=repo)
    begun = listed(repo)["README.md"]
    own = full(4.0)
    (own / "README.md").write_text("# Of the folder\n")
    zero.export(own, push_to_hub=repo)
    return {
        "first": first.decode(),
        "edited": edited.decode(),
        "begun": begun.decode(),
        "own": listed(repo)["README.md"].decode(),
    }


def trained(repo: str, folder: str, model: Any, **more: Any) -> Any:
    fresh()
    args = arguments(
        OUT / folder,
        None,
        parallelism_config=zero.ZeroPlugin(stage=2),
        max_steps=1,
        hub_model_id=repo,
        hub_token="hf_good",
        **more,
    )
    return Trainer(model, args, train_dataset=Tokens())


def trainer() -> dict[str, Any]:
    """`Trainer.push_to_hub`: older shards go, the user's card and files stay, another kind is refused before training."""
    repo = "user/run"
    put(repo, **USER)
    zero.export(full(5.0, max_shard_size="30KB"), push_to_hub=repo)
    put(repo, **USER)
    before = listed(repo)
    run = trained(repo, "run", gpt2(), push_to_hub=True)
    run.train()
    run.push_to_hub()
    after = listed(repo)
    lora = "user/lora_run"
    zero.export(adapter(), push_to_hub=lora)
    late = trained(lora, "late", gpt2())
    late.train()
    return {
        "lost": [name for name in USER if after.get(name) != before[name]],
        "weights": sorted(name for name in after if name.startswith("model") and name not in USER),
        "loaded": same(repo, OUT / "run"),
        "refused": raised(trained(lora, "refused", gpt2(), push_to_hub=True).train),
        "pushed": raised(late.push_to_hub),
    }


if __name__ == "__main__":
    watch()
    for work in (shards, adapter_over_full, full_over_adapter, pickles, branches, cards, trainer):
        check(work.__name__, work)
