"""The transformers model of a generator: loading, new weights and placement."""

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, GenerationConfig

from ..engine.errors import ConfigError, ModelError
from ..engine.hf.config import read_config
from ..engine.hf.layout import DiskLayout
from ..engine.hf.media import FAMILIES, check_media_support, media_config
from ..engine.hf.model_path import resolve_folder
from ..engine.hf.shape import context_of
from ..engine.hf.state_layers import has_biased_state
from ..engine.hf.weights import check_head, quiet_loading
from ..engine.offload import free_memory
from ..engine.torch_private import named_persistent_buffers
from .images import PromptImages
from .media import MediaFeatures, PromptMedia
from .options import RolloutConfig
from .placement import GeneratorPlace
from .route_recorder import RouteRecorder
from .token_stream import CompletionLimits
from .weight_values import largest

log = logging.getLogger(__name__)


class CausalLM:
    """A transformers causal language model used only for generation.

    Args:
        config: The configuration of the generator.

    Raises:
        ModelError: The model cannot be loaded.
        ConfigError: The model has no KV cache.
    """

    def __init__(self, config: RolloutConfig) -> None:
        if config.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={config.dtype}; the dtype of a rollout must be float32 or bfloat16")
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._config = config
        path, folder = config.model.path, resolve_folder(config.model.path)
        try:
            text = read_config(config.model)
            whole = media_config(config.model, text)
            changed = {"config": whole or text} if config.model.overrides else {}
            kind: Any = AutoModelForCausalLM if whole is None else AutoModelForMultimodalLM
            with quiet_loading():
                loaded: Any = kind.from_pretrained(
                    folder,
                    dtype=getattr(torch, config.dtype),
                    trust_remote_code=config.model.trust_remote_code,
                    output_loading_info=True,
                    **changed,
                )
        except (ConfigError, ModelError):
            raise
        except Exception as e:  # transformers and safetensors raise anything on a damaged model
            raise ModelError(f"model.path={path} cannot be loaded for rollout: {type(e).__name__}: {e}") from e
        model, loading_info = loaded
        check_head(loading_info["unexpected_keys"], config.model)
        # transformers fills missing tensors with random values and only logs a warning.
        if missing := sorted(loading_info["missing_keys"]):
            raise ModelError(
                f"model.path={path} lacks {len(missing)} tensors that a language model needs, {', '.join(missing[:3])} among "
                "them; its completions would be random"
            )
        self.parameters = set(inspect.signature(model.forward).parameters)
        """The names of the parameters of the model's forward method."""
        if "past_key_values" not in self.parameters:
            raise ConfigError(
                f"model.path={path}: {type(model).__name__} has no cache of keys and values (past_key_values), which generation needs"
            )
        self.model: Any = model.to(self.device).eval()
        self.media: MediaFeatures | None = None
        """The features of media; None if the model does not accept media."""
        self._whole = whole
        self._images: PromptImages | None = None
        if whole is not None:
            check_media_support(model)
            self.media = MediaFeatures(self.model, FAMILIES[whole.model_type](whole), path)
        counts_or_reads_it = getattr(text, "attn_temperature_tuning", False) or text.model_type == "minimax"
        self.takes_padding = not counts_or_reads_it and not has_biased_state(model)
        """Whether prompts of different lengths can share a batch. Llama 4 counts the positions of padding, and MiniMax attends to it. A
        stateful layer whose projection has a bias carries the bias from padding into the prompt."""
        self.recorder = RouteRecorder(self.model, text, path) if config.return_routed_experts else None
        """Records the experts that tokens are routed to; None if not requested."""
        # The shapes of freed parameters, whose tensors have no elements in the meantime.
        self._absent: dict[str, torch.Size] = {}
        bad_names = _not_finite((name, parameter) for name, parameter in self.model.named_parameters())
        if bad_names:
            raise ModelError(
                f"model.path={path}: {_named(bad_names)} values that are not finite (NaN or infinity); the weights are damaged"
            )
        # Of the folder's settings only the tokens that end a completion are used.
        settings, self.model.generation_config = self.model.generation_config, GenerationConfig()
        self.pad: int = config.pad if config.pad is not None else settings.pad_token_id or 0
        self.limits = CompletionLimits(
            vocabulary=self.model.get_input_embeddings().num_embeddings,
            context=context_of(self.model.config.get_text_config()),
            tokens=config.max_batch_total_tokens,
            end_tokens=frozenset(_ids(settings.eos_token_id)),
        )
        if ignored := _ignored_settings(settings):
            log.warning(
                "%s sets %s in generation_config.json or config.json, which rollout ignores: completions are sampled as set in "
                "SamplingOptions, because their log-probabilities would otherwise not be the policy's",
                path,
                ", ".join(f"{name}={value}" for name, value in ignored.items()),
            )

    @property
    def excluded(self) -> tuple[int, ...]:
        """The tokens that are never sampled, because features would replace them."""
        return () if self.media is None else self.media.tokens

    def read_images(self, prompt: list[int], images: Sequence[str]) -> tuple[list[int], Mapping[str, Tensor]]:
        """See `BaseGenerator.read_images`."""
        if self.media is None or self._whole is None:
            raise ConfigError(f"{self._config.model.path} does not accept images")
        if self._images is None:
            self._images = PromptImages(self._config.model, self._whole)
        return self._images.read(prompt, images)

    def take_media(self, title: str, prompt: list[int], media: Mapping[str, Tensor]) -> PromptMedia | None:
        """See `BaseGenerator.take_media`."""
        if self.media is None:
            if media:
                raise ConfigError(f"{title} has media, but {self._config.model.path} does not accept any")
            return None
        if not media and not set(prompt) & set(self.media.tokens):
            return None
        return self.media.add(prompt, media, title)

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]], *, complete: bool = True) -> None:
        """Copy new weights into the model; see `BaseGenerator.load_weights`. Media are encoded again.

        Args:
            weights: The tensors by name.
            complete: Whether they must include all weights.

        Raises:
            ModelError: A tensor does not match any parameter, has the wrong shape or non-finite values, or parameters are missing.
        """
        if self.media is not None:
            self.media.drop()
        layout = DiskLayout(self.model)
        targets_by_name: dict[str, list[tuple[Tensor, tuple[int, ...]]]] = {}
        for name, parameter in [*self.model.named_parameters(remove_duplicate=True), *named_persistent_buffers(self.model)]:
            for segment in layout.stored_slices(name, parameter.shape):
                targets_by_name.setdefault(segment.name, []).append((segment.cut(parameter), tuple(segment.shape)))
        # Each name on disk is removed when it arrives. So a second tensor of the same name is unknown, and the names
        # that are left at the end are missing. Tied weights may come again under their second name, which has no
        # target.
        unknown, tied = [], set(self.model.all_tied_weights_keys)
        values: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            # Read only after the loop: reading a value waits for the device, which would slow down every copy.
            values.append((name, largest(tensor)))
            targets = targets_by_name.pop(name, None)
            if targets is None:
                if name not in tied:
                    unknown.append(name)
                continue
            for target, shape in targets:
                if tuple(tensor.shape) != shape:
                    raise ModelError(
                        f"{name} is {list(tensor.shape)}, but the rollout model's is {list(shape)}; they are different models"
                    )
                target.copy_(tensor.to(target.device))
        if unknown or (complete and targets_by_name):
            raise ModelError(
                f"the weights are not those of {self._config.model.path}: {len(unknown)} tensors match no parameter "
                f"({', '.join(unknown[:3]) or 'none'}), {len(targets_by_name)} parameters have no tensor "
                f"({', '.join(list(targets_by_name)[:3]) or 'none'})"
            )
        if bad_names := [name for name, value in values if not math.isfinite(float(value))]:
            raise ModelError(
                f"{_named(bad_names)} values that are not finite (NaN or infinity); the weights that were sent are damaged"
            )

    def move(self, place: GeneratorPlace) -> None:
        """Move the model to the `device` or the `host`, or free its parameters, which then return without values."""
        if place == "absent" and self._absent:
            return
        if self.media is not None:
            self.media.drop()
        parameters = dict(self.model.named_parameters())
        # New memory without values: `BaseGenerator` refuses to generate until weights have been loaded into it.
        for name, shape in self._absent.items():
            parameters[name].data = torch.empty(shape, dtype=parameters[name].dtype, device=self.device)
        self._absent = {}
        if place == "absent":
            for name, parameter in parameters.items():
                self._absent[name] = parameter.shape
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        else:
            self.model.to(self.device if place == "device" else torch.device("cpu"))
        free_memory(self.device)

    def close(self) -> None:
        """Free the model."""
        self.media = self.recorder = None
        del self.model
        free_memory(self.device)


USED_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
"""Settings of a folder's generation config that rollout uses or that do not affect generation."""


def _ignored_settings(settings: GenerationConfig) -> dict[str, Any]:
    """Return a folder's generation settings that differ from the defaults and that rollout ignores."""
    defaults = GenerationConfig().to_dict()
    # Rollout uses these values anyway.
    harmless = {"use_cache": True, "output_attentions": False, "output_hidden_states": False}
    return {
        name: value
        for name, value in settings.to_diff_dict().items()
        if name not in USED_SETTINGS and value is not None and value != harmless.get(name, defaults.get(name))
    }


def _ids(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    values = [(name, largest(tensor)) for name, tensor in tensors]
    return [name for name, value in values if not math.isfinite(float(value))]


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} {'has' if len(names) == 1 else 'have'}"
