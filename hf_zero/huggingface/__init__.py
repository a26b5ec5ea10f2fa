"""Everything that knows accelerate, transformers and PEFT; the engine imports none of them.

Importing this package imports neither these libraries nor torch. It registers three functions that the engine calls.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..checkpoint import FORMATS
from ..params import EXTENSIONS, FIRST_FORWARD

if TYPE_CHECKING:
    from torch import nn

    from ..checkpoint.weights import WeightFormat
    from ..params.init import Init


def _hub_format(model: nn.Module) -> WeightFormat | None:
    """Return the names of `save_pretrained` for a model that has it; None while transformers is not loaded."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from .weights import hub_format

    return hub_format(model)


def _reading(init: Init) -> AbstractContextManager[object] | None:
    """Make `from_pretrained` read only a rank's own bytes, also if transformers is imported inside the context."""
    if "transformers" not in sys.modules and importlib.util.find_spec("transformers") is None:
        return None
    from .from_pretrained import reading

    return reading(init)


def _check_loader(ranks: int) -> None:
    """Refuse a batch from a loader that accelerate prepared for another number of ranks."""
    if "accelerate.state" in sys.modules:
        from .arguments import check_loader

        check_loader(ranks)


FORMATS.append(_hub_format)
EXTENSIONS.append(_reading)
FIRST_FORWARD.append(_check_loader)
