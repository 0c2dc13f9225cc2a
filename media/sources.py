"""The sources of media: files, data URIs, bytes and, if allowed, URLs. Nothing is decoded here."""

import base64
import binascii
import http.client
import io
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..engine.errors import MediaError
from ..engine.packing.batch import Kind

URL_SECONDS = 30.0
"""The timeout in seconds for fetching a URL."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """The permitted sources of media, in addition to data URIs and bytes.

    Args:
        folder: The folder that relative paths start from; None allows no paths at all, as for network requests.
        urls: Whether URLs are fetched.
        max_bytes: The maximum size of a file in bytes, before decoding.
    """

    folder: Path | None = None
    urls: bool = False
    max_bytes: int = 2**28


OVER_NETWORK = Access()
"""For network requests, whose sender must not make this machine read its files or contact other machines."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaSource:
    """The content of an image, video or audio, not decoded.

    Args:
        kind: The kind.
        name: Its origin, for messages.
        content: The content of the file; for an array, its float32 values.
        path: The path of the file, if there is one.
        rate: The sample rate in Hz, if it is an array of audio.
    """

    kind: Kind
    name: str
    content: bytes = field(repr=False)
    path: Path | None = None
    rate: int | None = None

    @cached_property
    def key(self) -> str:
        """A digest of the content: equal content is processed once."""
        digest = xxhash.xxh3_128(self.content)
        # The same bytes can be an image or a video (GIF), and samples mean something else at another rate.
        digest.update(f"{self.kind} {self.rate}".encode())
        return digest.hexdigest()


def read_source(kind: Kind, value: Any, access: Access) -> MediaSource:
    """Read the content of an image, video or audio.

    Args:
        kind: The kind.
        value: A path, a data URI, a URL, bytes, a mapping of `bytes` and `path` as in tables, a PIL image, or audio as a mapping of
            `array` and `sampling_rate`.
        access: The permitted sources.

    Raises:
        MediaError: The source cannot be read or is not permitted.
    """
    if isinstance(value, Mapping):
        value = _of_mapping(kind, value)
        if isinstance(value, MediaSource):
            return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _checked(MediaSource(kind=kind, name="(bytes)", content=bytes(value)), access)
    if kind == "image" and hasattr(value, "save") and hasattr(value, "convert"):
        # Use a lossless format, so that equal pixels have equal content.
        buffer = io.BytesIO()
        (value if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I") else value.convert("RGB")).save(buffer, format="PNG")
        return _checked(MediaSource(kind=kind, name="(of PIL)", content=buffer.getvalue()), access)
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        raise MediaError(f"the {kind} is {type(value).__name__}; give a path, a data URI or bytes")
    if value.startswith("data:"):
        return _checked(_of_data_uri(kind, value, access), access)
    if value.startswith(("http://", "https://")):
        return _checked(MediaSource(kind=kind, name=value[:100], content=_fetch(value, access)), access)
    return _of_path(kind, value.removeprefix("file://"), access)


def _of_mapping(kind: Kind, value: Mapping[str, Any]) -> Any:
    if value.get("array") is not None:
        rate = value.get("sampling_rate")
        if kind != "audio" or isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= 2**20:
            raise MediaError(
                f"the {kind} is an array with sampling_rate={rate!r}; only audio may be an array, with its samples per second"
            )
        try:
            array = np.asarray(value["array"], np.float32)
        except (TypeError, ValueError) as e:
            raise MediaError(f"the audio is not an array of numbers: {e}") from None
        if array.ndim != 1 or not array.size:
            raise MediaError(f"the audio is an array of the shape {list(array.shape)}; give one channel, [N]")
        if not np.isfinite(array).all():
            raise MediaError("the audio has samples that are not finite")
        return MediaSource(kind=kind, name="(array)", content=array.tobytes(), rate=rate)
    for name in ("bytes", "path"):
        if value.get(name) is not None:
            return value[name]
    raise MediaError(f"the {kind} is a mapping of {', '.join(map(str, value)) or 'nothing'}; give bytes or path")


def _of_data_uri(kind: Kind, uri: str, access: Access) -> MediaSource:
    head, comma, data = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise MediaError(f"the {kind} is {uri[:40]!r}; give a data URI as data:{kind}/...;base64,...")
    # Four characters of base64 are three bytes, so the size is known before decoding.
    if len(data) * 3 // 4 > access.max_bytes:
        raise _too_large(kind, "(data URI)", len(data) * 3 // 4, access)
    try:
        # With `validate`, because base64 would otherwise skip characters that do not belong to it, and return other
        # bytes.
        return MediaSource(kind=kind, name="(data URI)", content=base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as e:
        raise MediaError(f"the data URI of the {kind} is not base64: {e}") from None


def _of_path(kind: Kind, value: str, access: Access) -> MediaSource:
    if access.folder is None:
        raise MediaError(f"the {kind} is {value[:60]!r}; only data URIs and bytes are accepted here, no paths or URLs")
    path = access.folder / value
    try:
        # Reading a pipe or a device might never end.
        regular, size = path.is_file(), path.stat().st_size
        content = path.read_bytes() if regular and size <= access.max_bytes else b""
    except (OSError, ValueError) as e:
        # A path with a null character raises a ValueError.
        raise MediaError(f"the {kind} {value[:200]!r} cannot be read ({getattr(e, 'strerror', None) or e}): {path}") from None
    if not regular:
        raise MediaError(f"the {kind} {value[:200]!r} is not a file: {path}")
    if size > access.max_bytes:
        raise _too_large(kind, str(path), size, access)
    return _checked(MediaSource(kind=kind, name=str(path), content=content, path=path), access)


def _fetch(url: str, access: Access) -> bytes:
    if not access.urls:
        where = "data.allow_url=true fetches it" if access.folder is not None else "only data URIs and bytes are accepted here"
        raise MediaError(f"{url[:100]} is a URL; {where}")
    # The timeout of `urlopen` holds for each read; a server that sends a few bytes at a time would never exceed it.
    content, end = b"", time.monotonic() + URL_SECONDS
    try:
        with urllib.request.urlopen(url, timeout=URL_SECONDS) as answer:
            size = answer.headers.get("Content-Length")
            # At most one part beyond the limit, which `_checked` then finds too large.
            while len(content) <= access.max_bytes and (part := answer.read(2**20)):
                content += part
                if time.monotonic() > end:
                    raise TimeoutError(f"it takes longer than {URL_SECONDS:g} seconds")
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise MediaError(f"{url[:100]} cannot be fetched: {e}") from e
    # `read(n)` of http.client reports a connection that ends early as the end of the content.
    if size is not None and len(content) < int(size):
        raise MediaError(f"{url[:100]} cannot be fetched: the connection ended after {len(content)} of {size} bytes")
    return content


def _checked(source: MediaSource, access: Access) -> MediaSource:
    if not source.content:
        raise MediaError(f"the {source.kind} {source.name} is empty")
    if len(source.content) > access.max_bytes:
        raise _too_large(source.kind, source.name, len(source.content), access)
    return source


def _too_large(kind: Kind, name: str, size: int, access: Access) -> MediaError:
    return MediaError(f"the {kind} {name} has {size} bytes, or more; at most {access.max_bytes} are read")
