"""Images of requests, as data URIs: the fields that a model's encoder reads, and their tokens in a prompt."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..engine.config import ModelConfig
from ..engine.errors import ConfigError, MediaError
from ..engine.hf.tokenizer import load_tokenizer
from ..engine.packing.batch import media_fields
from ..media.decode import MediaLimits
from ..media.processors import PROCESSORS
from ..media.sources import OVER_NETWORK, read_source

LIMITS = MediaLimits(max_pixels=2**24)
"""Larger images are downscaled before the model's processor receives them."""


class PromptImages:
    """Reads the images of requests for one model.

    Args:
        model: The model settings.
        config: The config of the whole model.
    """

    def __init__(self, model: ModelConfig, config: PreTrainedConfig) -> None:
        self._tokenizer: Any = load_tokenizer(model)
        self._processor = PROCESSORS[config.model_type](model, config, self._tokenizer)
        self._last: tuple[Any, tuple[list[int], Mapping[str, Tensor]]] | None = None

    def read(self, prompt: Sequence[int], uris: Sequence[str]) -> tuple[list[int], Mapping[str, Tensor]]:
        """Return a prompt in which each image has as many tokens as features, and the fields that the encoder reads.

        Args:
            prompt: The token ids, including the chat template's placeholder for each image.
            uris: The images as data URIs.

        Raises:
            ConfigError: An image cannot be used, or the prompt has a different number of images.
        """
        key = (tuple(prompt), tuple(uris))
        if self._last is None or self._last[0] != key:
            # Consecutive requests may be several completions of one prompt.
            self._last = key, self._read(prompt, uris)
        ids, fields = self._last[1]
        return list(ids), fields

    def _read(self, prompt: Sequence[int], uris: Sequence[str]) -> tuple[list[int], Mapping[str, Tensor]]:
        placeholder = self.placeholder
        if (count := list(prompt).count(placeholder)) != len(uris):
            raise ConfigError(f"the prompt has {count} image tokens (id {placeholder}) for {len(uris)} images")
        # Errors of one image name it by its number; the others concern the model.
        processed = []
        for i, uri in enumerate(uris):
            try:
                processed.append(self.process(uri))
            except MediaError as e:
                raise ConfigError(f"image {i}: {e}") from e
        texts = iter([tokens for tokens, _ in processed])
        # Each placeholder is replaced by the text of the next image; their numbers are equal, as checked above.
        ids = [one for token in prompt for one in (next(texts) if token == placeholder else [token])]
        fields = media_fields([[fields for _, fields in processed]])
        return ids, {name: field.values for name, field in fields.items()}

    @cached_property
    def placeholder(self) -> int:
        """The token that stands for an image in a prompt.

        Raises:
            ConfigError: The model takes no images, or its tokenizer has no such token.
        """
        try:
            self._processor.check("image")
        except MediaError as e:
            raise ConfigError(str(e)) from e
        text = self._processor.placeholder("image")
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(
                f"the placeholder {text!r} of an image is {len(ids)} tokens of the model's tokenizer; it must be one"
            )
        return ids[0]

    def process(self, image: str | bytes) -> tuple[list[int], Mapping[str, Tensor]]:
        """Return the tokens of an image in a prompt, and the fields that the encoder reads.

        Args:
            image: A data URI, or the content of an image file.

        Raises:
            MediaError: The image cannot be decoded or processed.
        """
        media = self._processor.process(read_source("image", image, OVER_NETWORK), LIMITS)
        tokens: list[int] = self._tokenizer(media.text, add_special_tokens=False)["input_ids"]
        return tokens, media.fields
