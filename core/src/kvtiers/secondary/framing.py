"""Framing of the wire between the engine and a tier host: length-prefixed messages on a stream socket.

Every message is ``u32 length | u8 kind | u16 tier | body``, little endian; ``length`` counts what follows it. ``tier``
is the tier's place in the HELLO. What the bodies hold is in ``wire.py``.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = ["MAX_EVENT_BYTES", "Frame", "FrameReader", "Kind", "ProtocolError", "frame"]

MAX_FRAME_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 2**20  # of a host: a byte for each chunk of a job or a question, figures, a log line

_HEAD = struct.Struct("<IBH")


class ProtocolError(Exception):
    """The other side sent what this format does not know."""


class Kind(IntEnum):
    """Message kinds; the engine's below 64, the host's from 64."""

    HELLO = 1
    NAMES = 2
    JOB = 3
    PROBE = 4
    ABANDON = 5
    CLOSE = 6
    RELEASE = 7
    OPENED = 64
    STARTED = 65
    FAILED = 66
    DONE = 67
    PROBED = 68
    STATS = 69
    LOG = 70
    RELEASED = 71


class Frame(NamedTuple):
    """One message, its body not yet read."""

    kind: int
    tier: int
    body: memoryview


class FrameReader:
    """Cuts a stream into frames. ``feed`` what came in, then iterate over ``frames``."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self.waiting = bytearray()
        """What has been fed and no frame has been made of."""

    def feed(self, data: bytes | memoryview) -> None:
        """Take in bytes from the stream."""
        self.waiting += data

    def frames(self, most: int) -> list[Frame]:
        """Return the complete frames, at most so many; ProtocolError if the stream makes no sense."""
        frames: list[Frame] = []
        at, buffer = 0, self.waiting
        while len(frames) < most and len(buffer) - at >= _HEAD.size:
            length, kind, tier = _HEAD.unpack_from(buffer, at)
            if not _HEAD.size - 4 <= length <= self._max_bytes:
                raise ProtocolError(f"a message of {length} bytes; expected at most {self._max_bytes}")
            if len(buffer) - at < length + 4:
                break
            frames.append(Frame(kind, tier, memoryview(bytes(buffer[at + _HEAD.size : at + 4 + length]))))
            at += length + 4
        del buffer[:at]
        return frames


def frame(kind: Kind, tier: int, body: bytes = b"") -> bytes:
    """Return a message."""
    return _HEAD.pack(len(body) + _HEAD.size - 4, kind, tier) + body
