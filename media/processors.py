"""Processing of images, video and audio into the inputs of a model's encoders, and the text that replaces their placeholders.

Images are processed by the PIL version of the model's image processor, audio by its feature extractor. Video processors of transformers
require torchvision, so video frames go through the image processor, with the sizes and the patch order of the family's video processor.

Axes: M rows of a field, T frames, C channels, N patches of a frame.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import transformers
import xxhash
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from ..engine.config import ModelConfig
from ..engine.errors import MediaError, ModelError
from ..engine.hf.media import FAMILIES
from ..engine.hf.media_family import MediaFamily
from ..engine.hf.model_path import quiet_hub, reason, resolve_folder
from ..engine.packing.batch import Kind
from .decode import MediaLimits, Video, decode_audio, decode_image, decode_video
from .sources import MediaSource

NOT_OF_MEDIA = ("text_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""The keys of a config that are unrelated to media."""
FORMAT = 1
"""The version of the results of this code; increment it when they change."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedMedia:
    """An image, video or audio, processed for a model.

    Args:
        kind: The kind.
        fields: The fields for a batch, with one or more rows each.
        text: The text in the prompt that replaces the placeholder from the chat template.
        tokens: The number of placeholder tokens, one per feature.
        parts: The number of parts; in the encoder, patches attend only within their part.
        size: The size before processing, for display.
    """

    kind: Kind
    fields: Mapping[str, Tensor]
    text: str
    tokens: int
    parts: int
    size: str


class MediaProcessor:
    """Processes media for one model.

    Args:
        model: The model settings.
        config: The config of the whole model.
        tokenizer: The model's tokenizer.
    """

    def __init__(self, model: ModelConfig, config: PreTrainedConfig, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.family: MediaFamily = FAMILIES[config.model_type](config)
        self.name: str = config.model_type
        self._keys: dict[Kind, str] = {}

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def token(self, kind: Kind) -> str:
        """Return the placeholder token that features replace."""
        return str(self._tokenizer.convert_ids_to_tokens(self.family.tokens[kind]))

    def placeholder(self, kind: Kind) -> str:
        """Return the text that a chat template writes for one item."""
        return self.token(kind)

    def expansion(self, kind: Kind, tokens: int, outputs: Mapping[str, Any]) -> str:
        """Return the text that replaces the placeholder of an item.

        Args:
            kind: The kind.
            tokens: The number of features.
            outputs: The output of the processor of the kind.
        """
        return self.token(kind) * tokens

    # ---- processing --------------------------------------------------------------------------------------------------

    def key(self, kind: Kind) -> str:
        """Return a digest of everything that the result of a kind depends on, except the content and the limits.

        Raises:
            ModelError: The model's folder has no processor for the kind.
        """
        if kind not in self._keys:
            # The encoders' config and the tokens determine the text of an item and the number of its features.
            config = {k: v for k, v in self.family.config.to_dict().items() if k not in NOT_OF_MEDIA}
            settings = [config, sorted(self._tokenizer.get_added_vocab().items()), self._processor(kind).to_json_string()]
            parts = [
                FORMAT,
                transformers.__version__,
                kind,
                self.token(kind),
                json.dumps(settings, sort_keys=True, default=str),
            ]
            # transformers' version is a part of it, because another version may process the same content differently.
            self._keys[kind] = xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())
        return self._keys[kind]

    def check(self, kind: Kind) -> None:
        """Check that the model takes a kind of media.

        Raises:
            MediaError: The model does not take it.
            ModelError: The model's folder has no processor for it.
        """
        if kind not in self.family.modalities:
            raise MediaError(f"the model ({self.name}) takes {' and '.join(self.family.modalities)}, but no {kind}")
        self._processor(kind)

    def process(self, source: MediaSource, limits: MediaLimits) -> ProcessedMedia:
        """Decode and process an image, video or audio.

        Args:
            source: The content.
            limits: The limits of decoding.

        Raises:
            MediaError: It cannot be decoded, is too large, or cannot be processed.
            ModelError: The model's folder has no processor for it.
        """
        self.check(source.kind)
        try:
            if source.kind == "image":
                image = decode_image(source, limits)
                outputs = {**self._image(image, limits), "size": f"{image.width} x {image.height} pixels"}
            elif source.kind == "video":
                outputs = self._video(source, limits)
            else:
                outputs = self._audio(source, limits)
        except (MediaError, ModelError):
            raise
        except ValueError as e:  # the processor rejects the size
            raise MediaError(f"the {source.kind} {source.name} cannot be processed: {e}") from e
        modality = self.family.modalities[source.kind]
        fields = {name: _tensor(outputs[name]) for name in (*modality.fields, *modality.optional) if name in outputs}
        if (problem := self.family.problem(source.kind, fields)) is not None:
            if problem[0] is not None:
                raise MediaError(f"the {source.kind} {source.name} has {problem[1]}")
            raise ModelError(f"model.path={self._model.path}: the processor's settings do not fit the model's: {problem[1]}")
        tokens = sum(self.family.features_of(source.kind, fields))
        text = self.expansion(source.kind, tokens, outputs)
        parts = sum(self.family.parts(source.kind, fields))
        return ProcessedMedia(kind=source.kind, fields=fields, text=text, tokens=tokens, parts=parts, size=outputs["size"])

    def _image(self, image: Any, limits: MediaLimits) -> dict[str, Any]:
        return dict(self._images(images=image, return_tensors="pt"))

    def _video(self, source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
        raise NotImplementedError

    def _audio(self, source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
        extractor = self._extractor
        rate = int(extractor.sampling_rate)
        samples = decode_audio(source, rate, limits, extractor.n_samples / rate)
        outputs = extractor(samples, sampling_rate=rate, return_attention_mask=True, padding="max_length", return_tensors="pt")
        return {
            "input_features": outputs["input_features"],
            self.family.modalities["audio"].items[0]: outputs["attention_mask"],
            "size": f"{len(samples) / rate:.3g} seconds",
        }

    # ---- the processors of the folder --------------------------------------------------------------------------------

    def _processor(self, kind: Kind) -> Any:
        return {"image": lambda: self._images, "video": lambda: self._videos, "audio": lambda: self._extractor}[kind]()

    @cached_property
    def _images(self) -> Any:
        # The version that does not need torchvision.
        return self._load(AutoImageProcessor, "image processor", backend="pil")

    @cached_property
    def _videos(self) -> Any:
        raise NotImplementedError

    def _video_settings(self) -> dict[str, Any]:
        """Return the settings of the model's video processor; empty if its folder has none."""
        folder = resolve_folder(self._model.path)
        # In the order of transformers: the last name is from before video processors existed.
        files = (
            ("processor_config.json", "video_processor"),
            ("video_preprocessor_config.json", None),
            ("preprocessor_config.json", None),
        )
        for name, key in files:
            try:
                content = json.loads((folder / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as e:
                raise ModelError(f"model.path={folder}: {name} cannot be read: {e}") from e
            settings = content if key is None else content.get(key)
            if settings is not None:
                return dict(settings)
        return {}

    @cached_property
    def _extractor(self) -> Any:
        return self._load(AutoFeatureExtractor, "feature extractor")

    def _load(self, auto: Any, what: str, **options: Any) -> Any:
        path = self._model.path
        try:
            with quiet_hub():
                return auto.from_pretrained(path, trust_remote_code=self._model.trust_remote_code, **options)
        except Exception as e:  # transformers may raise anything on a damaged file
            raise ModelError(
                f"model.path={path}: {reason(e, path, f'it has no usable {what}')}; copy the model's preprocessor_config.json or "
                "processor_config.json next to config.json"
            ) from e


def _tensor(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor.long()


class QwenProcessor(MediaProcessor):
    """Qwen's vision-language families, and the thinker of Qwen2.5-Omni."""

    video_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    """The default minimum and maximum number of pixels in a frame."""
    seconds_field: ClassVar[str] = ""
    """The field with the time between two patches of a video, in seconds."""

    @cached_property
    def _videos(self) -> Any:
        """An image processor with the settings of the model's video processor."""
        settings = self._video_settings()
        size = {**self.video_size, **(settings.pop("size", None) or {})}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            value = settings.pop(name, None)
            size[edge] = size[edge] if value is None else value
        names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor", "resample")
        chosen = {name: settings[name] for name in names if settings.get(name) is not None}
        return type(self._images)(**{**_shared(self._images, names), **chosen}, size=size)

    def _video(self, source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
        processor = self._videos

        def fit(count: int, width: int, height: int) -> tuple[int, int]:
            high, wide = self._frame_size(count, height, width, processor)
            return wide, high

        video = decode_video(source, limits, processor.temporal_patch_size, fit, processor.resample)
        frames = [*video.frames]
        # The last frame is repeated until the frames fill whole temporal patches.
        frames += [frames[-1]] * (-len(frames) % processor.temporal_patch_size)
        # The frames have been resized while they were decoded.
        outputs = processor(images=frames, do_resize=False, return_tensors="pt")
        patches, grid = patches_of_video(outputs["pixel_values"], outputs["image_grid_thw"], processor.temporal_patch_size)
        seconds = processor.temporal_patch_size / video.fps
        result = {
            "pixel_values_videos": patches,
            "video_grid_thw": grid,
            "times": self._times(video, processor.temporal_patch_size),
            "size": f"{len(video.frames)} frames of {video.width} x {video.height} pixels",
        }
        return {**result, self.seconds_field: torch.tensor([seconds])} if self.seconds_field else result

    def _frame_size(self, frames: int, height: int, width: int, processor: Any) -> tuple[int, int]:
        factor = processor.patch_size * processor.merge_size
        return smart_size(1, height, width, factor, processor.size["shortest_edge"], processor.size["longest_edge"])

    def _times(self, video: Video, merged: int) -> list[float]:
        """Return the time of each patch in seconds: the mean over its frames; the last frame may be repeated."""
        seconds = [*video.seconds, *[video.seconds[-1]] * (-len(video.seconds) % merged)]
        return [(seconds[i] + seconds[i + merged - 1]) / 2 for i in range(0, len(seconds), merged)]


def _shared(processor: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(processor, name) for name in names}


def patches_of_video(values: Tensor, grids: Tensor, merged: int) -> tuple[Tensor, Tensor]:
    """Return the patches of a video, given those of its frames as images.

    The patches of an image repeat the same pixels `merged` times, like a still video.

    Args:
        values: `[T N, C merged P P]`, the patches of the frames.
        grids: `[T, 3]`, the grid of each frame.
        merged: The number of frames in a patch.

    Returns:
        `[T / merged N, C merged P P]`, and the grid `[1, 3]`.
    """
    # All frames of a video have the same size, and so the same grid.
    frames, (_, high, wide) = len(grids), grids[0].tolist()
    width = values.shape[1] // merged
    channels = 3
    # `[T, N, C, P P]`, one of the equal copies of each frame's pixels.
    still = values.view(frames, high * wide, channels, merged, width // channels)[:, :, :, 0]
    # `[T / merged, N, C, merged, P P]`: the pixels of consecutive frames in place of the copies.
    moving = still.view(frames // merged, merged, high * wide, channels, width // channels).permute(0, 2, 3, 1, 4)
    return moving.reshape(-1, values.shape[1]).contiguous(), torch.tensor([[frames // merged, high, wide]])


def smart_size(frames: int, height: int, width: int, factor: int, least: int, most: int, merged: int = 1) -> tuple[int, int]:
    """Return the height and width that Qwen's processors resize to, as in transformers' `smart_resize` of Qwen2-VL and Qwen3-VL.

    Args:
        frames: The number of frames that the bounds apply to in total; 1 if they apply to each frame.
        height: The height.
        width: The width.
        factor: The result's height and width are multiples of this.
        least: The minimum number of pixels.
        most: The maximum number of pixels.
        merged: The number of frames is rounded to a multiple of this.

    Raises:
        MediaError: One side is more than 200 times as long as the other.
    """
    # transformers refuses these sizes, too.
    if max(height, width) / min(height, width) > 200:
        raise MediaError(
            f"a size of {width} x {height} pixels, with one side more than 200 times the other, which the model does not accept"
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    rounded = round(frames / merged) * merged
    if rounded * high * wide > most:
        # From the original sides, not the rounded ones, as transformers does; the sides are rounded down to stay within
        # the bound.
        scale = math.sqrt(frames * height * width / most)
        return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if rounded * high * wide < least:
        scale = math.sqrt(least / (frames * height * width))
        return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return high, wide


class Qwen25Processor(QwenProcessor):
    """Qwen2.5-VL, whose positions depend on the seconds of a video."""

    seconds_field = "second_per_grid_ts"


class QwenOmniProcessor(QwenProcessor):
    """The thinker of Qwen2.5-Omni, which takes audio of any length up to a bound."""

    seconds_field = "video_second_per_grid"

    def _audio(self, source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
        outputs = super()._audio(source, limits)
        # Keep only its frames: the rest is padding up to five minutes.
        frames = int(outputs["feature_attention_mask"].sum())
        return {
            **outputs,
            "input_features": outputs["input_features"][..., :frames],
            "feature_attention_mask": outputs["feature_attention_mask"][:, :frames],
        }


class Qwen3Processor(QwenProcessor):
    """Qwen3-VL, whose videos have a time stamp before each temporal patch, and bounds on the pixels of all frames together."""

    video_size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}

    @property
    def _borders(self) -> tuple[str, str]:
        ids = (getattr(self.family.config, f"vision_{side}_token_id") for side in ("start", "end"))
        start, end = (str(self._tokenizer.convert_ids_to_tokens(one)) for one in ids)
        return start, end

    def placeholder(self, kind: Kind) -> str:
        """See `MediaProcessor.placeholder`. Each temporal patch of a video has its own border tokens."""
        start, end = self._borders if kind == "video" else ("", "")
        return f"{start}{self.token(kind)}{end}"

    def _frame_size(self, frames: int, height: int, width: int, processor: Any) -> tuple[int, int]:
        factor = processor.patch_size * processor.merge_size
        # A side shorter than one merged patch could be rounded to 0.
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        merged = processor.temporal_patch_size
        frames = max(frames, merged)
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        return smart_size(frames, height, width, factor, least, most, merged)

    def expansion(self, kind: Kind, tokens: int, outputs: Mapping[str, Any]) -> str:
        """See `MediaProcessor.expansion`."""
        if kind != "video":
            return super().expansion(kind, tokens, outputs)
        (start, end), times = self._borders, outputs["times"]
        frame = f"{start}{self.token(kind) * (tokens // len(times))}{end}"
        return "".join(f"<{time:.1f} seconds>{frame}" for time in times)


class AudioProcessor(MediaProcessor):
    """Qwen2-Audio, GLM-ASR."""


class InternVLProcessor(MediaProcessor):
    """InternVL: images in tiles."""

    def _image(self, image: Any, limits: MediaLimits) -> dict[str, Any]:
        return dict(self._images(images=image, crop_to_patches=True, return_tensors="pt"))

    def expansion(self, kind: Kind, tokens: int, outputs: Mapping[str, Any]) -> str:
        """See `MediaProcessor.expansion`."""
        start, end = (
            getattr(self._tokenizer, name, None) or default
            for name, default in (("start_image_token", "<img>"), ("end_image_token", "</img>"))
        )
        return f"{start}{super().expansion(kind, tokens, outputs)}{end}"


class Gemma3Processor(MediaProcessor):
    """Gemma 3: an image, and crops of it if the settings enable them."""

    def placeholder(self, kind: Kind) -> str:
        """See `MediaProcessor.placeholder`."""
        return str(self._tokenizer.convert_ids_to_tokens(self.family.config.boi_token_index))

    def expansion(self, kind: Kind, tokens: int, outputs: Mapping[str, Any]) -> str:
        """See `MediaProcessor.expansion`."""
        count = len(outputs["pixel_values"])
        end = self._tokenizer.convert_ids_to_tokens(self.family.config.eoi_token_index)
        one = f"\n\n{self.placeholder(kind)}{self.token(kind) * (tokens // count)}{end}\n\n"
        if count == 1:
            return one
        return (
            f"Here is the original image {one} and here are some crops to help you see better {' '.join([one] * (count - 1))}"
        )


class Gemma4Processor(MediaProcessor):
    """Gemma 4: images and video frames scaled to a maximum number of patches, and audio."""

    video_tokens: ClassVar[int] = 70
    """The default maximum number of features in a frame."""
    budgets: ClassVar[tuple[int, ...]] = (70, 140, 280, 560, 1120)
    """The maximum numbers of features per image that its processors accept."""
    audio_samples: ClassVar[int] = 480_000
    """The number of audio samples after which its feature extractor truncates."""

    def _budget(self, processor: Any, limits: MediaLimits) -> int:
        """Return the maximum number of features of an image. Images are scaled up to it, so a limit on pixels limits features."""
        most = int(processor.max_soft_tokens)
        if limits.max_pixels is None:
            return most
        fitting = limits.max_pixels // (processor.patch_size * processor.pooling_kernel_size) ** 2
        return max((budget for budget in self.budgets if budget <= min(most, fitting)), default=self.budgets[0])

    def _image(self, image: Any, limits: MediaLimits) -> dict[str, Any]:
        return dict(self._images(images=image, max_soft_tokens=self._budget(self._images, limits), return_tensors="pt"))

    def _borders(self, kind: Kind) -> tuple[str, str]:
        names = ("boa_token_id", "eoa_token_index") if kind == "audio" else ("boi_token_id", "eoi_token_id")
        start, end = (str(self._tokenizer.convert_ids_to_tokens(getattr(self.family.config, name))) for name in names)
        return start, end

    def expansion(self, kind: Kind, tokens: int, outputs: Mapping[str, Any]) -> str:
        """See `MediaProcessor.expansion`. Each frame of a video has its own border tokens, preceded by its time."""
        start, end = self._borders(kind)
        if kind != "video":
            return f"{start}{super().expansion(kind, tokens, outputs)}{end}"
        times = outputs["times"]
        frame = f"{start}{self.token(kind) * (tokens // len(times))}{end}"
        return " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {frame}" for time in times)

    @cached_property
    def _videos(self) -> Any:
        """An image processor with the settings of the model's video processor."""
        settings = self._video_settings()
        names = ("patch_size", "pooling_kernel_size", "rescale_factor", "resample")
        others = ("max_soft_tokens", "do_normalize", "image_mean", "image_std")
        chosen = {name: settings[name] for name in (*names, *others) if settings.get(name) is not None}
        return type(self._images)(**{**_shared(self._images, names), "max_soft_tokens": self.video_tokens, **chosen})

    def _video(self, source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
        processor = self._videos
        budget = self._budget(processor, limits)

        def fit(count: int, width: int, height: int) -> tuple[int, int]:
            side = processor.pooling_kernel_size
            patches = budget * side**2
            high, wide = get_aspect_ratio_preserving_size(height, width, processor.patch_size, patches, side)
            return wide, high

        video = decode_video(source, limits, 1, fit, processor.resample)
        outputs = processor(images=video.frames, do_resize=False, max_soft_tokens=budget, return_tensors="pt")
        return {
            "pixel_values_videos": outputs["pixel_values"],
            "video_position_ids": outputs["image_position_ids"],
            "times": video.seconds,
            "size": f"{len(video.frames)} frames of {video.width} x {video.height} pixels",
        }

    def _audio(self, source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
        extractor = self._extractor
        rate = int(extractor.sampling_rate)
        samples = decode_audio(source, rate, limits, self.audio_samples / rate)
        # Passed as a batch, because transformers 5.23 pads the wrong axis of a single item.
        outputs = extractor([samples], sampling_rate=rate, max_length=self.audio_samples, return_tensors="pt")
        # Keep only its frames: the rest is padding up to a multiple of some samples.
        frames = int(outputs["input_features_mask"].sum())
        fields = {name: outputs[name][:, :frames] for name in ("input_features", "input_features_mask")}
        return {**fields, "size": f"{len(samples) / rate:.3g} seconds"}


class IdeficsProcessor(MediaProcessor):
    """Idefics 3 and SmolVLM: an image in tiles with their row and column, followed by the whole image."""

    def _image(self, image: Any, limits: MediaLimits) -> dict[str, Any]:
        outputs = dict(self._images(images=image, return_row_col_info=True, return_tensors="pt"))
        return {
            **outputs,
            # Drop the batch axis of size 1.
            "pixel_values": outputs["pixel_values"][0],
            "pixel_attention_mask": outputs["pixel_attention_mask"][0],
        }

    def expansion(self, kind: Kind, tokens: int, outputs: Mapping[str, Any]) -> str:
        """See `MediaProcessor.expansion`."""
        border, whole = "<fake_token_around_image>", "<global-img>"
        features = self.token(kind) * (tokens // len(outputs["pixel_values"]))
        rows, columns = (int(outputs[name][0][0]) for name in ("rows", "cols"))
        lines = ["".join(f"{border}<row_{i + 1}_col_{j + 1}>{features}" for j in range(columns)) + "\n" for i in range(rows)]
        return "".join([*lines, "\n" if rows else "", border, whole, features, border])


PROCESSORS: Mapping[str, type[MediaProcessor]] = {
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
    "glmasr": AudioProcessor,
    "idefics3": IdeficsProcessor,
    "internvl": InternVLProcessor,
    "qwen2_5_omni_thinker": QwenOmniProcessor,
    "qwen2_5_vl": Qwen25Processor,
    "qwen2_audio": AudioProcessor,
    "qwen2_vl": QwenProcessor,
    "qwen3_5": Qwen3Processor,
    "qwen3_5_moe": Qwen3Processor,
    "qwen3_vl": Qwen3Processor,
    "qwen3_vl_moe": Qwen3Processor,
    "smolvlm": IdeficsProcessor,
}
"""The processor of each family of `engine.hf.media.FAMILIES`."""
