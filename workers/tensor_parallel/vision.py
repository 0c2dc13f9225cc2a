"""Prompts with images: decoding, features, positions, and the windows in which such a prompt is processed.

Axes: T tokens of a prompt, V image tokens among them, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from ...engine.errors import CapabilityError, ConfigError, MediaError, ModelError
from ...media.decode import MediaLimits, decode_image
from ...media.sources import OVER_NETWORK, read_source
from .model import ShardedLM


@dataclass(frozen=True)
class Pixels:
    """Images in the form that the vision tower takes.

    Args:
        values: The patches of all images.
        grids: The number of patches of each image in time, height and width `[N, 3]`.
        tokens: The number of image tokens of each image.
    """

    values: Tensor
    grids: Tensor
    tokens: list[int]


def decode_images(uris: Sequence[str]) -> list[Image.Image]:
    """Return the images of data URIs.

    Raises:
        ConfigError: One is not a data URI of an image, or the image is damaged or too large.
    """
    images = []
    for i, uri in enumerate(uris):
        try:
            images.append(decode_image(read_source("image", uri, OVER_NETWORK), MediaLimits()))
        except MediaError as e:
            raise ConfigError(f"image {i}: {e}") from e
    return images


class ImageReader:
    """Converts images to the input of a model's vision tower.

    Args:
        folder: The model's folder, with its preprocessor_config.json.

    Raises:
        ModelError: There is no such file, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        try:
            # This backend does not need torchvision.
            self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, ImportError) as e:
            raise ModelError(f"{folder} has no image processor that can be used: {e}") from e

    def read(self, uris: Sequence[str]) -> Pixels:
        """Return the images of data URIs, the same on all ranks.

        Raises:
            ConfigError: An image cannot be used.
        """
        images = decode_images(uris)
        try:
            inputs = self._processor(images=images, return_tensors="pt")
        except ValueError as e:
            raise ConfigError(f"the images cannot be used: {e}") from e
        grids: Tensor = inputs["image_grid_thw"]
        # The vision tower merges a square of patches into one token.
        merged = int(self._processor.merge_size) ** 2
        return Pixels(inputs["pixel_values"], grids, [int(n) // merged for n in grids.prod(-1)])

    def expand(self, tokens: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
        """Return a prompt in which the token of each image is repeated as often as the image has tokens.

        Args:
            tokens: A prompt with one image token for each image.
            image_token: The image token.
            counts: The number of tokens of each image.

        Raises:
            ConfigError: There are more or fewer image tokens than images.
        """
        if (token_count := list(tokens).count(image_token)) != len(counts):
            raise ConfigError(f"the prompt has {token_count} image tokens (id {image_token}) for {len(counts)} images")
        remaining = iter(counts)
        return [token for one in tokens for token in ([one] * next(remaining) if one == image_token else [one])]


def check_sees_images(lm: ShardedLM) -> None:
    """Check that a model takes images.

    Raises:
        CapabilityError: It does not.
    """
    if not lm.sees_images:
        raise CapabilityError(
            f"{lm.model.config.model_type} sees no images in generation steps; only qwen2_5_vl and qwen3_vl do"
        )


def check_image_tokens(tokens: Sequence[int], image_token: int, pixels: Pixels) -> None:
    """Check a prompt with images.

    Raises:
        ConfigError: The number of image tokens is not that of the images.
    """
    count, needed = list(tokens).count(image_token), sum(pixels.tokens)
    if count != needed:
        raise ConfigError(
            f"the prompt has {count} image tokens (id {image_token}), but its images have {needed} ({pixels.tokens}); repeat the image "
            "token as often as each image needs"
        )


@torch.inference_mode()
def step_with_images(
    lm: ShardedLM, tokens: Sequence[int], offset: int, image_token: int, pixels: Pixels, chunk_size: int
) -> Tensor:
    """Process a prompt with images. Collective over the ranks, which pass the same arguments.

    Args:
        lm: The model.
        tokens: The token ids, with as many image tokens as the images have.
        offset: The number of tokens that stay in the cache.
        image_token: The image token.
        pixels: The images.
        chunk_size: The number of tokens in a forward pass.

    Returns:
        The logits of the token after the last one `[V]`, the same on all ranks.

    Raises:
        ConfigError: See `ShardedLM.check` and `check_image_tokens`.
    """
    lm.check(tokens, offset)
    check_sees_images(lm)
    check_image_tokens(tokens, image_token, pixels)
    lm.roll_back(offset)
    backbone, device = lm.model.model, lm.device
    ids = torch.tensor([list(tokens)], device=device)
    visual = ids == image_token
    with lm.clear_cache_on_error():
        grids = pixels.grids.to(device)
        vision = backbone.get_image_features(pixels.values.to(device), grids)
        hidden = backbone.get_input_embeddings()(ids)
        features = torch.cat(list(vision.pooler_output)).to(hidden.device, hidden.dtype)
        # `[1, T, H]`: the features replace the embeddings of the image tokens, in order.
        hidden = hidden.masked_scatter(visual[..., None].expand_as(hidden), features)
        positions, delta = backbone.get_rope_index(ids, mm_token_type_ids=visual.int(), image_grid_thw=grids)
        # Positions count from the beginning of this prompt; those before it are added.
        positions = positions + offset + lm.positions_delta
        # Features that the first layers take in addition to those of the input, one tensor for each layer.
        deep = [torch.cat(list(layer)).to(hidden.dtype) for layer in getattr(vision, "deepstack_features", None) or ()]
        seen = 0
        logits: Tensor | None = None
        for start in range(0, len(tokens), chunk_size):
            window = slice(start, start + chunk_size)
            more: dict[str, Any] = {}
            count = int(visual[:, window].sum())
            if deep and count:
                more = {
                    "visual_pos_masks": visual[:, window],
                    "deepstack_visual_embeds": [layer[seen : seen + count] for layer in deep],
                }
            seen += count
            part = hidden[:, window]
            logits = lm.run(part, positions[:, :, window], part.shape[1], **more)
        lm.note_images(offset, lm.positions_delta + int(delta.reshape(-1)[0]))
    assert logits is not None
    return logits
