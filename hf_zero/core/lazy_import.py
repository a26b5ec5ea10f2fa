"""Functions for an optional library, imported only in programs that use the library.

The folders below `huggingface` name such functions as text: they import neither the library nor code that does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class LazyFunction(NamedTuple):
    """The name of a function to import later.

    Attributes:
        library: the module that must be loaded or installed before the function is imported.
        module: the function's module, inside this package.
        name: the function's name.
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
