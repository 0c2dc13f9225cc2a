"""Generation with the actor's own forward pass: a simple and slow reference for the numerics of samplers."""

from dataclasses import replace

from torch import Tensor

from ..engine.errors import ConfigError
from ..engine.hf.config import read_config
from ..engine.registry import engine_class
from .causal_lm_generator import CausalLMGenerator
from .options import RolloutConfig
from .sampling import sample_tokens
from .token_stream import CompletionLimits, TokenStream

BACKEND = "fsdp"
"""The backend whose forward pass is used."""


class ExactGenerator(CausalLMGenerator):
    """A generator that computes each token with a forward pass over all tokens before it, without a cache.

    Log-probabilities are bitwise equal to those that an actor with `engine.invariant=true` computes for the whole completion, on the same
    processor with the same number of threads.

    Args:
        config: The configuration.

    Raises:
        ModelError: The model cannot be loaded, or packed attention is not correct for it.
        ConfigError: It runs on CUDA, or the model's numerics depend on the number of tokens that follow.
    """

    takes_media = False
    returns_routes = False
    has_adapters = False

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        if self._lm.device.type == "cuda":
            raise ConfigError(
                "generator=exact on CUDA, where the order of summation depends on the number of tokens; use another generator, or a CPU "
                "(CUDA_VISIBLE_DEVICES=)"
            )
        if self._lm.media is not None:
            raise ConfigError(
                f"generator=exact supports only text models, and {config.model.path} is not one; use continuous or static"
            )
        self._model = engine_class(BACKEND).whole_model(self._lm.model, read_config(config.model), config.model.path)

    def limits(self) -> CompletionLimits:
        """Return the limits of this generator."""
        limits = super().limits()
        # Beyond this size, a pass no longer has the same numbers for every number of tokens.
        return replace(limits, tokens=min(limits.tokens, self._model.size))

    def run_step(self) -> None:
        """Generate the next token of each request."""
        for stream in list(self.waiting.values())[: self.config.max_batch_size - len(self.running)]:
            self.admit(stream)
            self.prefill_tokens += stream.length
        for stream in list(self.running.values()):
            self.add_token(stream, *self._next(stream))

    def _next(self, stream: TokenStream) -> tuple[int, float]:
        # The log-probability is that of the forward pass, because that of `sample_tokens` may be rounded differently.
        def choose(logits: Tensor) -> int:
            (token,), _ = sample_tokens(logits[None], [stream.draw()])
            return token

        return self._model.next_token(stream.so_far, stream.options.temperature or 1.0, choose)

    def stop_request(self, stream: TokenStream) -> None:
        """Do nothing: a request has no state beyond its tokens."""

    def drop_caches(self) -> None:
        """Do nothing: there are no caches."""

    def close(self) -> None:
        """Free the model."""
        del self._model
        self._lm.close()
