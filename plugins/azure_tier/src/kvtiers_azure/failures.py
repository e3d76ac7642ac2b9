"""Azure's failures: what each of its codes means, and what to do about it.

Source: the error codes of the Blob service's REST API, and the details that its messages give.
"""

from kvtiers_objectstore.failures import Failures

__all__ = ["FAILURES"]

_KEYS = "check account_key, sas or connection_string, and that they belong to this account"
_CLOCK = "this machine's clock is wrong; run an NTP service"
_ROLE = "grant the role 'Storage Blob Data Contributor' on the container, or a sas with the permissions racwdl"
_HINTS = {
    "AuthenticationFailed": f"the key or signature is not this account's, or the clock is wrong; {_KEYS}",
    "SignatureDoesNotMatch": f"the key is not this account's; {_KEYS}",
    "SignatureExpired": "the sas is not valid yet or not any more; issue another one",
    "RequestTimeTooSkewed": _CLOCK,
    "AuthorizationFailure": "not allowed: by the account's network rules, or the key is not this account's; "
    f"check the firewall of the account; {_KEYS}",
    "InvalidAuthenticationInfo": "the token is not taken; check identity, tenant and client_id",
    "NoAuthenticationInformation": "the request had no credentials; give account_key, sas or identity",
    "AuthorizationPermissionMismatch": f"not allowed; {_ROLE}",
    "AuthorizationServiceMismatch": "the sas is not for blobs; issue one for the blob service",
    "AuthorizationResourceTypeMismatch": "the sas is not for objects and containers; issue one with srt=co",
    "AuthorizationProtocolMismatch": "the sas wants https; check endpoint",
    "AuthorizationSourceIPMismatch": "the sas is for other addresses than this machine's; issue one for this one",
    "KeyBasedAuthenticationNotPermitted": "the account takes no keys; set 'identity'",
    "InsufficientAccountPermissions": f"not allowed; {_ROLE}",
    "AccountIsDisabled": "the account is disabled; see it in the portal",
    "AccessDenied": f"not allowed; {_ROLE}",
    "ContainerNotFound": "there is no such container here; check container, account and endpoint, or create it",
    "ResourceNotFound": "there is no such container here, or it is hidden; check container and account",
    "ContainerBeingDeleted": "the container is being deleted; create it again in some minutes",
    "ContainerDisabled": "the container is disabled; see it in the portal",
    "ServerBusy": "too many requests for this account; lower rate limits or threads, or spread over accounts",
    "BlobArchived": "the blob is in the archive and cannot be read; let no rule move values there",
    "BlobImmutableDueToPolicy": "the container keeps blobs from being replaced; use one without an immutability policy",
    "LeaseIdMissing": "another client holds a lease on the blob; use a container of the tier's own",
    "Credentials": "no token is given for this identity; check tenant, client_id, client_secret and the clock",
    "NoToken": "no answer from the service that gives out tokens; check identity and authority",
}
FAILURES = Failures(
    hints=_HINTS,
    by_status={401: "InvalidAuthenticationInfo", 403: "AccessDenied", 429: "ServerBusy", 503: "ServerBusy"},
    absent_place=frozenset({"ContainerNotFound", "ResourceNotFound", "ContainerDisabled"}),
    throttles=frozenset({"ServerBusy", "TooManyRequests"}),
    passing=frozenset({"InternalError", "OperationTimedOut", "ContainerBeingDeleted"}),
    finer=(
        ("specified container does not exist", "ContainerNotFound"),  # of a batch, whose parts have no code
        ("[Dd]ate header (is )?too old|Request date header", "RequestTimeTooSkewed"),
        ("not valid in the specified time frame", "SignatureExpired"),
        ("[Ss]ignature did not match|MAC signature found", "SignatureDoesNotMatch"),
    ),
)
"""The failures of Azure Blob Storage."""
