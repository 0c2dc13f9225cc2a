"""The chunks of datums and prompts: token ids, and images. An image becomes placeholder tokens, which the model replaces by its features."""

import base64
import binascii
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from ...engine.config import ModelConfig
from ...engine.errors import BatchError, DrivetrainError
from ...generation.images import LIMITS, PromptImages
from ...media.decode import image_size
from .json_requests import PromptChunk

log = logging.getLogger(__name__)

FORMATS = ("png", "jpeg")
MOST_NUMBERS = 2**25
"""The maximum count of numbers in the targets, weights and images of a request. A number has 4 or 8 bytes."""
BYTES_PER_PIXEL = 24
"""The memory of a pixel of a processed image: three channels of float32, twice in families that process images as videos."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTokens:
    """The tokens of the chunks of a datum or a prompt.

    Args:
        ids: `[T]` int64, with as many tokens for each image as it has in the model's input.
        items: The model's input fields (such as pixels) of each image, in order.
        collapsed: The token ids with a single placeholder for each image, as the generator expects them.
        images: The images as data URIs, in order.
        is_image: `[T]` bool, whether a token belongs to an image.
    """

    ids: np.ndarray
    items: Sequence[Mapping[str, Tensor]]
    collapsed: list[int]
    images: list[str]
    is_image: np.ndarray


class ChunkImageReader(Protocol):
    """A reader of the images of chunks."""

    def read(self, data: bytes, title: str) -> tuple[list[int], Mapping[str, Tensor], int]:
        """Process an image.

        Args:
            data: The content of the image file.
            title: The name of the image in messages.

        Returns:
            The token ids of the image, its fields in the model's input, and the token id that stands for an image in prompts of the
            generator.

        Raises:
            BatchError: The image cannot be used.
        """


class ModelImages:
    """Reads images with the processor of a model. May be used by several threads.

    Args:
        model: The settings of the model.
        config: The config of the model with its vision part; None if the model takes no images.
    """

    def __init__(self, model: ModelConfig, config: PreTrainedConfig | None) -> None:
        self._model, self._config = model, config
        self._images: PromptImages | None = None
        self._refusal = "the model of this service takes no images; send encoded_text alone"
        # Processors and tokenizers must not be used by several threads at the same time.
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the image processor. If the model has no usable one, a warning is logged, and images are refused."""
        if self._config is None:
            return
        try:
            images = PromptImages(self._model, self._config)
            # Raises an error if the processor or the image token does not exist.
            _ = images.placeholder
        except DrivetrainError as e:
            self._refusal = (
                "this service cannot read images, because its model has no usable image processor; send encoded_text alone"
            )
            log.warning("requests with images are refused: %s", e)
        else:
            self._images = images

    def read(self, data: bytes, title: str) -> tuple[list[int], Mapping[str, Tensor], int]:
        """See `ChunkImageReader.read`."""
        if self._images is None:
            raise BatchError(f"{title}: {self._refusal}")
        with self._lock:
            try:
                tokens, fields = self._images.process(data)
            except DrivetrainError as e:
                raise BatchError(f"{title}: {e}") from e
        return tokens, fields, self._images.placeholder


_NO_RESIZE = "which is not supported; resize the image before it is sent"


@dataclass
class _ReadChunks:
    """The tokens and images of the chunks that have been read.

    Args:
        title: The name of the datum or prompt in messages.
        longest: The maximum number of tokens.
        numbers: The count of numbers in the processed images.
        ids: The token ids of each chunk; the other fields are as in `ChunkTokens`.
    """

    title: str
    longest: int
    numbers: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    items: list[Mapping[str, Tensor]] = field(default_factory=list)
    collapsed: list[int] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    is_image: list[np.ndarray] = field(default_factory=list)

    def add_text(self, ids: np.ndarray) -> None:
        self.ids.append(ids)
        self.collapsed += ids.tolist()
        self.is_image.append(np.zeros(len(ids), dtype=bool))

    def add_image(self, data: bytes, kind: str, expected: int | None, reader: ChunkImageReader) -> None:
        title = f"image {len(self.items)} of {self.title}"
        if kind not in FORMATS:
            raise BatchError(f"{title} has the format {kind[:40]!r}; send {' or '.join(FORMATS)}")
        tokens, fields, placeholder = reader.read(data, title)
        if expected is not None and expected != len(tokens):
            # The targets of all later tokens would be shifted.
            raise BatchError(
                f"{title} has expected_tokens={expected}, but the model's processor gives {len(tokens)} tokens; send that number, "
                "or omit expected_tokens"
            )
        # Checked after each image, so that further images are not decoded.
        self.numbers += sum(value.numel() for value in fields.values())
        if self.numbers > MOST_NUMBERS:
            raise BatchError(
                f"the images up to {title} have {self.numbers} numbers after processing, more than the limit of {MOST_NUMBERS}; send fewer "
                "or smaller images"
            )
        self.ids.append(np.asarray(tokens, dtype=np.int64))
        self.items.append(fields)
        self.collapsed.append(placeholder)
        self.images.append(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")
        self.is_image.append(np.ones(len(tokens), dtype=bool))
        length = sum(len(part) for part in self.ids)
        if length > self.longest:
            raise BatchError(
                f"{self.title} has at least {length} tokens with {title}; the maximum is {self.longest}; send fewer or smaller images"
            )

    def tokens(self) -> ChunkTokens:
        title = self.title
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, dtype=np.int64)
        if not len(ids):
            raise BatchError(f"{title} has no tokens; send at least one")
        if ids.min() < 0:
            raise BatchError(f"{title} has the token id {ids.min()}; token ids must be at least 0")
        is_image = np.concatenate(self.is_image)
        return ChunkTokens(ids=ids, items=self.items, collapsed=self.collapsed, images=self.images, is_image=is_image)


def datum_tokens(chunks: Sequence[Any], reader: ChunkImageReader, title: str, longest: int) -> ChunkTokens:
    """Return the tokens of a datum's `model_input`.

    Args:
        chunks: The chunks, as protobuf messages.
        reader: The reader of images.
        title: The name of the datum in messages.
        longest: The maximum number of tokens up to an image; the total is not checked here.

    Raises:
        BatchError: There are no tokens, or a chunk is not supported, not valid or too large.
    """
    parts = _ReadChunks(title, longest)
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            if len(chunk.encoded_text.tokens) % 4:
                raise BatchError(
                    f"{title} has a chunk with {len(chunk.encoded_text.tokens)} bytes of tokens, which is not a multiple of 4; send them as int32"
                )
            parts.add_text(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4").astype(np.int64))
        elif kind == "image":
            image = chunk.image
            if image.HasField("override_dimensions"):
                raise BatchError(f"{title} has an image with override_dimensions, {_NO_RESIZE}")
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            parts.add_image(image.data, image.format, expected, reader)
        else:
            raise BatchError(f"{title} has a chunk of {kind or 'nothing'}; this service takes encoded_text and image")
    return parts.tokens()


def prompt_tokens(chunks: Sequence[PromptChunk], reader: ChunkImageReader, longest: int) -> ChunkTokens:
    """Return the tokens of a prompt.

    Args:
        chunks: The chunks of the prompt.
        reader: The reader of images.
        longest: The maximum number of tokens up to an image; the total is not checked here.

    Raises:
        BatchError: There are no tokens, or a chunk is not supported, not valid or too large.
    """
    title = "the prompt"
    parts = _ReadChunks(title, longest)
    for chunk in chunks:
        if chunk.type == "encoded_text":
            parts.add_text(np.asarray(chunk.tokens, dtype=np.int64))
        elif chunk.type == "image":
            if chunk.override_dimensions is not None:
                raise BatchError(f"{title} has an image with override_dimensions, {_NO_RESIZE}")
            try:
                data = base64.b64decode(chunk.data, validate=True)
            except (binascii.Error, ValueError) as e:
                raise BatchError(f"{title} has an image whose data are not base64: {e}") from None
            parts.add_image(data, chunk.format, chunk.expected_tokens, reader)
        else:
            raise BatchError(f"{title} has a chunk of {chunk.type[:40]}; this service takes encoded_text and image")
    return parts.tokens()


def processed_bytes(data: bytes) -> int:
    """Return an estimate of the bytes of an image after processing; 0 if the image cannot be read.

    Args:
        data: The content of the image file.
    """
    size = image_size(data)
    return 0 if size is None else BYTES_PER_PIXEL * min(size[0] * size[1], LIMITS.max_pixels or size[0] * size[1])
