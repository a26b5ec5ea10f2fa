"""Reports and step records of an engine: what `engine.report()` and `engine.record()` do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..plan.record import Recorder, batch_of
from ..plan.report import Report
from .usage import Usage, report


class Records(Observer):
    """Feeds a `Recorder`, where one measures.

    Attributes:
        recorder: measures every step; None: nothing is recorded.
    """

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self.recorder: Recorder | None = None
        self._stepped: set[torch.optim.Optimizer] = set()
        """Optimizers that stepped since the last backward: a step of the model counts once."""

    def detach(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.recorder is not None:
            main_input = getattr(self._engine.model, "main_input_name", "input_ids")
            self.recorder.forward(*batch_of(args, kwargs, main_input))

    def after_backward(self) -> None:
        self._stepped.clear()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._stepped:
            self._stepped.clear()
        if not self._stepped and self.recorder is not None:
            self.recorder.step()
        self._stepped.add(optimizer)

    def report(self) -> Report:
        """Return what is stored where, predicted and measured."""
        return report(self._engine, self.recorder)

    def record(
        self, folder: str | os.PathLike[str] | None, first_step: int, about: Mapping[str, Any] | None
    ) -> Recorder:
        """Measure every step from now on; see `Engine.record`."""
        if self.recorder is not None:
            self.recorder.close()
        known = {"model": type(self._engine.model).__name__, **(about or {})}
        made = self.recorder = Recorder(Usage(self._engine), folder, first_step, known, self._closed)
        return made

    def _closed(self, recorder: Recorder) -> None:
        if self.recorder is recorder:
            self.recorder = None
