"""What is S3's own in the tests that object stores share."""

from pathlib import Path

from libraries.objectstore.tests.differences import Cure, Differences

from kvtiers_objectstore.testing.proxy import Fault, refusal
from kvtiers_s3.config import S3Config
from kvtiers_s3.store import S3Store

__all__ = ["CLIENTS", "S3"]

CLIENTS = ["obstore", "boto3"]

S3 = Differences(
    folder=Path(__file__).parents[1],
    config_class=S3Config,
    store_class=S3Store,
    options={"type": "s3", "bucket": "some-bucket"},
    part=5 << 20,
    delete_batch=1000,
    values=1203,  # more than a request lists or deletes
    lasting={
        "a wrong key": Fault(refusal(403, "InvalidAccessKeyId")),
        "a wrong secret": Fault(refusal(403, "SignatureDoesNotMatch")),
        "an expired token": Fault(refusal(400, "ExpiredToken")),
        "no permission": Fault(refusal(403, "AccessDenied")),
        "a missing bucket": Fault(refusal(404, "NoSuchBucket")),
        "a redirect": Fault(refusal(301, "PermanentRedirect")),
        "a wrong region": Fault(refusal(400, "AuthorizationHeaderMalformed")),
    },
    cures=[
        Cure(400, "ExpiredToken", "the session token has expired; renew it"),
        Cure(403, "RequestTimeTooSkewed", "this machine's clock is wrong"),
        Cure(500, "InternalError", "500 InternalError"),
        Cure(503, "SlowDown", "503 SlowDown"),
        Cure(429, "TooManyRequests", "429 TooManyRequests"),
    ],
    wrong=(
        {"access_key": "ABSENT", "secret_key": "canary-secret"},
        "the server has no such access key; check access_key",
    ),
    unfit=[
        ({"access_key": "a"}, "go together"),
        ({"secret_key": "a"}, "go together"),
        ({"session_token": "a"}, "belongs to an access_key"),
        ({"profile": "p", "access_key": "a", "secret_key": "b"}, "two sources of credentials"),
        ({"kms_key": "k"}, "needs 'encryption: sse-kms'"),
        ({"encryption": "sse-s3", "kms_key": "k"}, "needs 'encryption: sse-kms'"),
        ({"role_external_id": "x"}, "belongs to a role"),
        ({"storage_class": "DEEP_ARCHIVE"}, "cannot be read before they are restored"),
        ({"endpoint": "https://s3.local/bucket"}, "expected 'https://HOST'"),
        ({"sts_endpoint": "https://s3.local/bucket"}, "expected 'https://HOST'"),
    ],
)
