"""The failures of Google Cloud Storage: what each code of its XML API means, and what to do about it."""

from kvtiers_objectstore.failures import Failures

__all__ = ["CLOCK", "FAILURES", "NO_CREDENTIALS"]

CLOCK = "this machine's clock is wrong; run an NTP service"
NO_CREDENTIALS = (
    "give credentials_file, run 'gcloud auth application-default login', or give the machine or pod a service account"
)
_ROLE = (
    "grant the role 'Storage Object User' (roles/storage.objectUser) on the bucket; without the right to list, the "
    "service answers 'denied' for an absent object"
)
_REGION = "the bucket is at another endpoint; check endpoint"
_HINTS = {
    "AuthenticationRequired": "the token is not taken; check credentials_file, and that its key is not deleted",
    "InvalidSecurity": "the token is not taken; check credentials_file, and that its key is not deleted",
    "ExpiredToken": f"the token has expired; {CLOCK}",
    "RequestTimeTooSkewed": CLOCK,
    "AccessDenied": f"not allowed; {_ROLE}",
    "AccountProblem": "there is a problem with the project's billing; see it in the console",
    "UserProjectAccountProblem": "there is a problem with the project's billing; see it in the console",
    "UserProjectMissing": "the bucket wants its readers to pay, which is not supported; use another bucket",
    "NoSuchBucket": "there is no such bucket here; check bucket and endpoint, or create it",
    "SlowDown": "too many requests at once for this bucket, which takes more after some minutes; lower rate limits",
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "NotImplemented": "the server cannot do that; an emulator needs the XML API with uploads",
    "ObjectUnderActiveHold": "the bucket keeps objects from being replaced; use one without holds",
    "Credentials": NO_CREDENTIALS,
    "NoToken": "no answer from the service that gives out tokens; check the network",
}
FAILURES = Failures(
    hints=_HINTS,
    by_status={
        301: "PermanentRedirect",
        307: "TemporaryRedirect",
        308: "PermanentRedirect",
        401: "AuthenticationRequired",
        403: "AccessDenied",
        429: "SlowDown",
        501: "NotImplemented",
        503: "SlowDown",
    },
    absent_place=frozenset({"NoSuchBucket"}),
    full=frozenset({"QuotaExceeded", "EntityTooLarge"}),
    throttles=frozenset({"TooManyRequests", "RateLimitExceeded"}),
    passing=frozenset({"InternalError", "ServiceUnavailable", "OperationAborted", "RequestTimeout"}),
)
"""The failures of Google Cloud Storage."""
