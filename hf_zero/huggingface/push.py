"""Uploads of a Trainer: no half-written saves, no older weights that a reader would prefer, and the user's card is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from transformers import Trainer
from transformers.utils.hub import hf_api

from ..checkpoint.folder import SUFFIX
from ..checkpoint.hub import Changes, list_files
from ..checkpoint.kinds import refuse_other_weights
from .stock import replaced
from .weights import AdapterFormat, hub_format


def uploading() -> AbstractContextManager[None]:
    """Uploads list the output folder in a thread of their own, while the next checkpoint may be staged in it."""
    api: Any = hf_api()

    def upload_folder(run_as_future: bool = False, **kwargs: Any) -> Any:
        if run_as_future:
            return api.run_as_future(upload_folder, **kwargs)
        kwargs["ignore_patterns"] = [*(kwargs.get("ignore_patterns") or []), f"*{SUFFIX}*/*"]
        changes = Changes.of(api, **kwargs)
        kwargs["ignore_patterns"] += changes.keep
        return type(api).upload_folder(api, **kwargs, delete_patterns=changes.delete or None)

    return replaced([(api, "upload_folder", upload_folder)])


def check_kind(trainer: Trainer, token: str | None = None, revision: str | None = None) -> None:
    """Check the Trainer's repository before the work.

    Raises:
        ConfigError: the Trainer's repository holds weights of another kind than it will push.
    """
    name = getattr(trainer, "hub_model_id", None)
    if name is None or trainer.model is None:
        return
    revision = revision or trainer.args.hub_revision
    present = list_files(hf_api(), name, revision, token or trainer.args.hub_token)
    kind = "adapter_model" if isinstance(hub_format(trainer.model), AdapterFormat) else "model"
    remedy = "Choose another hub_model_id or hub_revision, or remove these files on the Hub"
    refuse_other_weights(present, {f"{kind}.safetensors"}, f"{name} on the Hub", remedy)
