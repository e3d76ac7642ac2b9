"""What is Azure's own in the tests that object stores share."""

import base64
from pathlib import Path

from libraries.objectstore.tests.differences import PASSING, Cure, Differences

from kvtiers_azure.config import AzureConfig
from kvtiers_azure.store import AzureStore
from kvtiers_objectstore.testing.proxy import Fault, refusal

__all__ = ["AZURE", "WRONG_KEY"]

WRONG_KEY = base64.b64encode(b"not the key").decode()

AZURE = Differences(
    folder=Path(__file__).parents[1],
    config_class=AzureConfig,
    store_class=AzureStore,
    options={"type": "azure", "account": "acc", "container": "kv-cache"},
    part=1 << 20,
    delete_batch=256,
    bucket="container",
    no_bucket="ContainerNotFound",
    passing={
        **PASSING,
        "a busy server": Fault(refusal(503, "ServerBusy")),
        "an operation that timed out": Fault(refusal(500, "OperationTimedOut")),
    },
    lasting={
        "no permission": Fault(refusal(403, "AuthorizationPermissionMismatch")),
        "a refused key": Fault(refusal(403, "AuthenticationFailed")),
        "a refused token": Fault(refusal(401, "AuthenticationRequired")),
        "a request that is not understood": Fault(refusal(400, "InvalidArgument")),
        "a missing container": Fault(refusal(404, "ContainerNotFound")),
        "an archived blob": Fault(refusal(409, "BlobArchived")),
    },
    cures=[
        Cure(403, "AuthenticationFailed", "the key or signature is not this account's", "Make sure the value ..."),
        Cure(
            403, "AuthenticationFailed", "this machine's clock is wrong; run an NTP", "Request date header too old: x"
        ),
        Cure(403, "AuthenticationFailed", "issue another one", "Signature not valid in the specified time frame"),
        Cure(403, "AuthenticationFailed", "the key is not this account's", "Signature did not match."),
        Cure(403, "KeyBasedAuthenticationNotPermitted", "the account takes no keys; set 'identity'"),
        Cure(403, "AuthorizationPermissionMismatch", "grant the role 'Storage Blob Data Contributor'"),
        Cure(403, "", "403 AccessDenied: not allowed; grant the role"),
        Cure(401, "", "the token is not taken; check identity"),
        Cure(503, "ServerBusy", "too many requests for this account; lower rate limits"),
        Cure(429, "TooManyRequests", "429 TooManyRequests"),
        Cure(403, "AccountIsDisabled", "the account is disabled"),
    ],
    wrong=({"account_key": WRONG_KEY}, "check account_key, sas or connection_string"),
    unfit=[
        ({"account": ""}, "account is missing"),
        ({"account_key": "a2V5", "sas": "sig=x"}, "account_key and sas are several sources of credentials"),
        ({"account_key": "a2V5", "identity": "managed"}, "account_key and identity are several"),
        ({"emulator": True, "sas": "sig=x"}, "an emulator has its well-known key"),
        ({"identity": "service-principal"}, "client_secret and 'identity: service-principal' go together"),
        ({"client_secret": "x"}, "client_secret and 'identity: service-principal' go together"),
        ({"identity": "service-principal", "client_secret": "x"}, "needs tenant, client_id and client_secret"),
        ({"token_file": "/x"}, "token_file needs 'identity: workload'"),
        ({"access_tier": "Archive"}, "'Hot', 'Cool' or 'Cold'"),
    ],
)
