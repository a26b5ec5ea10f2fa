"""The core: parameters in spans, spans in units, a schedule that moves units, and optimizers over segments.

Support for unusual user programs and diagnostics attach as observers (`observer.Observer`); nothing here depends on them.
"""

from .engine import Engine
from .observer import Observer
from .shard import shard

__all__ = ["Engine", "Observer", "shard"]
