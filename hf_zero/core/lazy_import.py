"""Functions that know a library, imported only in programs that use it.

The folders below `huggingface` name such functions in tables, as text: they import neither the library nor what knows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class LazyFunction(NamedTuple):
    """Names a function.

    Attributes:
        library: the module that must be loaded, or installed, for the function to be of use.
        module: of the function, in this package.
        name: of the function.
    """

    library: str
    module: str
    name: str

    def if_loaded(self) -> Callable[..., Any] | None:
        """Return the function, or None while this program has not imported the library."""
        return self._function() if self.library in sys.modules else None

    def if_installed(self) -> Callable[..., Any] | None:
        """Return the function, or None if this program cannot import the library."""
        if self.library not in sys.modules and importlib.util.find_spec(self.library) is None:
            return None
        return self._function()

    def _function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"hf_zero.{self.module}"), self.name)
        return found
