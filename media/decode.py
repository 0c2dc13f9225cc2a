"""Decoding of images, video and audio. Sizes are checked before anything is decoded.

Axes: T frames, H height, W width, N samples of audio.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ..engine.errors import ConfigError, MediaError, install_command
from .sources import MediaSource

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
MOST_PIXELS = 64 * 2**20
"""The maximum number of pixels in an image or a frame, regardless of the settings. A small file may claim to have many more."""
MOST_SECONDS = 24 * 3600
"""The maximum duration of video or audio in seconds, regardless of the settings."""

TooLarge = Literal["resize", "error", "skip"]
Fit = Callable[[int, int, int], tuple[int, int]]


class TooLargeError(MediaError):
    """An image, a video or audio exceeds the limits, and the settings do not allow resizing it."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """The limits of decoding, and the sampling of frames.

    Args:
        max_pixels: The maximum number of pixels in an image or a frame; None leaves the size to the model's processor.
        max_frames: The maximum number of frames in a video.
        fps: The number of frames per second to use from a video, up to `max_frames` in total.
        max_seconds: The maximum duration of audio in seconds; None for the limit of the model's encoder.
        too_large: The handling of larger media. `resize`: use fewer pixels, fewer frames per second, or the first seconds. Otherwise raise
            an error.
    """

    max_pixels: int | None = None
    max_frames: int = 64
    fps: float = 2.0
    max_seconds: float | None = None
    too_large: TooLarge = "resize"


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """Frames of a video.

    Args:
        frames: The images, T of them.
        seconds: The time of each frame in seconds from the beginning, `[T]`.
        fps: The number of these frames per second.
        width: The width of the video, before its frames were resized.
        height: The height of the video, before its frames were resized.
    """

    frames: list[Image.Image]
    seconds: list[float]
    fps: float
    width: int
    height: int


def decode_image(source: MediaSource, limits: MediaLimits) -> Image.Image:
    """Return an image in RGB, rotated according to its metadata.

    Args:
        source: The content of the image.
        limits: The limits.

    Raises:
        TooLargeError: The image has too many pixels.
        MediaError: The image is damaged, or its format is not supported.
    """
    with _damage(source), warnings.catch_warnings():
        # PIL warns about unusually large images; we have our own limits.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image: Image.Image = Image.open(io.BytesIO(source.content), formats=FORMATS)
        # `Image.open` reads only the header, so the size is known before any pixel is decoded.
        width, height = image.size
        if width < 1 or height < 1:
            raise MediaError(f"the image {source.name} has {width} x {height} pixels")
        if width * height > MOST_PIXELS:
            raise MediaError(f"the image {source.name} has {width} x {height} pixels; at most {MOST_PIXELS} are decoded")
        # Before `load`, so that an image that is refused is not decoded either.
        small = _smaller(source, width, height, limits)
        image.load()
        # Cameras store the sensor's image with an EXIF field for its rotation, which the models' processors ignore.
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "I;16", "I;16B", "F"):
            image = _eight_bits(image)
        image = image.convert("RGB")
        # The rotation may have exchanged the sides.
        return (
            image
            if small is None
            else image.resize(small if image.size == (width, height) else small[::-1], Image.Resampling.BICUBIC)
        )


def image_size(content: bytes) -> tuple[int, int] | None:
    """Return the width and height of an image in pixels, of which only the header is read; None if it is not an image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            size: tuple[int, int] = Image.open(io.BytesIO(content), formats=FORMATS).size
    # PIL raises many kinds of errors on damaged files; `decode_image` reports what is wrong with one.
    except Exception:
        return None
    return size


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale an image of 16 bits or floating point to 8 bits; PIL would clip it instead."""
    values = np.asarray(image, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("its pixels are not finite")
    if image.mode.startswith("I;16"):
        most = 65535.0
    else:
        # For 32 bits or floating point, the range of values is not given in the file.
        most = 1.0 if image.mode == "F" and values.max() <= 1 else 65535.0 if values.max() > 255 else 255.0
    return Image.fromarray(np.clip(values / most * 255, 0, 255).round().astype(np.uint8))


def _smaller(source: MediaSource, width: int, height: int, limits: MediaLimits) -> tuple[int, int] | None:
    """Return the size to resize an image or a frame to; None if it is small enough."""
    if limits.max_pixels is None or width * height <= limits.max_pixels:
        return None
    _refuse(source, f"{width} x {height} pixels", f"data.max_pixels={limits.max_pixels}", limits)
    scale = math.sqrt(limits.max_pixels / (width * height))
    # Not more pixels than allowed, even if one side is very short.
    short = max(1, int(min(width, height) * scale))
    long = max(1, min(int(max(width, height) * scale), limits.max_pixels // short))
    return (long, short) if width >= height else (short, long)


def _refuse(source: MediaSource, size: str, limit: str, limits: MediaLimits) -> None:
    if limits.too_large != "resize":
        raise TooLargeError(
            f"the {source.kind} {source.name} has {size}, more than {limit}; raise it, or set data.too_large=resize"
        )


@contextmanager
def _damage(source: MediaSource) -> Iterator[None]:
    try:
        yield
    except (MediaError, MemoryError, ConfigError):
        # MediaError has its message already. The others are not damage: too little memory, or a package that is not
        # installed.
        raise
    except UnidentifiedImageError as e:
        # PIL's own message has the address of a buffer.
        formats = ", ".join(FORMATS)
        raise MediaError(
            f"the {source.kind} {source.name} is not an image of a known format ({formats}), or is damaged"
        ) from e
    except Image.DecompressionBombError as e:
        raise MediaError(f"the {source.kind} {source.name} is too large; at most {MOST_PIXELS} pixels are decoded") from e
    except Exception as e:  # decoders raise anything on a damaged file
        raise MediaError(f"the {source.kind} {source.name} cannot be decoded: {type(e).__name__}: {e}") from e


CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf,gif,ogg,wav,w64,aiff,mp3,flac,aac,caf,amr,au"
"""The formats of files with video or audio. Other formats, such as playlists, make the decoder open further files."""


def _av() -> Any:
    try:
        import av
    except ImportError as e:
        raise ConfigError(
            f"video and audio need PyAV; install it with: {install_command('vision')}, or with the extra audio"
        ) from e
    return av


def _open(source: MediaSource) -> Any:
    whitelists = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    return _av().open(io.BytesIO(source.content), mode="r", metadata_errors="ignore", container_options=whitelists)


def frame_indices(duration: float, count: int, limits: MediaLimits, multiple: int) -> list[int]:
    """Return the indices of the frames to use from a video: evenly spaced, `fps` per second.

    Args:
        duration: The duration of the video in seconds.
        count: The number of frames in the video.
        limits: The limits.
        multiple: The number of frames is made a multiple of this if the video has enough: the frames per patch of the encoder.
    """
    most = max(1, min(limits.max_frames, count))
    number = max(1, min(round(duration * limits.fps), most))
    if number >= multiple:
        # Rounded down, so that the maximum still holds.
        number = number // multiple * multiple
    elif most >= multiple:
        number = multiple
    # The first frame of each of `number` equal stretches.
    return [int(i * count / number) for i in range(number)]


def decode_video(
    source: MediaSource,
    limits: MediaLimits,
    multiple: int = 1,
    fit: Fit | None = None,
    resample: int = Image.Resampling.BICUBIC,
) -> Video:
    """Return the sampled frames of a video, rotated according to its metadata; see `frame_indices`.

    Args:
        source: The content of the video.
        limits: The limits.
        multiple: The number of frames is made a multiple of this if the video has enough.
        fit: Returns the width and height to resize frames to, given their number, width and height. Each frame is resized when it is
            decoded, so no frame is kept at full size.
        resample: PIL's resampling filter.

    Raises:
        TooLargeError: The video has too many pixels or frames.
        MediaError: The video is damaged, or has no frames.
    """
    with _damage(source), _open(source) as container:
        stream = next(iter(container.streams.video), None)
        if stream is None:
            raise MediaError(f"the video {source.name} has no video stream")
        width, height = stream.codec_context.width, stream.codec_context.height
        if not 0 < width * height <= MOST_PIXELS:
            raise MediaError(f"the video {source.name} has {width} x {height} pixels; 1 to {MOST_PIXELS} are decoded")
        small = _smaller(source, width, height, limits)
        # Some containers give no rate; 24 frames a second is then a guess.
        rate = float(stream.average_rate or stream.guessed_rate or 0) or 24.0
        seconds = _seconds(source, container, stream)
        # From the cheapest source to the most expensive one: counting reads the whole file.
        count = stream.frames or (round(seconds * rate) if seconds else 0) or _count(container, source)
        seconds = seconds or count / rate
        if seconds * limits.fps > limits.max_frames:
            frames = f"{seconds:g} seconds, {round(seconds * limits.fps)} frames at data.fps={limits.fps:g}"
            _refuse(source, frames, f"data.max_frames={limits.max_frames}", limits)
        chosen = frame_indices(seconds, count, limits, multiple)
        images: list[Image.Image] = []
        last: Any = None
        stream.thread_type = "AUTO"
        # Counting may have read the file to its end.
        container.seek(0)

        # Resized as soon as it is decoded: all frames of a video at full size would need far more memory.
        def picture(frame: Any) -> Image.Image:
            image: Image.Image = frame.to_image()
            if small is not None:
                image = image.resize(small, Image.Resampling.BICUBIC)
            if rotation := getattr(frame, "rotation", 0):
                image = image.rotate(rotation, expand=True)
            return image if fit is None else image.resize(fit(len(chosen), *image.size), resample)

        for number, frame in enumerate(container.decode(stream)):
            last = frame
            while len(images) < len(chosen) and number == chosen[len(images)]:
                images.append(picture(frame))
            if len(images) == len(chosen):
                break
        if last is None:
            raise MediaError(f"the video {source.name} has no frames")
        # A file may have fewer frames than it claims to have.
        images += [picture(last)] * (len(chosen) - len(images))
    return Video(frames=images, seconds=[i / rate for i in chosen], fps=len(chosen) / seconds, width=width, height=height)


def _seconds(source: MediaSource, container: Any, stream: Any) -> float:
    """Return the duration in seconds from a file's metadata; 0 if it is not given."""
    seconds = (
        float(stream.duration * stream.time_base) if stream.duration else float(Fraction(container.duration or 0, 1_000_000))
    )
    if seconds > MOST_SECONDS:
        raise MediaError(f"the {source.kind} {source.name} has {seconds:g} seconds; at most {MOST_SECONDS} are decoded")
    return max(seconds, 0.0)


def _count(container: Any, source: MediaSource) -> int:
    """Count the frames of a file whose metadata do not give their number."""
    count = sum(1 for packet in container.demux(video=0) if packet.size)
    if not count:
        raise MediaError(f"the video {source.name} has no frames")
    return count


def decode_audio(source: MediaSource, rate: int, limits: MediaLimits, most: float | None) -> NDArray[np.float32]:
    """Return the samples of audio, `[N]` float32, mixed to one channel.

    Args:
        source: The content of the audio.
        rate: The sample rate of the model in Hz.
        limits: The limits.
        most: The maximum duration in seconds for the model's encoder; None if it has no limit.

    Raises:
        TooLargeError: The audio is too long.
        MediaError: The audio is damaged, or has no sound.
    """
    bound = min((value for value in (limits.max_seconds, most) if value is not None), default=float(MOST_SECONDS))
    setting = (
        f"data.max_seconds={limits.max_seconds:g}"
        if bound == limits.max_seconds
        else f"the {bound:g} seconds of the model's encoder"
    )
    av = _av()
    with _damage(source):
        if source.rate is not None:
            # An array is float32 with four bytes for each sample; see `read_source`.
            samples = _resampled_array(av, np.frombuffer(source.content, np.float32), source.rate, rate, bound)
            longer = len(source.content) / 4 > source.rate * bound
        else:
            samples, longer = _decoded(av, source, rate, bound)
        if not len(samples):
            raise MediaError(f"the audio {source.name} has no samples")
        if longer:
            _refuse(source, f"more than {bound:g} seconds", setting, limits)
    return samples


def _decoded(av: Any, source: MediaSource, rate: int, bound: float) -> tuple[NDArray[np.float32], bool]:
    """Return the samples up to the bound, and whether there are more."""
    most = int(bound * rate)
    with _open(source) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            raise MediaError(f"the audio {source.name} has no audio stream")
        _seconds(source, container, stream)
        parts: list[NDArray[np.float32]] = []
        resampler, count = av.AudioResampler(format="fltp", layout="mono", rate=rate), 0
        for frame in container.decode(stream):
            for one in resampler.resample(frame):
                parts.append(one.to_ndarray()[0])
                count += parts[-1].size
            if count > most:
                break
        else:
            # None is the end of the stream: the resampler then returns the samples that it has held back.
            parts += [one.to_ndarray()[0] for one in resampler.resample(None)]
    joined = np.concatenate(parts or [np.empty(0, np.float32)]).astype(np.float32)
    return joined[:most], len(joined) > most


def _resampled_array(av: Any, array: NDArray[np.float32], source_rate: int, rate: int, bound: float) -> NDArray[np.float32]:
    # Cut before resampling, which would otherwise process what is dropped.
    array = array[: int(bound * source_rate)]
    if source_rate == rate:
        return array
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(array)[None], format="fltp", layout="mono")
    frame.sample_rate = source_rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    parts = [one.to_ndarray()[0] for f in (frame, None) for one in resampler.resample(f)]
    return np.concatenate(parts).astype(np.float32)
