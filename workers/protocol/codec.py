"""Messages as bytes: newline-delimited JSON, and msgpack with tensor data in separate parts."""

from typing import Any, Protocol, Union

import msgspec
from msgspec import Struct

from .messages import INT64_MAX, Error, Message, Reply, Request
from .operations import Registry

FramePart = bytes | bytearray | memoryview


class FrameError(Exception):
    """A frame that is not a request.

    Args:
        reply: The reply to it.
    """

    def __init__(self, reply: Error) -> None:
        super().__init__(reply.message)
        self.reply = reply


class _Envelope(Struct):
    op: Any = None
    id: Any = None


class _Format(Protocol):
    def encode(self, obj: Any) -> bytes: ...


class Codec:
    """Converts messages to bytes and back.

    The fields of a message that hold values must be plain data here; see `values`.

    Args:
        registry: The operations.
        binary: Whether to use msgpack instead of JSON.
    """

    def __init__(self, registry: Registry, *, binary: bool) -> None:
        self.binary = binary
        self._registry = registry
        self._encoder: _Format = msgspec.msgpack.Encoder() if binary else msgspec.json.Encoder()
        decoder: Any = msgspec.msgpack.Decoder if binary else msgspec.json.Decoder
        # A union of types known only at run time.
        self._requests = decoder(Union[registry.requests])  # noqa: UP007
        self._replies = decoder(Union[registry.replies])  # noqa: UP007
        self._envelope = decoder(_Envelope)

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message.

        Raises:
            ValueError: The message holds a value that the format cannot express.
        """
        return self._encoder.encode(message)

    def decode_request(self, frame: FramePart) -> Request:
        """Return the request in a frame.

        Raises:
            FrameError: The frame is not a request; the error holds the reply.
        """
        try:
            request: Request = self._requests.decode(frame)
        except (ValueError, RecursionError) as e:
            raise FrameError(self._refusal(frame, e)) from e
        return request

    def decode_reply(self, frame: FramePart) -> Reply:
        """Return the reply in a frame.

        Raises:
            ValueError: The frame is not a reply.
        """
        reply: Reply = self._replies.decode(frame)
        return reply

    def _refusal(self, frame: FramePart, error: Exception) -> Error:
        try:
            # Decoded again without types, to answer under the request's id.
            envelope = self._envelope.decode(frame)
        except (ValueError, RecursionError):
            return Error(kind="bad_request", message=f"the frame is not a request: {error}")
        request_id = envelope.id if _is_id(envelope.id) else None
        if isinstance(envelope.op, str) and envelope.op not in self._registry.ops:
            op_names = ", ".join(self._registry.ops)
            return Error(
                id=request_id, kind="unknown_op", message=f"there is no operation {envelope.op[:80]!r}; there are {op_names}"
            )
        return Error(id=request_id, kind="bad_request", message=f"the frame is not a request: {error}")


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= 256
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT64_MAX


def text(value: str) -> str:
    """Return a string that can be encoded: lone surrogates, as in names of files, are replaced."""
    return value.encode("utf-8", "backslashreplace").decode()
