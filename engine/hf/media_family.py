"""A transformers family that takes images, video or audio: the inputs of its encoders, and the number of tokens per item.

An item is the unit of an encoder's input: an image, a video, or a tile of an image. Its features replace the embeddings of equally many
placeholder tokens, all with one id. The encoders run through the model's own methods. Their outputs are passed back to the model as
`mm_encoder_outputs`, or put among the embeddings of its decoder.

Axes: T tokens of a document, M rows of a media field, F features, H hidden size, A position axes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..packing.batch import Kind


@dataclass(frozen=True, kw_only=True)
class Modality:
    """A kind of media in a family. The fields of a batch have the names of the encoder's arguments.

    Args:
        values: The field of the encoder's input, with one or more rows for each item.
        items: The fields with one row for each item; without any, each row of `values` is an item.
        token: The name of the placeholder token's id in the config.
        method: The name of the method that runs the encoder.
        optional: The fields with one row for each item that may be missing; only positions depend on them.
    """

    values: str
    items: tuple[str, ...] = ()
    token: str = "image_token_id"
    method: str = "get_image_features"
    optional: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a batch must have."""
        return (self.values, *self.items)


class MediaFamily(ABC):
    """A family that takes media.

    Args:
        config: The model's config, with those of its encoders.
    """

    modalities: Mapping[Kind, Modality]
    """The kinds of media that the family takes."""
    axes: ClassVar[int] = 1
    """The number of position axes, A."""
    block_kinds: tuple[Kind, ...] = ()
    """The kinds whose tokens attend to each other in both directions within each item."""
    blocks_in_windows: ClassVar[bool] = False
    """Whether they do so only in layers with a window."""
    takes_outputs: ClassVar[bool] = True
    """Whether the model takes `mm_encoder_outputs`; otherwise features are put among the decoder's input embeddings."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config: Any = config
        self.tokens: dict[Kind, int] = {kind: getattr(config, m.token) for kind, m in self.modalities.items()}
        """The id of the placeholder token of each kind."""

    @property
    def reserved_tokens(self) -> tuple[int, ...]:
        """The ids of the tokens that a completion must not contain, because the model would expect media there."""
        return tuple(self.tokens.values())

    @property
    def deepstack_layers(self) -> int:
        """The number of the decoder's first layers that have features added to their outputs, L."""
        return 0

    @abstractmethod
    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        """Return the number of rows of `Modality.values` of each item, given the fields of the kind."""

    @abstractmethod
    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        """Return the number of features of each item, given the fields of the kind."""

    @abstractmethod
    def blank(self, kind: Kind) -> dict[str, Tensor]:
        """Return the fields of the smallest item, for a rank without items while other ranks have some."""

    @abstractmethod
    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        """Return the problem with the fields of a kind, and the index of the item (None for all items); None without a problem."""

    def arguments(self, kind: Kind, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of the encoder."""
        return {name: media[name] for name in self.modalities[kind].fields}

    def trimmed(self, kind: Kind, media: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the fields of a kind without the padding that none of their items needs."""
        return media

    def encode(self, base: PreTrainedModel, kind: Kind, media: Mapping[str, Tensor]) -> Tensor:
        """Run an encoder.

        Args:
            base: The model without its head.
            kind: The kind of media.
            media: The fields of the kind.

        Returns:
            `[F, (1 + L) H]`: the features, each followed by those for L further layers.
        """
        output = getattr(base, self.modalities[kind].method)(**self.arguments(kind, media), return_dict=True)
        # Features for further layers are further columns, so that one exchange between ranks moves all of them.
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([_flat(layer) for layer in layers], -1)

    def encoded(self, features: Tensor) -> Any:
        """Convert rows of the output of `encode` to the form that the model accepts as an encoder's output."""
        first, *deeper = features.split(self.config.get_text_config().hidden_size, -1)
        output: Any = BaseModelOutputWithPooling(pooler_output=first)
        if deeper:
            output.deepstack_features = [[layer] for layer in deeper]
        return output

    def text_ids(self, ids: Tensor) -> Tensor:
        """Return the ids `[T]` to embed for tokens without features, given the ids of all tokens."""
        return ids

    def decoder_arguments(self, base: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
        """Return the further arguments that a decoder needs besides its input embeddings.

        Args:
            base: The model without its head.
            ids: `[T]` int64, the return value of `text_ids`.
        """
        return {}

    @abstractmethod
    def patches(self, kind: Kind) -> float:
        """Return the number of patches, or of steps of audio, that an encoder's layers have for each feature."""

    def parts(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        """Return the number of parts of each item, such as the frames of a video. Patches attend only within their part."""
        return [1] * len(self.features_of(kind, media))

    def padded(self, kind: Kind) -> int | None:
        """Return the number of features to which every item is padded for its encoder; None without padding."""
        return None

    def attention(self, kind: Kind) -> tuple[tuple[int, int | None], ...]:
        """Return the (width, window) of each layer of an encoder; see `EncoderShape`."""
        vision = self.config.vision_config
        width = getattr(vision, "embed_dim", None) or vision.hidden_size
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        return ((2 * width, None),) * layers

    def positions(self, base: PreTrainedModel, ids: Tensor, media: Mapping[Kind, Mapping[str, Tensor]]) -> Tensor:
        """Return the positions of a document with media.

        Args:
            base: The model without its head.
            ids: `[T]` int64 on the host, the token ids.
            media: The fields of each kind with one row for each item, of this document only.

        Returns:
            `[A, T]`.
        """
        return torch.arange(len(ids)).expand(self.axes, -1)


def wrong_shape(name: str, value: Tensor, *sizes: int) -> str | None:
    """Return the error if a field does not have the shape `[M, *sizes]`; None if it does."""
    if tuple(value.shape[1:]) == sizes and value.dim():
        return None
    return f"{name} has the shape {list(value.shape)}; it must be {['M', *sizes]}".replace("'", "")


def _flat(features: Any) -> Tensor:
    """Return features as `[F, H]`; a family may return a list with one tensor per item, or `[M, F / M, H]`."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.flatten(0, -2)
