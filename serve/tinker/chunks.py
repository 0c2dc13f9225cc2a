"""The chunks of datums and prompts: token ids, and images, which become the tokens that the model's features replace."""

import base64
import binascii
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

FORMATS = ("png", "jpeg")
BYTES_PER_PIXEL = 24
"""The memory that a pixel takes when it has been processed: three channels of float32, twice in families that take images as videos."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTokens:
    """The tokens of the chunks of a datum or a prompt.

    Args:
        ids: `[T]` int64, with as many tokens for each image as it has in the model's input.
        items: The fields of each image, in order.
        collapsed: The tokens with a single placeholder for each image.
        images: The images as data URIs.
        is_image: `[T]` bool, the tokens of images.
    """

    ids: np.ndarray
    items: Sequence[Mapping[str, Tensor]]
    collapsed: list[int]
    images: list[str]
    is_image: np.ndarray


class ChunkImageReader(Protocol):
    """What reads the images of chunks."""

    def read(self, data: bytes, title: str) -> tuple[list[int], Mapping[str, Tensor], int]:
        """Return the tokens of an image, its fields, and the placeholder that stands for it in prompts.

        Raises:
            BatchError: The image cannot be used.
        """


class ModelImages:
    """The images of a model. May be used by several threads.

    Args:
        model: The model settings.
        config: The config of the whole model; None if it takes no images.
    """

    def __init__(self, model: ModelConfig, config: PreTrainedConfig | None) -> None:
        self._model, self._config = model, config
        self._images: PromptImages | None = None
        # Processors and tokenizers are not made for several threads.
        self._lock = threading.Lock()

    def read(self, data: bytes, title: str) -> tuple[list[int], Mapping[str, Tensor], int]:
        """See `ChunkImageReader.read`."""
        if self._config is None:
            raise BatchError(f"{title} has an image, but {self._model.path} takes none; send encoded_text alone")
        with self._lock:
            try:
                if self._images is None:
                    self._images = PromptImages(self._model, self._config)
                placeholder = self._images.placeholder
                tokens, fields = self._images.process(data)
            except DrivetrainError as e:
                raise BatchError(f"{title}: {e}") from e
        return tokens, fields, placeholder


@dataclass
class _ReadChunks:
    """What has been read of some chunks."""

    ids: list[np.ndarray] = field(default_factory=list)
    items: list[Mapping[str, Tensor]] = field(default_factory=list)
    collapsed: list[int] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    is_image: list[np.ndarray] = field(default_factory=list)

    def add_text(self, ids: np.ndarray) -> None:
        self.ids.append(ids)
        self.collapsed += ids.tolist()
        self.is_image.append(np.zeros(len(ids), dtype=bool))

    def add_image(self, data: bytes, kind: str, expected: int | None, reader: ChunkImageReader, title: str) -> None:
        if kind not in FORMATS:
            raise BatchError(f"{title} has an image of the format {kind[:40]!r}; send {' or '.join(FORMATS)}")
        tokens, fields, placeholder = reader.read(data, title)
        if expected is not None and expected != len(tokens):
            # The targets of the tokens behind it would be those of others.
            raise BatchError(
                f"{title} has an image with expected_tokens={expected}, which the model's processor turns into {len(tokens)} tokens; "
                "count them as it does, or leave expected_tokens out"
            )
        self.ids.append(np.asarray(tokens, dtype=np.int64))
        self.items.append(fields)
        self.collapsed.append(placeholder)
        self.images.append(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")
        self.is_image.append(np.ones(len(tokens), dtype=bool))

    def tokens(self, title: str) -> ChunkTokens:
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, dtype=np.int64)
        if not len(ids):
            raise BatchError(f"{title} has no tokens")
        if ids.min() < 0:
            raise BatchError(f"{title} has the token id {ids.min()}")
        is_image = np.concatenate(self.is_image)
        return ChunkTokens(ids=ids, items=self.items, collapsed=self.collapsed, images=self.images, is_image=is_image)


def datum_tokens(chunks: Sequence[Any], reader: ChunkImageReader, title: str) -> ChunkTokens:
    """Return the tokens of a datum's `model_input`.

    Args:
        chunks: The chunks, as protobuf messages.
        reader: What reads images.
        title: The name of the datum in messages.

    Raises:
        BatchError: It has no tokens, or a chunk that cannot be used.
    """
    parts = _ReadChunks()
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            if len(chunk.encoded_text.tokens) % 4:
                raise BatchError(f"{title}: the tokens of a chunk are not int32")
            parts.add_text(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4").astype(np.int64))
        elif kind == "image":
            image = chunk.image
            if image.HasField("override_dimensions"):
                raise BatchError(
                    f"{title} has an image with override_dimensions, which is not supported; resize it before it is sent"
                )
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            parts.add_image(image.data, image.format, expected, reader, title)
        else:
            raise BatchError(f"{title} has a chunk of {kind or 'nothing'}; this service takes encoded_text and image")
    return parts.tokens(title)


def prompt_tokens(chunks: Sequence[PromptChunk], reader: ChunkImageReader) -> ChunkTokens:
    """Return the tokens of a prompt.

    Args:
        chunks: The chunks.
        reader: What reads images.

    Raises:
        BatchError: It has no tokens, or a chunk that cannot be used.
    """
    parts, title = _ReadChunks(), "the prompt"
    for chunk in chunks:
        if chunk.type == "encoded_text":
            parts.add_text(np.asarray(chunk.tokens, dtype=np.int64))
        elif chunk.type == "image":
            try:
                data = base64.b64decode(chunk.data, validate=True)
            except (binascii.Error, ValueError) as e:
                raise BatchError(f"{title} has an image whose data are not base64: {e}") from None
            parts.add_image(data, chunk.format, chunk.expected_tokens, reader, title)
        else:
            raise BatchError(f"{title} has a chunk of {chunk.type[:40]}; this service takes encoded_text and image")
    return parts.tokens(title)


def processed_bytes(data: bytes) -> int:
    """Return about how many bytes an image takes when it has been processed; 0 if it cannot be read."""
    size = image_size(data)
    return 0 if size is None else BYTES_PER_PIXEL * min(size[0] * size[1], LIMITS.max_pixels or size[0] * size[1])
