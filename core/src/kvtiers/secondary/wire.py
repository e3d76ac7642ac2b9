"""The wire between the engine and a tier host: length-prefixed struct messages on a stream socket, format 1.

Every message is ``u32 length | u8 kind | u16 tier | body``, little endian; ``length`` counts what follows it. Texts are
UTF-8; a text before other fields has a u16 length. Keys travel raw: ``u32 count | u16 key length | keys``, all of one
length, or key length 0 and a u16 length before each. ``tier`` is the tier's place in the HELLO.

=============  ======  ==================================================================================
message        sender  body
=============  ======  ==================================================================================
HELLO          engine  JSON: protocol, cpus, region, tiers (options with secrets, names, sizes)
NAMES          engine  layout id (8 bytes), prefix
JOB            engine  u64 job, u8 is load, keys, i32 rows
PROBE          engine  u64 probe, u8 is prefix, keys
ABANDON        engine  u64 job
CLOSE          engine  f64 seconds to drain
OPENED         host    error
STARTED        host    u64 job
FAILED         host    u64 job, error
DONE           host    u64 job, u64 bytes, f64 seconds, u32 retries, u32 count, statuses, error
PROBED         host    u64 probe, u32 count, answers, error
STATS          host    JSON: figures
LOG            host    u8 level, text
=============  ======  ==================================================================================
"""

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.rows.names import StorageNames
from kvtiers.secondary.protocol import Event, JobDone, JobFailed, JobStarted, Opened, Probed, StoreJob

__all__ = ["PROTOCOL_FORMAT", "Frame", "FrameReader", "Kind", "ProtocolError"]

PROTOCOL_FORMAT = 1
MAX_FRAME = 64 * 2**20

_HEAD = struct.Struct("<IBH")
_KEYS = struct.Struct("<IH")
_JOB = struct.Struct("<QB")
_DONE = struct.Struct("<QQdII")
_PROBED = struct.Struct("<QI")
_U64 = struct.Struct("<Q")


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
    OPENED = 64
    STARTED = 65
    FAILED = 66
    DONE = 67
    PROBED = 68
    STATS = 69
    LOG = 70


class Frame(NamedTuple):
    """One message, its body not yet read."""

    kind: int
    tier: int
    body: memoryview


class FrameReader:
    """Cuts a stream into frames. ``feed`` what came in, then iterate over ``frames``."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Take in bytes from the stream."""
        self._buffer += data

    def frames(self, most: int) -> list[Frame]:
        """Return the complete frames, at most so many; ProtocolError if the stream makes no sense."""
        frames: list[Frame] = []
        at, buffer = 0, self._buffer
        while len(frames) < most and len(buffer) - at >= _HEAD.size:
            length, kind, tier = _HEAD.unpack_from(buffer, at)
            if not _HEAD.size - 4 <= length <= MAX_FRAME:
                raise ProtocolError(f"a message of {length} bytes; expected at most {MAX_FRAME}")
            if len(buffer) - at < length + 4:
                break
            frames.append(Frame(kind, tier, memoryview(bytes(buffer[at + _HEAD.size : at + 4 + length]))))
            at += length + 4
        del buffer[:at]
        return frames


def frame(kind: Kind, tier: int, body: bytes = b"") -> bytes:
    """Return a message."""
    return _HEAD.pack(len(body) + _HEAD.size - 4, kind, tier) + body


def encode_hello(hello: Mapping[str, object]) -> bytes:
    """Return a HELLO message."""
    return frame(Kind.HELLO, 0, json.dumps(hello).encode())


def encode_names(tier: int, names: StorageNames) -> bytes:
    """Return a NAMES message."""
    return frame(Kind.NAMES, tier, names.layout_id + names.prefix.encode())


def decode_names(body: memoryview) -> StorageNames:
    """Read a NAMES message."""
    return StorageNames(str(body[8:], "utf-8"), bytes(body[:8]))


def encode_job(tier: int, job: StoreJob) -> bytes:
    """Return a JOB message."""
    rows = array("i", job.rows).tobytes()
    return frame(Kind.JOB, tier, _JOB.pack(job.job_id, job.is_load) + _encode_keys(job.keys) + rows)


def decode_job(body: memoryview) -> StoreJob:
    """Read a JOB message."""
    job_id, is_load = _JOB.unpack_from(body)
    keys, end = _decode_keys(body, _JOB.size)
    rows = array("i")
    rows.frombytes(body[end:])
    if len(rows) != len(keys):
        raise ProtocolError(f"job {job_id} has {len(keys)} keys and {len(rows)} rows")
    return StoreJob(job_id, bool(is_load), keys, rows.tolist())


def encode_probe(tier: int, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bytes:
    """Return a PROBE message."""
    return frame(Kind.PROBE, tier, _JOB.pack(probe_id, is_prefix) + _encode_keys(keys))


def decode_probe(body: memoryview) -> tuple[int, list[OffloadKey], bool]:
    """Read a PROBE message: probe id, keys, whether they are a prefix."""
    probe_id, is_prefix = _JOB.unpack_from(body)
    keys, _ = _decode_keys(body, _JOB.size)
    return probe_id, keys, bool(is_prefix)


def encode_abandon(tier: int, job_id: int) -> bytes:
    """Return an ABANDON message."""
    return frame(Kind.ABANDON, tier, _U64.pack(job_id))


def decode_id(body: memoryview) -> int:
    """Read the id at the start of a message."""
    return int(_U64.unpack_from(body)[0])


def encode_event(tier: int, event: Event) -> bytes:
    """Return the message for an event of the pool."""
    match event:
        case Opened(error):
            return frame(Kind.OPENED, tier, error.encode())
        case JobStarted(job_id):
            return frame(Kind.STARTED, tier, _U64.pack(job_id))
        case JobFailed(job_id, error):
            return frame(Kind.FAILED, tier, _U64.pack(job_id) + error.encode())
        case JobDone(job_id, statuses, nbytes, seconds, retries, error):
            head = _DONE.pack(job_id, nbytes, seconds, retries, len(statuses))
            return frame(Kind.DONE, tier, head + statuses + error.encode())
        case Probed(probe_id, answers, error):
            return frame(Kind.PROBED, tier, _PROBED.pack(probe_id, len(answers)) + answers + error.encode())


def decode_event(message: Frame) -> Event:
    """Read a message that is an event of the pool; ProtocolError if it is none."""
    kind, _, body = message
    try:
        match kind:
            case Kind.OPENED:
                return Opened(str(body, "utf-8"))
            case Kind.STARTED:
                return JobStarted(decode_id(body))
            case Kind.FAILED:
                return JobFailed(decode_id(body), str(body[8:], "utf-8"))
            case Kind.DONE:
                job_id, nbytes, seconds, retries, count = _DONE.unpack_from(body)
                statuses, error = body[_DONE.size : _DONE.size + count], body[_DONE.size + count :]
                return JobDone(job_id, bytes(statuses), nbytes, seconds, retries, str(error, "utf-8"))
            case Kind.PROBED:
                probe_id, count = _PROBED.unpack_from(body)
                answers, error = body[_PROBED.size : _PROBED.size + count], body[_PROBED.size + count :]
                return Probed(probe_id, bytes(answers), str(error, "utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message of kind {kind}: {error}") from None
    raise ProtocolError(f"a message of kind {kind}, which is no event")


def _encode_keys(keys: Sequence[OffloadKey]) -> bytes:
    length = len(keys[0]) if keys else 0
    if set(map(len, keys)) <= {length} and length < 2**16:
        return _KEYS.pack(len(keys), length) + b"".join(keys)
    parts = [len(key).to_bytes(2, "little") + key for key in keys]
    return _KEYS.pack(len(keys), 0) + b"".join(parts)


def _decode_keys(body: memoryview, at: int) -> tuple[list[OffloadKey], int]:
    try:
        count, length = _KEYS.unpack_from(body, at)
    except struct.error as error:
        raise ProtocolError(f"keys: {error}") from None
    at += _KEYS.size
    data = bytes(body)
    keys = []
    for _ in range(count):
        size = length
        if not length:
            size = int.from_bytes(data[at : at + 2], "little")
            at += 2
        keys.append(data[at : at + size])
        at += size
    if at > len(data):
        raise ProtocolError(f"keys end {at - len(data)} bytes behind their message")
    return keys, at
