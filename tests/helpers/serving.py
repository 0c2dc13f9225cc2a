"""Models behind a scheduler that fail on request; importable by a worker process."""

import time
from typing import Any

import torch

from drivetrain.generation.options import RolloutConfig
from drivetrain.workers.roles.dispatch import register
from drivetrain.workers.roles.generator import RolloutWorker


class FaultyRollout(RolloutWorker):
    """A rollout role whose forward passes can be made slow, or to fail."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._delay_s, self._kind, self._calls = 0.0, "", 0

    def initialize(self) -> "FaultyRollout":
        """Load the model."""
        super().initialize()
        model: Any = self.generator._lm.model  # type: ignore[attr-defined]
        model.register_forward_pre_hook(self._before)
        return self

    @register("all")
    def slow_down(self, seconds: float) -> None:
        """Let every forward pass take longer."""
        self._delay_s = seconds

    @register("all")
    def fail(self, kind: str, calls: int) -> None:
        """Let the forward pass after some more of them fail."""
        self._kind, self._calls = kind, calls

    def _before(self, module: Any, inputs: Any) -> None:
        time.sleep(self._delay_s)
        self._calls -= 1
        if self._kind and self._calls == 0:
            if self._kind == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            if self._kind == "exit":
                print("the last output of a model", flush=True)
                import os

                os._exit(3)
            raise RuntimeError("a broken kernel")
