"""Random programs: a seed gives a model, settings and calls of user code, which `tests/oracle.py` checks.

    python -m tests.random --seeds 0:1000               # every kind of call and of model
    python -m tests.random --seeds 17 --kinds swap      # training steps and this kind alone
    python -m tests.random --case '…'                   # a reproduction, as a failure prints it

Files: `models` builds models, `user` is one rank's training loop, `loops`, `gradients`, `weights` and `lifecycle` hold the
calls, `draw` makes programs from seeds and makes failing ones smaller, `check` runs them.
"""
