"""The base class of generators with a transformers model on one device."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.hf.config import read_config
from ..engine.hf.model_path import fingerprint
from .adapters import GeneratorAdapters, check_adapter_settings, weights_stay
from .causal_lm import CausalLM
from .generator import BaseGenerator
from .media import PromptMedia
from .options import RolloutConfig
from .placement import GeneratorPlacement
from .route_recorder import check_has_experts
from .token_stream import CompletionLimits, TokenStream
from .weight_values import common_dtype


class CausalLMGenerator(BaseGenerator):
    """A generator with a transformers model, which may accept media.

    Args:
        config: The configuration.

    Raises:
        ModelError: The model cannot be loaded.
    """

    takes_media = True
    can_be_invariant = True
    returns_routes = True
    loads_parts = True
    has_adapters = True

    @classmethod
    def check(cls, config: RolloutConfig, processes: int) -> None:
        """See `BaseGenerator.check`."""
        super().check(config, processes)
        check_adapter_settings(config)
        if config.return_routed_experts:
            check_has_experts(read_config(config.model), config.model.path)

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._lm = CausalLM(config)
        self._side_by_side: GeneratorAdapters | None = None

    def _install_adapters(self) -> None:
        """Let the model add adapters, if configured. Called at the end of the constructor, after the model has been inspected."""
        if self.config.max_adapters:
            path = self.config.model.path
            self._side_by_side = GeneratorAdapters(
                self._lm.model, self.config.max_adapters, self._lm.device, path, fingerprint(path)
            )

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def adapter_names(self) -> list[str]:
        """See `BaseGenerator.adapter_names`."""
        return [] if self._side_by_side is None else self._side_by_side.names

    def load_adapter(self, name: str, folder: str) -> int:
        """See `BaseGenerator.load_adapter`."""
        return self._require_adapters(name).load(name, folder)

    def drop_adapter(self, name: str) -> None:
        """See `BaseGenerator.drop_adapter`."""
        self._require_adapters(name).drop(name, self._used_adapters())

    def _require_adapters(self, name: str) -> GeneratorAdapters:
        if self._side_by_side is None:
            raise self._without_adapters(name)
        return self._side_by_side

    def version_of(self, stream: TokenStream) -> int:
        """See `BaseGenerator.version_of`."""
        name = stream.options.adapter
        return self._require_adapters(name).version(name) if name else self.version

    def _used_adapters(self) -> list[str]:
        return [stream.options.adapter for stream in (*self.waiting.values(), *self.running.values())]

    def step(self) -> bool:
        """See `BaseGenerator.step`."""
        advanced = super().step()
        if self._side_by_side is not None:
            # Requests may have ended in this step, and with them the last use of a dropped adapter.
            self._side_by_side.free_unused(self._used_adapters())
        return advanced

    def limits(self) -> CompletionLimits:
        """Return the limits of this generator."""
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
            raise ConfigError(f"{title} has media, which invariant=true does not support; use invariant=false")
        return taken

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights into the model."""
        self._check_base()
        self._lm.copy_weights(weights)

    def copy_part(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a part of new weights into the model."""
        self._check_base()
        self._lm.copy_weights(weights, complete=False)

    def _check_base(self) -> None:
        if self._side_by_side is not None:
            raise weights_stay(self.config)

    def move(self, target: GeneratorPlacement) -> None:
        """Move the model."""
        self._lm.move(target.parameters)
