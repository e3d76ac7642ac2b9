"""What is Google Cloud Storage's own in the tests that object stores share."""

from pathlib import Path

from libraries.objectstore.tests.differences import Cure, Differences

from kvtiers_gcs.config import GcsConfig
from kvtiers_gcs.store import GcsStore
from kvtiers_objectstore.testing.proxy import Fault, refusal

__all__ = ["GCS"]

GCS = Differences(
    folder=Path(__file__).parents[1],
    config_class=GcsConfig,
    store_class=GcsStore,
    options={"type": "gcs", "bucket": "kv-cache"},
    part=5 << 20,
    delete_batch=1,
    lasting={
        "no permission": Fault(refusal(403, "AccessDenied")),
        "a refused token": Fault(refusal(401, "AuthenticationRequired")),
        "a request that is not understood": Fault(refusal(400, "InvalidArgument")),
        "no billing": Fault(refusal(403, "UserProjectAccountProblem")),
        "a missing bucket": Fault(refusal(404, "NoSuchBucket")),
        "readers who pay": Fault(refusal(400, "UserProjectMissing")),
    },
    cures=[
        Cure(401, "AuthenticationRequired", "the token is not taken; check credentials_file"),
        Cure(401, "", "the token is not taken; check credentials_file"),
        Cure(403, "AccessDenied", "grant the role 'Storage Object User' (roles/storage.objectUser) on the bucket"),
        Cure(403, "UserProjectAccountProblem", "there is a problem with the project's billing"),
        Cure(403, "RequestTimeTooSkewed", "this machine's clock is wrong; run an NTP service"),
        Cure(429, "SlowDown", "too many requests at once for this bucket"),
        Cure(503, "", "503 SlowDown: too many requests"),
        Cure(400, "UserProjectMissing", "the bucket wants its readers to pay"),
    ],
    wrong=({"bucket": "there-is-none"}, "there is no such bucket here; check bucket"),
    unfit=[
        ({"credentials": "{}", "credentials_file": "/x"}, "are several sources of credentials"),
        ({"credentials": "{}", "anonymous": True, "endpoint": "http://x"}, "are several sources of credentials"),
        ({"anonymous": True}, "anonymous needs the endpoint of an emulator"),
        ({"storage_class": "ARCHIVE"}, "'bucket', 'STANDARD', 'NEARLINE' or 'COLDLINE'"),
        ({"endpoint": "https://x/storage"}, "expected 'https://HOST'"),
    ],
)
