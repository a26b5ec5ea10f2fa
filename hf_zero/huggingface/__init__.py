"""What knows accelerate, transformers and PEFT; the engine below imports none of them.

Importing this package imports none of them, and no torch either: it only registers who is asked once one of them is there.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..checkpoint import FORMATS
from ..params import EXTENSIONS
from ..runtime import FIRST_FORWARD

if TYPE_CHECKING:
    from torch import nn

    from ..checkpoint.weights import WeightFormat
    from ..params.init import Init


def _hub_format(model: nn.Module) -> WeightFormat | None:
    """The names of `save_pretrained`, for models that have it. Without transformers loaded no model has."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from .weights import hub_format

    return hub_format(model)


def _reading(init: Init) -> AbstractContextManager[object] | None:
    """`from_pretrained` reads only a rank's own bytes. Also for code that imports transformers inside the context."""
    if "transformers" not in sys.modules and importlib.util.find_spec("transformers") is None:
        return None
    from .from_pretrained import reading

    return reading(init)


def _check_loader(ranks: int) -> None:
    """Refuse a batch of a loader that accelerate prepared for another number of ranks."""
    if "accelerate.state" in sys.modules:
        from .arguments import check_loader

        check_loader(ranks)


FORMATS.append(_hub_format)
EXTENSIONS.append(_reading)
FIRST_FORWARD.append(_check_loader)
