"""The readiness of a generator: whether it can compute with its current weights and cache."""

from ..engine.errors import ConfigError, ModelError
from .placement import GeneratorPlacement


class Readiness:
    """The state of a generator's weights and cache.

    Initially the weights are complete, and everything is on the device.
    """

    def __init__(self) -> None:
        self.placement = GeneratorPlacement()
        """The placement of the parameters and the cache."""
        self.complete = True
        """Whether the last weights were loaded completely."""
        self.lacks_weights = False
        """Whether the parameters have been absent since the last complete load, so they hold no values."""
        self._reason = ""

    def loading(self) -> None:
        """Record that new weights begin to replace the current ones.

        Raises:
            ConfigError: The parameters are absent.
        """
        if self.placement.parameters == "absent":
            raise ConfigError("new weights while the rollout's parameters are absent; call to('device', 'parameters') first")
        # Before the first tensor is copied: `loaded` ends this state, so a copy that fails cannot be taken for a
        # success.
        self.mark_invalid("are a mix of two models because loading new ones failed")

    def loaded(self) -> None:
        """Record that a complete set has been loaded."""
        self.complete, self.lacks_weights = True, False

    def mark_invalid(self, reason: str) -> None:
        """Record that the current weights must not be used, and why."""
        self.complete, self._reason = False, reason

    def moving(self, target: GeneratorPlacement) -> None:
        """Record that a move begins. Parameters that were absent hold no values."""
        # Before the move, and never reset by one: moving back to the device allocates memory, but restores no values.
        self.lacks_weights = self.lacks_weights or target.parameters == "absent"

    def moved(self, target: GeneratorPlacement) -> None:
        """Record that a move has ended."""
        self.placement = target

    @property
    def ready(self) -> bool:
        """Whether the generator can compute."""
        return self.complete and not self.lacks_weights and self.placement == GeneratorPlacement()

    def check(self) -> None:
        """Check that the generator can compute.

        Raises:
            ConfigError: Something is not on the device.
            ModelError: The weights are not a complete set.
        """
        if self.placement.parameters == "absent":
            raise ConfigError("the rollout's parameters are absent; call to('device') and load weights first")
        if not self.complete:
            raise ModelError(f"the rollout's weights {self._reason}; load a complete set (sync_weights)")
        if self.lacks_weights and self.placement == GeneratorPlacement():
            raise ModelError("the rollout's parameters were absent and have no values yet; load a complete set of weights")
        if self.placement != GeneratorPlacement():
            what = "model is on the host" if self.placement.parameters == "host" else "cache is absent"
            raise ConfigError(f"the rollout's {what}; call to('device') first")
