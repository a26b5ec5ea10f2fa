"""The core: parameters in spans, spans in units, a schedule that moves units, and optimizers over segments.

It knows no unusual user program and no diagnostics. Both attach as observers (`observer.Observer`).
"""

from .engine import Engine
from .observer import Observer
from .shard import shard

__all__ = ["Engine", "Observer", "shard"]
