"""S3's failures: what each of its codes means, and what to do about it."""

from kvtiers_objectstore.failures import Failures

__all__ = ["FAILURES"]

_KEYS = "check access_key and secret_key, or which profile or chain gives the credentials"
_REGION = "set 'region' to the bucket's region"
_HINTS = {
    "InvalidAccessKeyId": f"the server has no such access key; {_KEYS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key; {_KEYS}",
    "ExpiredToken": "the session token has expired; renew it, or use a role or a profile that renews itself",
    "InvalidToken": "the session token does not belong to the keys; check session_token",
    "RequestTimeTooSkewed": "this machine's clock is wrong; run an NTP service",
    "NoSuchBucket": "there is no such bucket here; check bucket, endpoint and region, or create it",
    "AccessDenied": "not allowed; grant s3:GetObject, s3:PutObject, s3:DeleteObject on the objects and s3:ListBucket "
    "on the bucket, without which S3 answers 'denied' for an absent object",
    "PermanentRedirect": f"the bucket is in another region; {_REGION}",
    "TemporaryRedirect": f"the bucket is in another region; {_REGION}",
    "AuthorizationHeaderMalformed": f"signed for another region than the bucket's; {_REGION}",
    "IllegalLocationConstraintException": f"the bucket is in another region; {_REGION}",
    "InvalidStorageClass": "the server has no such storage class; check storage_class",
    "MissingContentLength": "the server does not take checksums behind the body; set 'checksums: when_required'",
    "NotImplemented": "the server cannot do that; see the table of servers in the README of kvtiers-s3",
    "KMS.NotFoundException": "there is no such key; check kms_key",
}
_BY_STATUS = {
    301: "PermanentRedirect",
    307: "TemporaryRedirect",
    308: "PermanentRedirect",
    403: "AccessDenied",
    429: "SlowDown",
    501: "NotImplemented",
    503: "SlowDown",
}
FAILURES = Failures(
    hints=_HINTS,
    by_status=_BY_STATUS,
    absent_place={"NoSuchBucket"},
    full={"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "EntityTooLarge"},
    throttles={"Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"},
    passing={"RequestTimeout", "InternalError", "OperationAborted", "ConditionalRequestConflict"},
)
"""The failures of S3."""
