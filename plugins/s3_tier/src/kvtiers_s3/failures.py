"""S3's failures: each error of S3 as one clear line and one of three kinds.

::

    S3Error                 a retry changes nothing: keys, rights, region, certificates
    └── S3BusyError         the same request may succeed: time-outs, resets, 500s; core tries again, with growing pauses
        └── S3ThrottledError    ... because there were too many requests
    StoreFull (kvtiers)     a quota is used up
"""

from kvtiers.api import StoreFull

__all__ = ["S3BusyError", "S3Error", "S3ThrottledError", "failure"]


class S3Error(Exception):
    """A request that S3 refused. ``status``: of HTTP, 0 without an answer; ``code``: S3's own word for it, or ours."""

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class S3BusyError(S3Error):
    """A request that may succeed when it is retried."""


class S3ThrottledError(S3BusyError):
    """S3 asks for fewer requests."""


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
    "Certificate": "the server's certificate is not trusted; give its authority's certificate as ca_file",
    "NotTls": "the server does not speak TLS there; check endpoint (http:// or https://, and its port)",
    "NoAddress": "the name of the endpoint has no address; check endpoint",
    "NoConnection": "no server answers there; check endpoint, and that the server runs",
    "Timeout": "no answer in time; the server is slow or far away (timeout, connect_timeout)",
    "CutOff": "the connection ended in the middle of an answer",
    "NoLength": "the answer does not say how long the object is, or which part of it this is; where a server "
    "cannot send parts, set part_size to the values' length or more",
    "Replaced": "the object was replaced while it was read",
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
_FULL = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}
_THROTTLES = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_PASSING = {
    "RequestTimeout",
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    "NoConnection",
    "Timeout",
    "CutOff",
    "NoAddress",
    "Replaced",
}


def failure(what: str, status: int, code: str = "", detail: str = "") -> Exception:
    """Return what to raise for a request that failed.

    ``what``: the request, as ``GET KEY``. ``code``: S3's own, or without one of those one of ours: Certificate, NotTls,
    NoAddress, NoConnection, Timeout, CutOff, NoLength, Replaced, Credentials. ``detail``: what is said without a hint.
    """
    code = code or _BY_STATUS.get(status, "")
    answer = " ".join(part for part in (str(status or ""), code) if part)
    text = ": ".join(part for part in (what, answer, _HINTS.get(code, detail)) if part)
    if code in _FULL or status == 507:
        return StoreFull(text)
    if code in _THROTTLES or status == 429:
        return S3ThrottledError(text, status, code)
    if code in _PASSING or (status >= 500 and code != "NotImplemented"):
        return S3BusyError(text, status, code)
    return S3Error(text, status, code)
