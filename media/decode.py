"""Decoding of images, video and audio, whose sizes are bounded before anything is decoded.

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
from PIL import Image, ImageOps

from ..engine.errors import ConfigError, MediaError
from .sources import MediaSource

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
MOST_PIXELS = 64 * 2**20
"""The largest number of pixels of an image or a frame, whatever the settings. A small file may claim to have many more."""
MOST_SECONDS = 24 * 3600
"""The longest video or audio, whatever the settings."""

TooLarge = Literal["resize", "error", "skip"]
Fit = Callable[[int, int, int], tuple[int, int]]


class TooLargeError(MediaError):
    """An image, a video or audio is beyond the limits, and the settings do not say to resize it."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """The limits on what is decoded, and how much of a video is.

    Args:
        max_pixels: The most pixels of an image or a frame; None leaves the size to the model's processor.
        max_frames: The most frames of a video.
        fps: The frames per second of a video that are used, up to `max_frames`.
        max_seconds: The most seconds of audio; None is what the model's encoder takes.
        too_large: What becomes of larger ones. `resize`: fewer pixels, fewer frames per second, the first seconds; otherwise it is an error.
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
        seconds: When each is shown, in seconds from the beginning, `[T]`.
        fps: How many of them make a second.
        width: The width of the video, before its frames were resized.
        height: Its height.
    """

    frames: list[Image.Image]
    seconds: list[float]
    fps: float
    width: int
    height: int


def decode_image(source: MediaSource, limits: MediaLimits) -> Image.Image:
    """Return an image in RGB, turned as its camera noted.

    Args:
        source: Its content.
        limits: The limits.

    Raises:
        TooLargeError: It has too many pixels.
        MediaError: It is damaged, or of a format that is not read.
    """
    with _damage(source), warnings.catch_warnings():
        # Of images that are larger than usual; there are limits of our own.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image: Image.Image = Image.open(io.BytesIO(source.content), formats=FORMATS)
        width, height = image.size
        if width < 1 or height < 1:
            raise MediaError(f"the image {source.name} has {width} x {height} pixels")
        if width * height > MOST_PIXELS:
            raise MediaError(f"the image {source.name} has {width} x {height} pixels; at most {MOST_PIXELS} are decoded")
        small = _smaller(source, width, height, limits)
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "I;16", "I;16B", "F"):
            image = _eight_bits(image)
        image = image.convert("RGB")
        # The camera's note may have exchanged the sides.
        return (
            image
            if small is None
            else image.resize(small if image.size == (width, height) else small[::-1], Image.Resampling.BICUBIC)
        )


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits or of floating point in 8 bits, which PIL would clip instead."""
    values = np.asarray(image, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("its pixels are not finite")
    if image.mode.startswith("I;16"):
        most = 65535.0
    else:
        # What 32 bits or floating point are meant to hold is not in the file.
        most = 1.0 if image.mode == "F" and values.max() <= 1 else 65535.0 if values.max() > 255 else 255.0
    return Image.fromarray(np.clip(values / most * 255, 0, 255).round().astype(np.uint8))


def _smaller(source: MediaSource, width: int, height: int, limits: MediaLimits) -> tuple[int, int] | None:
    """Return the size to which an image or a frame is to be resized; None if it is small enough."""
    if limits.max_pixels is None or width * height <= limits.max_pixels:
        return None
    _refuse(source, f"{width} x {height} pixels", f"data.max_pixels={limits.max_pixels}", limits)
    scale = math.sqrt(limits.max_pixels / (width * height))
    # Not more pixels than allowed, also where one side is very short.
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
        raise
    except Exception as e:  # decoders raise errors of many types
        raise MediaError(f"the {source.kind} {source.name} cannot be decoded: {type(e).__name__}: {e}") from e


CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf,gif,ogg,wav,w64,aiff,mp3,flac,aac,caf,amr,au"
"""The formats of files with video or audio. Others, such as playlists, make the decoder open what they name."""


def _av() -> Any:
    try:
        import av
    except ImportError as e:
        raise ConfigError(
            "video and audio need PyAV; install it with: pip install 'drivetrain[vision]' or 'drivetrain[audio]'"
        ) from e
    return av


def _open(source: MediaSource) -> Any:
    whitelists = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    return _av().open(io.BytesIO(source.content), mode="r", metadata_errors="ignore", container_options=whitelists)


def frame_indices(duration: float, count: int, limits: MediaLimits, multiple: int) -> list[int]:
    """Return which frames of a video are used: evenly spread over it, `fps` of them per second.

    Args:
        duration: The video's seconds.
        count: The number of its frames.
        limits: The limits.
        multiple: What the number of frames is a multiple of, if the video has as many: that of the encoder's frames in a patch.
    """
    most = max(1, min(limits.max_frames, count))
    number = max(1, min(round(duration * limits.fps), most))
    if number >= multiple:
        number = number // multiple * multiple
    elif most >= multiple:
        number = multiple
    return [int(i * count / number) for i in range(number)]


def decode_video(
    source: MediaSource,
    limits: MediaLimits,
    multiple: int = 1,
    fit: Fit | None = None,
    resample: int = Image.Resampling.BICUBIC,
) -> Video:
    """Return the frames of a video that are used, turned as its camera noted; see `frame_indices`.

    Args:
        source: Its content.
        limits: The limits.
        multiple: What the number of frames is a multiple of, if the video has as many.
        fit: Returns the width and height to which frames are resized, given their number, width and height; each is resized when it is
            decoded, so that no frame is kept in full.
        resample: How PIL resizes.

    Raises:
        TooLargeError: It has too many pixels or frames.
        MediaError: It is damaged, or has no frames.
    """
    with _damage(source), _open(source) as container:
        stream = next(iter(container.streams.video), None)
        if stream is None:
            raise MediaError(f"the video {source.name} has no pictures in it")
        width, height = stream.codec_context.width, stream.codec_context.height
        if not 0 < width * height <= MOST_PIXELS:
            raise MediaError(f"the video {source.name} has {width} x {height} pixels; 1 to {MOST_PIXELS} are decoded")
        small = _smaller(source, width, height, limits)
        rate = float(stream.average_rate or stream.guessed_rate or 0) or 24.0
        seconds = _seconds(source, container, stream)
        count = stream.frames or (round(seconds * rate) if seconds else 0) or _count(container, source)
        seconds = seconds or count / rate
        if seconds * limits.fps > limits.max_frames:
            frames = f"{seconds:g} seconds, {round(seconds * limits.fps)} frames at data.fps={limits.fps:g}"
            _refuse(source, frames, f"data.max_frames={limits.max_frames}", limits)
        chosen = frame_indices(seconds, count, limits, multiple)
        images: list[Image.Image] = []
        last: Any = None
        stream.thread_type = "AUTO"
        container.seek(0)

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
        # A file may have fewer frames than it claims.
        images += [picture(last)] * (len(chosen) - len(images))
    return Video(frames=images, seconds=[i / rate for i in chosen], fps=len(chosen) / seconds, width=width, height=height)


def _seconds(source: MediaSource, container: Any, stream: Any) -> float:
    """Return how long a file says that it is; 0 if it does not."""
    seconds = (
        float(stream.duration * stream.time_base) if stream.duration else float(Fraction(container.duration or 0, 1_000_000))
    )
    if seconds > MOST_SECONDS:
        raise MediaError(f"the {source.kind} {source.name} has {seconds:g} seconds; at most {MOST_SECONDS} are decoded")
    return max(seconds, 0.0)


def _count(container: Any, source: MediaSource) -> int:
    """Return the number of frames of a file that does not say it."""
    count = sum(1 for packet in container.demux(video=0) if packet.size)
    if not count:
        raise MediaError(f"the video {source.name} has no frames")
    return count


def decode_audio(source: MediaSource, rate: int, limits: MediaLimits, most: float | None) -> NDArray[np.float32]:
    """Return the samples of audio `[N]` float32 in one channel.

    Args:
        source: Its content.
        rate: The samples per second that the model takes.
        limits: The limits.
        most: The most seconds that the model's encoder takes; None if it has no limit.

    Raises:
        TooLargeError: It is too long.
        MediaError: It is damaged, or has no sound.
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
            raise MediaError(f"the audio {source.name} has no sound in it")
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
            parts += [one.to_ndarray()[0] for one in resampler.resample(None)]
    joined = np.concatenate(parts or [np.empty(0, np.float32)]).astype(np.float32)
    return joined[:most], len(joined) > most


def _resampled_array(av: Any, array: NDArray[np.float32], source_rate: int, rate: int, bound: float) -> NDArray[np.float32]:
    array = array[: int(bound * source_rate)]
    if source_rate == rate:
        return array
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(array)[None], format="fltp", layout="mono")
    frame.sample_rate = source_rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    parts = [one.to_ndarray()[0] for f in (frame, None) for one in resampler.resample(f)]
    return np.concatenate(parts).astype(np.float32)
