"""The families of transformers that take images, video or audio in: what their encoders read, and how many tokens an item takes.

An item is what an encoder takes by itself: an image, a video, or a tile of an image. Its features stand in the place of as many tokens,
all of one id. The encoders run by the model's own methods, and what they return goes back to the model as `mm_encoder_outputs`, or among the
embeddings of its decoder.

Axes: T tokens of a document, M rows of a media field, F features, H hidden size, A position axes.
"""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..config import ModelConfig
from ..errors import ModelError
from ..packing.batch import Kind
from .config import whole_config

MASK = "feature_attention_mask"
"""The field of Qwen's audio that says which frames are not padding."""
STEPS = 2
"""The steps of Qwen's audio encoders for each feature."""


@dataclass(frozen=True, kw_only=True)
class Modality:
    """A kind of media as a family takes it. The fields of a batch have the names of the encoder's arguments.

    Args:
        values: The field of the encoder's input, with one row or several for each item.
        items: The fields with one row for each item; without any, each row of `values` is an item.
        token: The name of the id, in the config, of the tokens in whose place features stand.
        method: The name of the method that encodes.
        optional: The fields with one row for each item that may be missing, and that positions alone depend on.
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
    """A family that takes media in.

    Args:
        config: The model's config, with those of its encoders.
    """

    modalities: ClassVar[Mapping[Kind, Modality]]
    axes: ClassVar[int] = 1
    """The number of position axes, A."""
    attends_in_blocks: ClassVar[bool] = False
    """Whether the tokens of an image attend to each other in both directions."""
    takes_outputs: ClassVar[bool] = True
    """Whether the model takes `mm_encoder_outputs`; otherwise features are put among the embeddings that its decoder takes."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config: Any = config
        self.tokens: dict[Kind, int] = {kind: getattr(config, m.token) for kind, m in self.modalities.items()}
        """The id of the tokens in whose place the features of each kind stand."""

    @abstractmethod
    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        """Return the number of rows of `Modality.values` of each item, given the fields of the kind."""

    @abstractmethod
    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        """Return the number of features of each item, given the fields of the kind."""

    @abstractmethod
    def blank(self, kind: Kind) -> dict[str, Tensor]:
        """Return the fields of the smallest item, for a rank that has none while others have."""

    @abstractmethod
    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        """Return what is wrong with the fields of a kind, and with which item, or with all of them; None if nothing is."""

    def arguments(self, kind: Kind, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of the encoder."""
        return {name: media[name] for name in self.modalities[kind].fields}

    def encode(self, base: PreTrainedModel, kind: Kind, media: Mapping[str, Tensor]) -> Tensor:
        """Run an encoder.

        Args:
            base: The model without its head.
            kind: The kind of media.
            media: The fields of the kind.

        Returns:
            `[F, (1 + L) H]`: the features, and beside each those that go to L further layers.
        """
        output = getattr(base, self.modalities[kind].method)(**self.arguments(kind, media), return_dict=True)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([_flat(layer) for layer in layers], -1)

    def encoded(self, features: Tensor) -> Any:
        """Return what the model takes as the output of an encoder, given rows of what `encode` returned."""
        first, *deeper = features.split(self.config.get_text_config().hidden_size, -1)
        output: Any = BaseModelOutputWithPooling(pooler_output=first)
        if deeper:
            output.deepstack_features = [[layer] for layer in deeper]
        return output

    @abstractmethod
    def patches(self, kind: Kind) -> float:
        """Return the number of patches, or of steps of audio, that an encoder's layers have for each feature."""

    def parts(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        """Return the number of parts of each item whose patches alone attend to each other, such as the frames of a video."""
        return [1] * len(self.features_of(kind, media))

    def padded(self, kind: Kind) -> int | None:
        """Return the number of features to which every item is padded for its encoder; None if none is."""
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
            media: The fields of each kind with one row for each item, of this document alone.

        Returns:
            `[A, T]`.
        """
        return torch.arange(len(ids)).expand(self.axes, -1)


def _wrong_shape(name: str, value: Tensor, *sizes: int) -> str | None:
    """Return what is wrong with the shape `[M, *sizes]` of a field; None if nothing is."""
    if tuple(value.shape[1:]) == sizes and value.dim():
        return None
    return f"{name} has the shape {list(value.shape)}; it must be {['M', *sizes]}".replace("'", "")


def _flat(features: Any) -> Tensor:
    """Return features `[F, H]`, which a family may have in a list with one tensor for each item, or `[M, F / M, H]`."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.flatten(0, -2)


class QwenVL(MediaFamily):
    """Qwen's vision-language families: images and videos as patches, with the grid of each item in time, height and width."""

    modalities = {
        "image": Modality(values="pixel_values", items=("image_grid_thw",)),
        "video": Modality(
            values="pixel_values_videos",
            items=("video_grid_thw",),
            token="video_token_id",
            method="get_video_features",
        ),
    }
    axes = 3

    def encoded(self, features: Tensor) -> Any:
        output = super().encoded(features)
        # A list with a tensor for each item.
        output.pooler_output = [output.pooler_output]
        return output

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        modality, merge = self.modalities[kind], self.config.vision_config.spatial_merge_size
        values, grids = media[modality.values], media[modality.items[0]]
        if wrong := _wrong_shape(modality.values, values, self._patch) or _wrong_shape(modality.items[0], grids, 3):
            return None, wrong
        if grids.is_floating_point():
            return None, f"{modality.items[0]} is {grids.dtype}; it must be of integers"
        for item, grid in enumerate(grids.tolist()):
            if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                return (
                    item,
                    f"{modality.items[0]} {grid}; time, height and width are at least 1, and the latter two multiples of {merge}",
                )
        return None

    @property
    def _patch(self) -> int:
        vision = self.config.vision_config
        channels: int = getattr(vision, "in_channels", 3)
        return channels * vision.temporal_patch_size * vision.patch_size**2

    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        grids: list[int] = media[self.modalities[kind].items[0]].prod(-1).tolist()
        return grids

    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        merged = self.config.vision_config.spatial_merge_size**2
        return [patches // merged for patches in self.rows(kind, media)]

    def patches(self, kind: Kind) -> float:
        return float(self.config.vision_config.spatial_merge_size**2)

    def parts(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        frames: list[int] = media[self.modalities[kind].items[0]][:, 0].tolist()
        return frames

    def attention(self, kind: Kind) -> tuple[tuple[int, int | None], ...]:
        layers, vision = super().attention(kind), self.config.vision_config
        whole = getattr(vision, "fullatt_block_indexes", None)
        if whole is None:
            return layers
        window = (vision.window_size // vision.patch_size) ** 2
        return tuple((width, None if i in whole else window) for i, (width, _) in enumerate(layers))

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        side, modality = self.config.vision_config.spatial_merge_size, self.modalities[kind]
        return {
            modality.values: torch.zeros(side * side, self._patch),
            modality.items[0]: torch.tensor([[1, side, side]]),
        }

    def positions(self, base: PreTrainedModel, ids: Tensor, media: Mapping[Kind, Mapping[str, Tensor]]) -> Tensor:
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        grids: dict[str, Tensor] = {}
        numbers: dict[Kind, int] = {"image": 1, "video": 2}
        for kind, number in numbers.items():
            if kind in media:
                modality = self.modalities[kind]
                kinds[ids == self.tokens[kind]] = number
                grids |= {name: media[kind][name] for name in (*modality.items, *modality.optional) if name in media[kind]}
        any_base: Any = base
        positions: Tensor = any_base.get_rope_index(ids[None], mm_token_type_ids=kinds[None], **grids)[0]
        return positions[:, 0]


class Qwen25VL(QwenVL):
    """Qwen2.5-VL, whose positions depend on the seconds between the frames of a video."""

    modalities = {
        "image": QwenVL.modalities["image"],
        "video": replace(QwenVL.modalities["video"], optional=("second_per_grid_ts",)),
    }


class QwenOmni(QwenVL):
    """The thinker of Qwen2.5-Omni, which takes audio too. The sound of a video is not taken from it."""

    modalities = {
        "image": QwenVL.modalities["image"],
        "video": Modality(
            values="pixel_values_videos",
            items=("video_grid_thw", "video_second_per_grid"),
            token="video_token_id",
            method="get_video_features",
        ),
        "audio": Modality(values="input_features", items=(MASK,), token="audio_token_id", method="get_audio_features"),
    }
    takes_outputs = False

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        if kind == "audio":
            return _audio_problem(media, MASK, self.config.audio_config.num_mel_bins, None, STEPS)
        if kind == "video" and (wrong := _wrong_shape("video_second_per_grid", media["video_second_per_grid"])):
            return None, wrong
        return super().problem(kind, media)

    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return [1] * len(media["input_features"]) if kind == "audio" else super().rows(kind, media)

    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return _audio_features(media[MASK], STEPS)[1].tolist() if kind == "audio" else super().features_of(kind, media)

    def patches(self, kind: Kind) -> float:
        return float(STEPS) if kind == "audio" else super().patches(kind)

    def parts(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return MediaFamily.parts(self, kind, media) if kind == "audio" else super().parts(kind, media)

    def attention(self, kind: Kind) -> tuple[tuple[int, int | None], ...]:
        if kind != "audio":
            return super().attention(kind)
        audio = self.config.audio_config
        # Steps attend to each other within chunks of frames, two frames to a step.
        return ((2 * audio.d_model, audio.n_window),) * audio.encoder_layers

    def arguments(self, kind: Kind, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in super().arguments(kind, media).items() if name != "video_second_per_grid"}

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        if kind == "audio":
            return _blank_audio(MASK, self.config.audio_config.num_mel_bins, 2 * STEPS, STEPS)
        blank = super().blank(kind)
        return blank if kind == "image" else {**blank, "video_second_per_grid": torch.ones(1)}

    def positions(self, base: PreTrainedModel, ids: Tensor, media: Mapping[Kind, Mapping[str, Tensor]]) -> Tensor:
        if "image" not in media and "video" not in media:
            return MediaFamily.positions(self, base, ids, media)
        fields = {name: value for one in media.values() for name, value in one.items()}
        any_base: Any = base
        positions: Tensor = any_base.get_rope_index(
            ids[None],
            image_grid_thw=fields.get("image_grid_thw"),
            video_grid_thw=fields.get("video_grid_thw"),
            attention_mask=torch.ones_like(ids)[None],
            audio_seqlens=fields[MASK].sum(-1) if "audio" in media else None,
            second_per_grids=fields.get("video_second_per_grid"),
        )[0]
        return positions[:, 0]


class QwenAudio(MediaFamily):
    """Qwen2-Audio, whose model has no method that encodes by itself."""

    modalities = {"audio": Modality(values="input_features", items=(MASK,), token="audio_token_id", method="")}
    takes_outputs = False
    steps: ClassVar[int] = STEPS
    """The steps of the encoder for each feature."""

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        return _audio_problem(media, self._mask, self.config.audio_config.num_mel_bins, self._frames, self.steps)

    @property
    def _mask(self) -> str:
        return self.modalities["audio"].items[0]

    @property
    def _frames(self) -> int:
        # The encoder takes one length alone.
        audio = self.config.audio_config
        return 2 * int(getattr(audio, "max_source_positions", None) or audio.max_position_embeddings)

    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return [1] * len(media["input_features"])

    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        features: list[int] = _audio_features(media[self._mask], self.steps)[1].tolist()
        return features

    def patches(self, kind: Kind) -> float:
        return float(self.steps)

    def padded(self, kind: Kind) -> int | None:
        return self._frames // 2 // self.steps

    def attention(self, kind: Kind) -> tuple[tuple[int, int | None], ...]:
        audio = self.config.audio_config
        width = getattr(audio, "d_model", None) or audio.hidden_size
        return ((2 * width, None),) * (getattr(audio, "encoder_layers", None) or audio.num_hidden_layers)

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        return _blank_audio(self._mask, self.config.audio_config.num_mel_bins, self._frames, self.steps)

    def encode(self, base: PreTrainedModel, kind: Kind, media: Mapping[str, Tensor]) -> Tensor:
        model: Any = base
        inputs = media["input_features"]
        convolved, counts = _audio_features(media[self._mask], self.steps)
        steps = torch.arange((inputs.shape[-1] - 2) // 2 + 1, device=inputs.device)
        mask = create_bidirectional_mask(
            config=model.audio_tower.config,
            inputs_embeds=inputs.new_zeros(len(inputs), len(steps), 1, dtype=model.dtype),
            attention_mask=(steps < convolved[:, None]).long(),
        )
        hidden = model.audio_tower(inputs, attention_mask=mask).last_hidden_state
        features: Tensor = model.multi_modal_projector(hidden)
        return features[torch.arange(features.shape[1], device=features.device) < counts[:, None]]


class GlmAsr(QwenAudio):
    """GLM-ASR, whose model has a method that encodes, and joins four steps to a feature. Padding takes part in its encoder's attention."""

    modalities = {
        "audio": Modality(
            values="input_features", items=("input_features_mask",), token="audio_token_id", method="get_audio_features"
        )
    }
    steps = 4
    encode = MediaFamily.encode


def _audio_features(mask: Tensor, joined: int) -> tuple[Tensor, Tensor]:
    """Return for each audio the number of steps behind the convolutions, and that of its features, of `joined` steps each."""
    steps = (mask.sum(-1) - 1) // 2 + 1
    return steps, (steps - joined) // joined + 1


def _audio_problem(
    media: Mapping[str, Tensor], name: str, bins: int, most: int | None, joined: int
) -> tuple[int | None, str] | None:
    """See `MediaFamily.problem`; `most` is the number of frames that the encoder takes, if it takes one alone."""
    values, mask = media["input_features"], media[name]
    frames = values.shape[-1] if most is None else most
    if wrong := _wrong_shape("input_features", values, bins, frames) or _wrong_shape(name, mask, frames):
        return None, wrong
    for item, count in enumerate(mask.sum(-1).tolist()):
        if count < 2 * joined:
            return item, f"{name} with {count} frames; an audio has at least {2 * joined}"
    return None


def _blank_audio(name: str, bins: int, frames: int, joined: int) -> dict[str, Tensor]:
    mask = (torch.arange(frames) < 2 * joined).long()[None]
    return {"input_features": torch.zeros(1, bins, frames), name: mask}


class Tiles(MediaFamily):
    """Families whose images are tiles of one size, each with the same number of features: InternVL."""

    modalities = {"image": Modality(values="pixel_values")}

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        wrong = _wrong_shape("pixel_values", media["pixel_values"], *self._tile)
        return None if wrong is None else (None, wrong)

    @property
    def _tile(self) -> tuple[int, ...]:
        vision = self.config.vision_config
        # One side of a square, or both sides.
        sides = (vision.image_size,) * 2 if isinstance(vision.image_size, int) else vision.image_size
        return (vision.num_channels, *sides)

    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return [1] * len(media[self.modalities[kind].values])

    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return [self._tile_features] * len(media[self.modalities[kind].values])

    def patches(self, kind: Kind) -> float:
        vision = self.config.vision_config
        sizes = (vision.image_size, vision.patch_size)
        image, patch = (size if isinstance(size, int) else size[0] for size in sizes)
        return (image // patch) ** 2 / self._tile_features

    @property
    def _tile_features(self) -> int:
        vision = self.config.vision_config
        patches = (vision.image_size[0] // vision.patch_size[0]) * (vision.image_size[1] // vision.patch_size[1])
        return int(patches * self.config.downsample_ratio**2)

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        return {"pixel_values": torch.zeros(1, *self._tile)}


class Gemma3(Tiles):
    """Gemma 3: images of one size."""

    attends_in_blocks = True

    @property
    def _tile_features(self) -> int:
        features: int = self.config.mm_tokens_per_image
        return features


class MaskedTiles(Tiles):
    """Families whose tiles may be padded, with a mask: Idefics 3, SmolVLM."""

    modalities = {"image": Modality(values="pixel_values", items=("pixel_attention_mask",))}

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        values = media["pixel_values"]
        if wrong := super().problem(kind, media):
            return wrong
        if shape := _wrong_shape("pixel_attention_mask", media["pixel_attention_mask"], *self._tile[1:]):
            return None, shape
        blank = [item for item, tile in enumerate(values) if not tile.any()]
        return (
            (blank[0], "pixel_values that are all zero, which the model takes for padding; leave the tile out")
            if blank
            else None
        )

    @property
    def _tile_features(self) -> int:
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2)

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        # Not zeros, which the family takes for padding and leaves out.
        return {"pixel_values": torch.ones(1, *self._tile), "pixel_attention_mask": torch.ones(1, *self._tile[1:]).long()}

    def arguments(self, kind: Kind, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # As one row of a batch, whose images these are.
        return {name: value[None] for name, value in super().arguments(kind, media).items()}


FAMILIES: Mapping[str, type[MediaFamily]] = {
    "gemma3": Gemma3,
    "glmasr": GlmAsr,
    "idefics3": MaskedTiles,
    "internvl": Tiles,
    "qwen2_5_omni_thinker": QwenOmni,
    "qwen2_5_vl": Qwen25VL,
    "qwen2_audio": QwenAudio,
    "qwen2_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "smolvlm": MaskedTiles,
}
"""The families that take media in, by the model type of their config. The tests compare each with plain transformers."""


def media_config(model: ModelConfig, text: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the whole model, with its encoders; None if its family takes no media here.

    Args:
        model: The model settings.
        text: The config of the decoder, with the changes that the settings make to it, which becomes a part of it.
    """
    config = whole_config(model)
    if config.model_type not in FAMILIES:
        return None
    setattr(config, decoder_key(config), copy.deepcopy(text))
    return config


def decoder_key(config: PreTrainedConfig) -> str:
    """Return the name under which a config has that of its decoder."""
    decoder = config.get_text_config()
    return next(key for key in config.sub_configs if getattr(config, key) is decoder)


def check_media_support(lm: PreTrainedModel) -> None:
    """Check that a model takes the output of its encoders.

    Raises:
        ModelError: It does not, in an older release of transformers.
    """
    base: Any = getattr(lm, lm.base_model_prefix)
    if (
        FAMILIES[base.config.model_type].takes_outputs
        and "mm_encoder_outputs" not in inspect.signature(type(base).forward).parameters
    ):
        import transformers

        raise ModelError(
            f"{type(lm).__name__} of transformers {transformers.__version__} does not take the outputs of its encoders; "
            "install transformers 5.23 or later"
        )
