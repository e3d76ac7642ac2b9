"""The diagnosis of the bucket, for ``kvtiers check``: its region, its rules, and the cost of a request."""

import mmap
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice

from kvtiers.api import ChunkStore, Finding
from kvtiers.api.units import format_duration, format_size
from kvtiers_s3.bucket import Bucket
from kvtiers_s3.failures import S3Error
from kvtiers_s3.lifecycle import effect_of

__all__ = ["bucket_findings", "speed_findings"]

_SMALL = 4096
_READS = 5
_MOST_COUNTED = 1000
_MOST_SUGGESTED = 64 << 20


def bucket_findings(bucket: Bucket, prefix: str) -> Iterator[Finding]:
    """Examine the bucket's settings. ``prefix``: what all keys start with, its ``/`` included."""
    for look in (_rules, _uploads, _versions):
        try:
            yield from look(bucket, prefix)
        except S3Error as error:
            yield Finding(
                "warning",
                f"the bucket's settings cannot be read: {error}",
                "grant s3:GetLifecycleConfiguration, s3:ListBucketMultipartUploads and s3:GetBucketVersioning to who "
                "runs this check; the tier itself works without them",
            )


def _rules(bucket: Bucket, prefix: str) -> Iterator[Finding]:
    effect = effect_of(bucket.lifecycle(), prefix)
    command = f"'kvtiers-s3 lifecycle --days N{f' --prefix {prefix[:-1]}' if prefix else ''}'"
    if effect.objects is None:
        yield Finding(
            "warning",
            "no lifecycle rule removes old values, so the bucket grows for ever",
            f"{command} prints one; or run 'kvtiers store prune' from time to time",
        )
    else:
        yield Finding("ok", f"values are removed {effect.objects} days after they were written")
    if effect.uploads is None:
        yield Finding(
            "warning",
            "no lifecycle rule aborts uploads that a killed process left; their parts are invisible, and paid for",
            f"{command} prints one",
        )
    else:
        yield Finding("ok", f"uploads that never ended are aborted after {effect.uploads} days")


def _uploads(bucket: Bucket, prefix: str) -> Iterator[Finding]:
    begun = [upload.started for upload in islice(bucket.uploads(prefix), _MOST_COUNTED)]
    if begun:
        count = f"{len(begun)}{' or more' if len(begun) == _MOST_COUNTED else ''} uploads"
        yield Finding("ok", f"{count} in flight, or left behind; the oldest was begun {min(begun):%F %T} UTC")


def _versions(bucket: Bucket, _prefix: str) -> Iterator[Finding]:
    if bucket.is_versioned():
        yield Finding(
            "warning",
            "the bucket keeps versions: values that are deleted or replaced stay, and are paid for",
            "suspend versioning, or add a lifecycle rule with NoncurrentVersionExpiration",
        )


def speed_findings(store: ChunkStore, value_bytes: int) -> Iterator[Finding]:
    """Write a value of this length and a small one, read each a few times, and compare."""
    small, large = (_seconds_to_read(store, nbytes) for nbytes in (_SMALL, value_bytes))
    both = f"a value of {format_size(value_bytes)} is read in {format_duration(large)}"
    if small < large / 2:
        yield Finding("ok", f"{both}, {format_duration(small)} of it the request itself")
        return
    rate = (value_bytes - _SMALL) / max(large - small, 1e-9)
    better = max(min(max(int(small * rate), 1 << 20), _MOST_SUGGESTED), 2 * value_bytes)
    better = 1 << (better - 1).bit_length()
    yield Finding(
        "warning",
        f"{both}, {format_duration(min(small, large))} of it the request itself: more requests than bytes are paid for",
        f"raise blocks_per_chunk some {better // value_bytes} times, to values of {format_size(better)}",
    )


def _seconds_to_read(store: ChunkStore, nbytes: int) -> float:
    name = f"_check/{secrets.token_hex(16)}"
    value = memoryview(mmap.mmap(-1, nbytes))
    store.write(name, value.toreadonly())
    try:
        return statistics.median(_seconds(lambda: store.read_into(name, value)) for _ in range(_READS))
    finally:
        store.delete([name])


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
