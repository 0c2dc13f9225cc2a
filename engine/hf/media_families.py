"""The families that take media, grouped by the inputs of their encoders.

Axes: M rows of a media field, P patches of an image.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from ..packing.batch import Kind
from .media_family import MediaFamily, Modality, wrong_shape

MASK = "feature_attention_mask"
"""The field of Qwen's audio that marks the frames that are not padding."""
STEPS = 2
"""The number of encoder steps per feature in Qwen's audio encoders."""


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

    @property
    def deepstack_layers(self) -> int:
        return len(getattr(self.config.vision_config, "deepstack_visual_indexes", None) or ())

    def encoded(self, features: Tensor) -> Any:
        output = super().encoded(features)
        # A list with a tensor for each item.
        output.pooler_output = [output.pooler_output]
        return output

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        modality, merge = self.modalities[kind], self.config.vision_config.spatial_merge_size
        values, grids = media[modality.values], media[modality.items[0]]
        if wrong := wrong_shape(modality.values, values, self._patch) or wrong_shape(modality.items[0], grids, 3):
            return None, wrong
        if grids.is_floating_point():
            return None, f"{modality.items[0]} is {grids.dtype}; it must have an integer dtype"
        for item, grid in enumerate(grids.tolist()):
            if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                return (
                    item,
                    f"{modality.items[0]} {grid}; time, height and width must be at least 1, and height and width multiples of {merge}",
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
        # transformers' numbers of kinds in `mm_token_type_ids`; 0 is text.
        numbers: dict[Kind, int] = {"image": 1, "video": 2}
        for kind, number in numbers.items():
            if kind in media:
                modality = self.modalities[kind]
                kinds[ids == self.tokens[kind]] = number
                grids |= {name: media[kind][name] for name in (*modality.items, *modality.optional) if name in media[kind]}
        any_base: Any = base
        positions: Tensor = any_base.get_rope_index(ids[None], mm_token_type_ids=kinds[None], **grids)[0]
        # The document is the only row.
        return positions[:, 0]


class Qwen25VL(QwenVL):
    """Qwen2.5-VL, whose positions depend on the seconds between the frames of a video."""

    modalities = {
        "image": QwenVL.modalities["image"],
        "video": replace(QwenVL.modalities["video"], optional=("second_per_grid_ts",)),
    }


class QwenOmni(QwenVL):
    """The thinker of Qwen2.5-Omni, which also takes audio. The audio track of a video is not used."""

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

    @property
    def reserved_tokens(self) -> tuple[int, ...]:
        # Positions are computed from the tokens before an item.
        return (*super().reserved_tokens, self.config.vision_start_token_id, self.config.audio_start_token_id)

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        if kind == "audio":
            return _audio_problem(media, MASK, self.config.audio_config.num_mel_bins, None, STEPS)
        if kind == "video" and (wrong := wrong_shape("video_second_per_grid", media["video_second_per_grid"])):
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
        # Steps attend to each other within chunks of frames; a step has two frames.
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
    """Qwen2-Audio, whose model has no separate method to encode."""

    modalities = {"audio": Modality(values="input_features", items=(MASK,), token="audio_token_id", method="")}
    takes_outputs = False
    steps: ClassVar[int] = STEPS
    """The number of encoder steps per feature."""

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        return _audio_problem(media, self._mask, self.config.audio_config.num_mel_bins, self._frames, self.steps)

    @property
    def _mask(self) -> str:
        return self.modalities["audio"].items[0]

    @property
    def _frames(self) -> int:
        # The encoder supports only one length.
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
        # Steps of real frames must not attend to those of padding.
        mask = create_bidirectional_mask(
            config=model.audio_tower.config,
            inputs_embeds=inputs.new_zeros(len(inputs), len(steps), 1, dtype=model.dtype),
            attention_mask=(steps < convolved[:, None]).long(),
        )
        hidden = model.audio_tower(inputs, attention_mask=mask).last_hidden_state
        features: Tensor = model.multi_modal_projector(hidden)
        # Features of padding at the end of each audio are left out.
        return features[torch.arange(features.shape[1], device=features.device) < counts[:, None]]


class GlmAsr(QwenAudio):
    """GLM-ASR, whose model has a method to encode, and joins four steps into a feature. Its encoder attends to padding."""

    modalities = {
        "audio": Modality(
            values="input_features", items=("input_features_mask",), token="audio_token_id", method="get_audio_features"
        )
    }
    steps = 4
    encode = MediaFamily.encode


def _audio_features(mask: Tensor, joined: int) -> tuple[Tensor, Tensor]:
    """Return two counts for each audio: its steps after the convolutions, and its features, of `joined` steps each."""
    # The second convolution has a stride of 2 and pads both sides by one; then `joined` steps become a feature.
    steps = (mask.sum(-1) - 1) // 2 + 1
    return steps, (steps - joined) // joined + 1


def _audio_problem(
    media: Mapping[str, Tensor], name: str, bins: int, most: int | None, joined: int
) -> tuple[int | None, str] | None:
    """See `MediaFamily.problem`; `most` is the encoder's number of frames, if it supports only one."""
    values, mask = media["input_features"], media[name]
    frames = values.shape[-1] if most is None else most
    if wrong := wrong_shape("input_features", values, bins, frames) or wrong_shape(name, mask, frames):
        return None, wrong
    for item, count in enumerate(mask.sum(-1).tolist()):
        if count < 2 * joined:
            return item, f"{name} with {count} frames; an audio needs at least {2 * joined}"
    return None


def _blank_audio(name: str, bins: int, frames: int, joined: int) -> dict[str, Tensor]:
    mask = (torch.arange(frames) < 2 * joined).long()[None]
    return {"input_features": torch.zeros(1, bins, frames), name: mask}


class Tiles(MediaFamily):
    """Families whose images are tiles of one size, each with the same number of features: InternVL."""

    modalities = {"image": Modality(values="pixel_values")}

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        wrong = wrong_shape("pixel_values", media["pixel_values"], *self._tile)
        return None if wrong is None else (None, wrong)

    @property
    def _tile(self) -> tuple[int, ...]:
        vision = self.config.vision_config
        # The config gives one side of a square, or both sides.
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

    block_kinds = ("image",)

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
        if shape := wrong_shape("pixel_attention_mask", media["pixel_attention_mask"], *self._tile[1:]):
            return None, shape
        blank = [item for item, tile in enumerate(values) if not tile.any()]
        return (
            (blank[0], "pixel_values that are all zero, which the model treats as padding; leave the tile out")
            if blank
            else None
        )

    @property
    def _tile_features(self) -> int:
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2)

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        # Not zeros, because the family treats all-zero tiles as padding and drops them.
        return {"pixel_values": torch.ones(1, *self._tile), "pixel_attention_mask": torch.ones(1, *self._tile[1:]).long()}

    def arguments(self, kind: Kind, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # As the images of a single row of a batch.
        return {name: value[None] for name, value in super().arguments(kind, media).items()}


class Gemma4(MediaFamily):
    """Gemma 4: images and frames of videos as patches with their positions, and audio. Some sizes have no audio encoder.

    The patches of an image are followed by padding patches with position -1. Each frame of a video is an item.
    """

    modalities = {
        "image": Modality(values="pixel_values", items=("image_position_ids",)),
        "video": Modality(
            values="pixel_values_videos",
            items=("video_position_ids",),
            token="video_token_id",
            method="get_video_features",
        ),
        "audio": Modality(
            values="input_features", items=("input_features_mask",), token="audio_token_id", method="get_audio_features"
        ),
    }
    # Not the tokens of audio.
    takes_outputs = False
    blocks_in_windows = True

    def __init__(self, config: PreTrainedConfig) -> None:
        encoders = {
            "image": config.vision_config,
            "video": config.vision_config,
            "audio": config.audio_config,
        }
        self.modalities = {kind: m for kind, m in self.modalities.items() if encoders[kind] is not None}
        super().__init__(config)
        if self.config.get_text_config().use_bidirectional_attention == "vision":
            self.block_kinds = tuple(kind for kind in self.modalities if kind != "audio")

    def problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        return self._audio_problem(media) if kind == "audio" else self._image_problem(kind, media)

    def _names(self, kind: Kind) -> tuple[str, str]:
        """Return the names of the encoder's input, and of the positions or the mask that come with it."""
        modality = self.modalities[kind]
        return modality.values, modality.items[0]

    def _audio_problem(self, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        name, mask_name = self._names("audio")
        values, mask = media[name], media[mask_name]
        frames = values.shape[1] if values.dim() > 1 else 0
        # The convolutions expect as many bins as the first one has channels.
        bins = self.config.audio_config.subsampling_conv_channels[0]
        if wrong := wrong_shape(name, values, frames, bins) or wrong_shape(mask_name, mask, frames):
            return None, wrong
        counts = mask.long().sum(-1)
        if (short := (counts == 0).nonzero()).numel():
            return int(short[0]), f"{mask_name} without a frame; the audio is too short"
        mixed = (mask.bool() != (torch.arange(frames, device=mask.device) < counts[:, None])).any(-1).nonzero()
        return (int(mixed[0]), f"{mask_name} with padding before frames") if mixed.numel() else None

    def _image_problem(self, kind: Kind, media: Mapping[str, Tensor]) -> tuple[int | None, str] | None:
        name, positions_name = self._names(kind)
        values, positions = media[name], media[positions_name]
        vision = self.config.vision_config
        side, patches = vision.pooling_kernel_size, values.shape[1] if values.dim() > 1 else 0
        sizes = (patches, 3 * vision.patch_size**2)
        if wrong := wrong_shape(name, values, *sizes) or wrong_shape(positions_name, positions, patches, 2):
            return None, wrong
        if positions.is_floating_point() or not positions.dtype.is_signed:
            return None, f"{positions_name} is {positions.dtype}; it must have a signed integer dtype"
        if not patches or patches % side**2:
            return None, f"{name} has {patches} patches for each image; they must be a multiple of {side**2}"
        # The sides of each image's grid follow from its largest positions. Its patches must then be numbered row by
        # row, with -1 for padding at the end.
        counts = _patches(positions)
        wide, high = ((positions[..., axis].max(-1).values.long() + 1).clamp_min(1) for axis in (0, 1))
        number = torch.arange(patches, device=positions.device)
        grid = torch.stack([number % wide[:, None], number // wide[:, None]], -1)
        expected = torch.where((number < counts[:, None])[..., None], grid, -1)
        bad = (positions != expected).flatten(1).any(-1) | (counts != wide * high) | (wide % side != 0) | (high % side != 0)
        if bad.any():
            return (
                int(bad.nonzero()[0]),
                f"{positions_name} that are not a grid in row-major order with sides that are multiples of {side}, followed by -1",
            )
        most = vision.position_embedding_size
        beyond = (torch.maximum(wide, high) > most).nonzero()
        return (int(beyond[0]), f"{positions_name} beyond the {most} that the encoder has") if beyond.numel() else None

    def rows(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        return [1] * len(media[self.modalities[kind].values])

    def features_of(self, kind: Kind, media: Mapping[str, Tensor]) -> list[int]:
        beside = media[self.modalities[kind].items[0]]
        if kind == "audio":
            # Two convolutions with stride 2.
            counts = beside[:, ::2][:, ::2].long().sum(-1)
        else:
            counts = _patches(beside) // self.config.vision_config.pooling_kernel_size**2
        features: list[int] = counts.tolist()
        return features

    def trimmed(self, kind: Kind, media: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        beside = media[self.modalities[kind].items[0]]
        longest = int((beside.long().sum(-1) if kind == "audio" else _patches(beside)).max())
        return {name: value[:, :longest] for name, value in media.items()}

    def patches(self, kind: Kind) -> float:
        return 1.0 if kind == "audio" else float(self.config.vision_config.pooling_kernel_size**2)

    def attention(self, kind: Kind) -> tuple[tuple[int, int | None], ...]:
        if kind != "audio":
            vision = self.config.vision_config
            return ((2 * vision.num_attention_heads * vision.head_dim, None),) * vision.num_hidden_layers
        audio = self.config.audio_config
        # Each chunk attends to itself and to its context on both sides.
        window = audio.attention_chunk_size + audio.attention_context_left - 1 + audio.attention_context_right
        return ((2 * audio.hidden_size, window),) * audio.num_hidden_layers

    def blank(self, kind: Kind) -> dict[str, Tensor]:
        values, beside = self._names(kind)
        if kind == "audio":
            bins = self.config.audio_config.subsampling_conv_channels[0]
            return {values: torch.zeros(1, 4, bins), beside: torch.ones(1, 4, dtype=torch.long)}
        vision = self.config.vision_config
        side = torch.arange(vision.pooling_kernel_size)
        positions = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(1, -1, 2)
        return {values: torch.zeros(1, positions.shape[1], 3 * vision.patch_size**2), beside: positions}

    def arguments(self, kind: Kind, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arguments = super().arguments(kind, media)
        if kind != "audio":
            arguments[self._names(kind)[1]] = arguments[self._names(kind)[1]].long()
        if kind == "video":
            # Pass everything as one video: the model splits the result by video, and it is joined again here.
            arguments["num_frames_per_video"] = torch.tensor([len(media["pixel_values_videos"])])
        return arguments

    def encode(self, base: PreTrainedModel, kind: Kind, media: Mapping[str, Tensor]) -> Tensor:
        if kind != "audio":
            return super().encode(base, kind, media)
        model: Any = base
        output = model.get_audio_features(media["input_features"], media["input_features_mask"].bool(), return_dict=True)
        features: Tensor = output.pooler_output
        return features[output.attention_mask]

    def text_ids(self, ids: Tensor) -> Tensor:
        # The model treats these ids as padding, regardless of its encoders.
        special = (self.config.image_token_id, self.config.video_token_id, self.config.audio_token_id)
        is_media = torch.stack([ids == token for token in special if token is not None]).any(0)
        return ids.masked_fill(is_media, self.config.get_text_config().pad_token_id)

    def decoder_arguments(self, base: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
        text: Any = self.config.get_text_config()
        decoder: Any = base.get_decoder()
        return {"per_layer_inputs": decoder.get_per_layer_inputs(ids[None], None)} if text.hidden_size_per_layer_input else {}


def _patches(positions: Tensor) -> Tensor:
    """Return the number of patches of each image that are not padding, given their positions `[M, P, 2]`."""
    return (positions != -1).all(-1).sum(-1)
