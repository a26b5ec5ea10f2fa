"""Push a Trainer's checkpoints: skip unfinished saves, remove outdated weights of the same kind, keep the user's card."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer
from transformers.utils.hub import hf_api

from ..checkpoint.cards import RunFacts
from ..checkpoint.folder import SUFFIX
from ..checkpoint.hub import changes, list_files
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.save import CheckpointWriter
from ..checkpoint.weight_kinds import refuse_other_weights
from ..comm.agreement import on_all_ranks
from ..comm.group_wire import open_wire
from ..comm.process_group import home_device
from ..core.patching import patched
from .callback import write_card
from .patches import TrainerBase
from .weights import AdapterFormat, hub_format


def patched_upload() -> AbstractContextManager[None]:
    """Replace `upload_folder` inside, so that an upload skips the checkpoint that is staged in the output folder."""
    api: Any = hf_api()

    def upload_folder(run_as_future: bool = False, **kwargs: Any) -> Any:
        if run_as_future:
            return api.run_as_future(upload_folder, **kwargs)
        kwargs["ignore_patterns"] = [*(kwargs.get("ignore_patterns") or []), f"*{SUFFIX}*/*"]
        delete, keep = changes(api, **kwargs)
        kwargs["ignore_patterns"] += keep
        return type(api).upload_folder(api, **kwargs, delete_patterns=delete or None)

    return patched([(api, "upload_folder", upload_folder)])


def check_kind(trainer: Trainer, token: str | None = None, revision: str | None = None) -> None:
    """Check the Trainer's repository before training or saving.

    Raises:
        ConfigError: the repository holds weights of another kind than the Trainer will push.
    """
    name = getattr(trainer, "hub_model_id", None)
    if name is None or trainer.model is None:
        return
    revision = revision or trainer.args.hub_revision
    present = list_files(hf_api(), name, revision, token or trainer.args.hub_token)
    kind = "adapter_model" if isinstance(hub_format(trainer.model), AdapterFormat) else "model"
    remedy = "Choose another hub_model_id or hub_revision, or remove these files on the Hub"
    refuse_other_weights(present, {f"{kind}.safetensors"}, f"{name} on the Hub", remedy)


class PushMixin(TrainerBase):
    """A Trainer that pushes complete checkpoints and writes hf_zero's model card."""

    args: Any
    _zero_saving: CheckpointWriter | None = None
    """The checkpoint that is being saved."""
    _zero_push = False
    """The stock code asked for a push of this checkpoint."""
    _zero_facts: RunFacts | None = None

    if TYPE_CHECKING:

        def _zero_wait_for_save(self) -> None: ...

    @property
    def _zero_output(self) -> Path:
        return Path(str(self.args.output_dir))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as the stock Trainer does, with hf_zero's model card. Call it on every rank."""
        self._zero_wait_for_save()
        asked = inspect.signature(Trainer.push_to_hub).bind(self, *args, **kwargs).arguments
        with on_all_ranks(open_wire(home_device()), "pushing to the Hub"):
            if self.is_world_process_zero():
                if self.hub_model_id is None:
                    # The stock method would create the repository later, after the check.
                    known = inspect.signature(Trainer.init_hf_repo).parameters
                    self.init_hf_repo(**{name: asked.get(name) for name in ("token", "private") if name in known})
                check_kind(self, asked.get("token"), asked.get("revision"))
        with patched_upload():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._zero_saving is not None:
            self._zero_push = True  # after the rename
            return None
        if self.is_world_process_zero():
            # The stock code copies the checkpoint's weights over those that this manifest describes.
            (self._zero_output / MANIFEST).unlink(missing_ok=True)
        with patched_upload():
            return super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write hf_zero's card of `output_dir`: data, metrics, stage, how to load. A subclass's own card stays."""
        folder, facts = self._zero_output, self._zero_facts
        stock: Any = super().create_model_card
        if facts is None or stock.__func__ is not Trainer.create_model_card:
            stock(*args, **kwargs)
        elif self.is_world_process_zero():
            write_card(self, folder, inspect.signature(Trainer.create_model_card).bind(self, *args, **kwargs).arguments)
