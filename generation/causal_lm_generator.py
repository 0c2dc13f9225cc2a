"""What the generators with a transformers model on one device have in common."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.hf.config import read_config
from .causal_lm import CausalLM
from .generator import BaseGenerator
from .media import PromptMedia
from .options import RolloutConfig
from .placement import GeneratorPlacement
from .route_recorder import check_has_experts
from .token_stream import CompletionLimits
from .weight_values import common_dtype


class CausalLMGenerator(BaseGenerator):
    """A generator with a model of transformers, which may take media.

    Args:
        config: The configuration.

    Raises:
        ModelError: The model cannot be loaded.
    """

    takes_media = True
    can_be_invariant = True
    returns_routes = True
    loads_parts = True

    @classmethod
    def check(cls, config: RolloutConfig, processes: int) -> None:
        """See `BaseGenerator.check`."""
        super().check(config, processes)
        if config.return_routed_experts:
            check_has_experts(read_config(config.model), config.model.path)

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._lm = CausalLM(config)

    def limits(self) -> CompletionLimits:
        """Return what this generator can take."""
        return self._lm.limits

    @property
    def weight_dtype(self) -> str:
        """See `BaseGenerator.weight_dtype`."""
        return common_dtype(self._lm.model.parameters())

    def read_images(self, prompt: list[int], images: Sequence[str]) -> tuple[list[int], Mapping[str, Tensor]]:
        """See `BaseGenerator.read_images`."""
        return self._lm.read_images(prompt, images)

    def take_media(self, title: str, prompt: list[int], media: Mapping[str, Tensor]) -> PromptMedia | None:
        """See `BaseGenerator.take_media`."""
        taken = self._lm.take_media(title, prompt, media)
        if taken is not None and self.config.invariant:
            raise ConfigError(f"{title} has media, which invariant=true does not take; use invariant=false")
        return taken

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights into the model."""
        self._lm.copy_weights(weights)

    def copy_part(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some new weights into the model."""
        self._lm.copy_weights(weights, complete=False)

    def move(self, target: GeneratorPlacement) -> None:
        """Move the model."""
        self._lm.move(target.parameters)
