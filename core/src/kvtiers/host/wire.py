"""The wire format between the engine and a tier host, number 6: length-prefixed messages on a stream socket.

Every message is ``u32 length | u8 kind | u16 tier | body``; ``length`` counts what follows it, ``tier`` is the tier's
place in the HELLO.

Little endian. Texts are UTF-8 and end their message. Keys travel raw: ``u32 count | u16 key length | keys``, all of one
length, or key length 0 and a u16 length before each.

=============  ======  ==================================================================================
message        sender  body
=============  ======  ==================================================================================
HELLO          engine  JSON: protocol, cpus, region, tiers (options with secrets, names, sizes)
NAMES          engine  layout id (8 bytes), prefix
JOB            engine  u64 job, u8 flags (1 a load, 2 a store that overwrites, 4 a removal), keys, but for a removal
                       i32 rows, with flag 2 a byte a key, 1: overwritten
PROBE          engine  u64 probe, u8 is prefix, keys
ABANDON        engine  u64 job
CLOSE          engine  f64 seconds to drain
RELEASE        engine  u64 job
LIMITS         engine  u32 threads, u32 store threads, u64 bytes a second, f64 requests a second; 0: none
OPENED         host    u8 length, epoch, error
STARTED        host    u64 job
FAILED         host    u64 job, error
DONE           host    u64 job, u64 bytes, f64 seconds, u32 retries, u32 count, statuses, error
PROBED         host    u64 probe, u32 count, answers, error
STATS          host    JSON: figures
LOG            host    u8 level, text
RELEASED       host    u64 job
=============  ======  ==================================================================================
"""

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.host.messages import Event, JobDone, JobFailed, JobReleased, JobStarted, Limits, Opened, Probed, StoreJob
from kvtiers.layout.storage_name import StorageNames

__all__ = [
    "MAX_EVENT_BYTES",
    "PROTOCOL_FORMAT",
    "Frame",
    "FrameReader",
    "Kind",
    "ProtocolError",
    "decode_close",
    "decode_event",
    "decode_id",
    "decode_job",
    "decode_limits",
    "decode_log",
    "decode_names",
    "decode_probe",
    "decode_stats",
    "encode_abandon",
    "encode_close",
    "encode_event",
    "encode_hello",
    "encode_job",
    "encode_limits",
    "encode_log",
    "encode_names",
    "encode_probe",
    "encode_release",
    "encode_stats",
    "frame",
]

PROTOCOL_FORMAT = 6
MAX_FRAME_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 2**20  # of a host: a byte for each chunk of a job or a question, figures, a log line

_HEAD = struct.Struct("<IBH")
_LAYOUT_ID_BYTES = 8
_KEYS = struct.Struct("<IH")
_JOB = struct.Struct("<QB")
_IS_LOAD, _OVERWRITES, _IS_DELETE = 1, 2, 4
_BYTES_A_ROW = {0: 4, _IS_LOAD: 4, _OVERWRITES: 5, _IS_DELETE: 0}
_DONE = struct.Struct("<QQdII")
_PROBED = struct.Struct("<QI")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")
_LIMITS = struct.Struct("<IIQd")


class ProtocolError(Exception):
    """The other side sent a message that this format does not define."""


class Kind(IntEnum):
    """Message kinds; the engine's below 64, the host's from 64."""

    HELLO = 1
    NAMES = 2
    JOB = 3
    PROBE = 4
    ABANDON = 5
    CLOSE = 6
    RELEASE = 7
    LIMITS = 8
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
        """Return the complete frames, at most ``most``; ProtocolError if a length is out of bounds."""
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


def encode_hello(hello: Mapping[str, object]) -> bytes:
    """Return a HELLO message."""
    return frame(Kind.HELLO, 0, json.dumps(hello).encode())


def encode_names(tier: int, names: StorageNames) -> bytes:
    """Return a NAMES message."""
    return frame(Kind.NAMES, tier, names.layout_id + names.prefix.encode())


def decode_names(body: memoryview) -> StorageNames:
    """Read a NAMES message."""
    if len(body) < _LAYOUT_ID_BYTES:
        raise ProtocolError(f"names of {len(body)} bytes")
    prefix = str(body[_LAYOUT_ID_BYTES:], "utf-8", "replace")
    return StorageNames(prefix, bytes(body[:_LAYOUT_ID_BYTES]))


def encode_job(tier: int, job: StoreJob) -> bytes:
    """Return a JOB message."""
    rows = struct.pack(f"<{len(job.rows)}i", *job.rows)
    flags = _IS_LOAD * job.is_load + _OVERWRITES * bool(job.overwrites) + _IS_DELETE * job.is_delete
    return frame(Kind.JOB, tier, _JOB.pack(job.job_id, flags) + _encode_keys(job.keys) + rows + job.overwrites)


def decode_job(body: memoryview) -> StoreJob:
    """Read a JOB message."""
    job_id, flags = _head(_JOB, body)
    keys, end = _decode_keys(body, _JOB.size)
    if flags not in _BYTES_A_ROW:
        raise ProtocolError(f"job {job_id} has flags {flags}")
    if len(body) - end != _BYTES_A_ROW[flags] * len(keys):
        raise ProtocolError(f"job {job_id} has {len(keys)} keys and {len(body) - end} bytes of rows")
    if flags == _IS_DELETE:
        return StoreJob(job_id, is_load=False, keys=keys, rows=(), is_delete=True)
    rows = list(struct.unpack_from(f"<{len(keys)}i", body, end))
    return StoreJob(job_id, flags == _IS_LOAD, keys, rows, bytes(body[end + 4 * len(keys) :]))


def encode_probe(tier: int, probe_id: int, keys: Sequence[OffloadKey], *, is_prefix: bool) -> bytes:
    """Return a PROBE message."""
    return frame(Kind.PROBE, tier, _JOB.pack(probe_id, is_prefix) + _encode_keys(keys))


def decode_probe(body: memoryview) -> tuple[int, list[OffloadKey], bool]:
    """Read a PROBE message: probe id, keys, whether they are a prefix."""
    probe_id, is_prefix = _head(_JOB, body)
    keys, end = _decode_keys(body, _JOB.size)
    if end != len(body):
        raise ProtocolError(f"probe {probe_id} has {len(body) - end} bytes too many")
    return probe_id, keys, bool(is_prefix)


def encode_abandon(tier: int, job_id: int) -> bytes:
    """Return an ABANDON message."""
    return frame(Kind.ABANDON, tier, _U64.pack(job_id))


def decode_id(body: memoryview) -> int:
    """Read the id at the start of a message."""
    (number,) = _head(_U64, body)
    return int(number)


def encode_release(tier: int, job_id: int) -> bytes:
    """Return a RELEASE message."""
    return frame(Kind.RELEASE, tier, _U64.pack(job_id))


def encode_limits(tier: int, limits: Limits) -> bytes:
    """Return a LIMITS message."""
    return frame(Kind.LIMITS, tier, _LIMITS.pack(*(limit or 0 for limit in limits)))


def decode_limits(body: memoryview) -> Limits:
    """Read a LIMITS message."""
    threads, store_threads, nbytes, requests = _head(_LIMITS, body)
    return Limits(max(1, threads), store_threads or None, nbytes or None, requests or None)


def encode_close(tier: int, seconds: float) -> bytes:
    """Return a CLOSE message."""
    return frame(Kind.CLOSE, tier, _F64.pack(seconds))


def decode_close(body: memoryview) -> float:
    """Read a CLOSE message: how many seconds there are to end."""
    (seconds,) = _head(_F64, body)
    return float(seconds)


def encode_stats(tier: int, figures: Mapping[str, float]) -> bytes:
    """Return a STATS message."""
    return frame(Kind.STATS, tier, json.dumps(figures).encode())


def decode_stats(body: memoryview) -> dict[str, float]:
    """Read a STATS message."""
    try:
        return {str(name): float(figure) for name, figure in json.loads(bytes(body)).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"figures: {error}") from None


def encode_log(tier: int, level: int, text: str) -> bytes:
    """Return a LOG message; ``level`` as in ``logging``, at most 255."""
    return frame(Kind.LOG, tier, bytes([max(0, min(level, 255))]) + _text(text))


def decode_log(body: memoryview) -> tuple[int, str]:
    """Read a LOG message: level and text."""
    if not body:
        raise ProtocolError("a log line without a level")
    return body[0], str(body[1:], "utf-8", "replace")


def encode_event(tier: int, event: Event) -> bytes:
    """Return the message for an event of the pool."""
    match event:
        case Opened(error, epoch):
            return frame(Kind.OPENED, tier, bytes([len(epoch)]) + epoch.encode() + _text(error))
        case JobStarted(job_id):
            return frame(Kind.STARTED, tier, _U64.pack(job_id))
        case JobReleased(job_id):
            return frame(Kind.RELEASED, tier, _U64.pack(job_id))
        case JobFailed(job_id, error):
            return frame(Kind.FAILED, tier, _U64.pack(job_id) + _text(error))
        case JobDone(job_id, statuses, nbytes, seconds, retries, error):
            head = _DONE.pack(job_id, nbytes, seconds, retries, len(statuses))
            return frame(Kind.DONE, tier, head + statuses + _text(error))
        case Probed(probe_id, answers, error):
            return frame(Kind.PROBED, tier, _PROBED.pack(probe_id, len(answers)) + answers + _text(error))


def decode_event(message: Frame) -> Event:
    """Read a message that is an event of the pool; ProtocolError if it is none."""
    kind, _, body = message
    match kind:
        case Kind.DONE:  # first, as most are
            job_id, nbytes, seconds, retries, count = _head(_DONE, body)
            statuses, error = _bytes_and_text(body, _DONE.size, count)
            return JobDone(job_id, statuses, nbytes, seconds, retries, error)
        case Kind.OPENED:
            epoch, error = _bytes_and_text(body, 1, body[0] if body else 0)
            return Opened(error, str(epoch, "latin-1"))
        case Kind.STARTED:
            return JobStarted(decode_id(body))
        case Kind.RELEASED:
            return JobReleased(decode_id(body))
        case Kind.FAILED:
            return JobFailed(decode_id(body), str(body[_U64.size :], "utf-8", "replace"))
        case Kind.PROBED:
            probe_id, count = _head(_PROBED, body)
            answers, error = _bytes_and_text(body, _PROBED.size, count)
            return Probed(probe_id, answers, error)
    raise ProtocolError(f"a message of kind {kind}, which is no event")


def _head(fields: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    if len(body) < fields.size:
        raise ProtocolError(f"a message of {len(body)} bytes, too short for its kind")
    return fields.unpack_from(body)


def _bytes_and_text(body: memoryview, at: int, count: int) -> tuple[bytes, str]:
    end = at + count
    if len(body) < end:
        raise ProtocolError(f"{count} bytes announced, {len(body) - at} sent")
    return bytes(body[at:end]), str(body[end:], "utf-8", "replace") if len(body) > end else ""


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # an exception's text may hold what UTF-8 has no bytes for


def _encode_keys(keys: Sequence[OffloadKey]) -> bytes:
    length = len(keys[0]) if keys else 0
    if set(map(len, keys)) <= {length} and length < 2**16:
        return _KEYS.pack(len(keys), length) + b"".join(keys)
    parts = [len(key).to_bytes(2, "little") + key for key in keys]
    return _KEYS.pack(len(keys), 0) + b"".join(parts)


def _decode_keys(body: memoryview, at: int) -> tuple[list[OffloadKey], int]:
    if len(body) < at + _KEYS.size:
        raise ProtocolError("a message that ends before its keys")
    count, length = _KEYS.unpack_from(body, at)
    at += _KEYS.size
    if len(body) < at + count * (length or 2):
        raise ProtocolError(f"{count} keys announced, {len(body) - at} bytes sent")
    data = bytes(body)
    if length:
        end = at + count * length
        return [data[i : i + length] for i in range(at, end, length)], end
    keys = []
    for _ in range(count):
        size = int.from_bytes(data[at : at + 2], "little")
        keys.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    if at > len(data):
        raise ProtocolError(f"keys end {at - len(data)} bytes behind their message")
    return keys, at
