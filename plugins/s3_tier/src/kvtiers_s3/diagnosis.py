"""The diagnosis of the bucket, for ``kvtiers check``: its region, its rules, and what was left in it."""

from collections.abc import Iterator
from itertools import islice

from kvtiers.api import Finding
from kvtiers_objectstore.failures import ObjectStoreError
from kvtiers_s3.bucket import Bucket
from kvtiers_s3.lifecycle import effect_of

__all__ = ["bucket_findings"]

_MOST_COUNTED = 1000


def bucket_findings(bucket: Bucket, prefix: str) -> Iterator[Finding]:
    """Examine the bucket's settings. ``prefix``: what all keys start with, its ``/`` included."""
    for look in (_rules, _uploads, _versions):
        try:
            yield from look(bucket, prefix)
        except ObjectStoreError as error:
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
