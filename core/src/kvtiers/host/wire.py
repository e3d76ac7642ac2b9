"""The wire format between the engine and a tier host, number 9: length-prefixed messages on a stream socket.

A frame is ``u32 length | message``, little endian; ``length`` is that of the message. The message is MessagePack: an
array of a tag and fields, as ``messages.py`` declares them. What comes in is checked against these types and for its
size, and no further: that an id, a row or a status is one that makes sense is for its receiver to check.
"""

import struct
from typing import Any

import msgspec

from kvtiers.host.messages import Message, Report, Request

__all__ = [
    "MAX_REPORT_BYTES",
    "PROTOCOL_FORMAT",
    "FrameReader",
    "ProtocolError",
    "decode_report",
    "decode_request",
    "encode",
]

PROTOCOL_FORMAT = 10
MAX_FRAME_BYTES = 64 * 2**20
MAX_REPORT_BYTES = 2**20  # of a host: a byte for each chunk of a job or a question, figures, a log line

_HEAD = struct.Struct("<I")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def _as_plain(value: Any) -> Any:
    """Return a value that is of an engine's or a store's own type as one of the type that it derives from."""
    plain = next((kind for kind in (bytes, str, int, float) if isinstance(value, kind)), list)
    return plain(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_as_plain).encode


class ProtocolError(Exception):
    """The other side sent a message that this format does not define."""


class FrameReader:
    """Cuts a stream into messages. ``feed`` what came in, then iterate over ``messages``."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self.waiting = bytearray()
        """What has been fed and no message has been made of."""

    def feed(self, data: bytes | memoryview) -> None:
        """Take in bytes from the stream."""
        self.waiting += data

    def messages(self, most: int) -> list[bytearray]:
        """Return the complete messages, not yet decoded, at most ``most``; ProtocolError for a length out of bounds."""
        messages: list[bytearray] = []
        at, buffer = 0, self.waiting
        while len(messages) < most and len(buffer) - at >= _HEAD.size:
            (length,) = _HEAD.unpack_from(buffer, at)
            if not 0 < length <= self._max_bytes:
                raise ProtocolError(f"a message of {length} bytes; expected 1 to {self._max_bytes}")
            start, end = at + _HEAD.size, at + _HEAD.size + length
            if len(buffer) < end:
                break
            messages.append(buffer[start:end])
            at = end
        del buffer[:at]
        return messages


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    try:
        body = _encode(message)
    except UnicodeEncodeError:  # an exception's text may hold what UTF-8 has no bytes for
        fields = {name: _in_utf_8(field) for name, field in msgspec.structs.asdict(message).items()}
        body = _encode(msgspec.structs.replace(message, **fields))
    return _HEAD.pack(len(body)) + body


def decode_request(message: bytes | bytearray) -> Request:
    """Read a message of the engine; ProtocolError if it is none."""
    try:
        return _REQUESTS.decode(message)
    except _UNREADABLE as error:
        raise ProtocolError(str(error)) from None


def decode_report(message: bytes | bytearray) -> Report:
    """Read a message of a host; ProtocolError if it is none."""
    try:
        return _REPORTS.decode(message)
    except _UNREADABLE as error:
        raise ProtocolError(str(error)) from None


def _in_utf_8(field: Any) -> Any:
    match field:
        case str():
            return field.encode("utf-8", "replace").decode()
        case dict():
            return {_in_utf_8(name): figure for name, figure in field.items()}
    return field
