"""The core: parameters in spans, spans in units, a schedule that moves units, and optimizers over segments.

It knows no unusual user program and no diagnostics. Both attach as observers (`observer.Observer`).
"""

from .engine import Engine
from .observer import Observer
from .optimizer_kinds import register_optimizer
from .shard import shard

__all__ = ["Engine", "Observer", "register_optimizer", "shard"]
