"""boto3's exceptions in the words of the service's ``Failures``."""

import re

import urllib3.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)

from kvtiers_objectstore.failures import Failures

__all__ = ["ABSENT", "translated"]

ABSENT = {"NoSuchKey", "404", "InvalidRange", "416"}
"""The codes that say that there is no such object, or that it is shorter."""


def translated(failures: Failures, what: str, error: Exception) -> Exception:
    """Return what to raise for an error of boto3's."""
    if isinstance(error, ClientError):
        answer = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(answer.get("Code") or "")
        return failures.failure(what, status, "" if code.isdigit() else code, str(answer.get("Message") or ""))
    return failures.failure(what, 0, _cause(error), f"{type(error).__name__}: {error}")


def _cause(error: Exception) -> str:
    text, cause = str(error), "CutOff"  # by the system, or by urllib3 in the middle of a body
    match error:
        case SSLError():
            cause = "Certificate" if "CERTIFICATE" in text.upper() else "NotTls"
        case ProxyConnectionError():
            cause = _proxys_cause(str(error.kwargs.get("error")))
        case ConnectTimeoutError() | ReadTimeoutError() | TimeoutError() | urllib3.exceptions.TimeoutError():
            cause = "Timeout"
        case EndpointConnectionError():
            reason = error.kwargs.get("error")
            cause = "NoAddress" if isinstance(reason, urllib3.exceptions.NameResolutionError) else "NoConnection"
        case FileNotFoundError() | PermissionError() | IsADirectoryError():
            cause = "Credentials"  # nothing else is read from a file
        case KeyError() | ValueError():
            cause = "NoLength"  # the answer lacks a length, or has one that is no number
        case BotoCoreError() if not isinstance(error, HTTPClientError | IncompleteReadError):
            cause = ""
    return cause


def _proxys_cause(text: str) -> str:
    if refused := re.search(r"Tunnel connection failed: (\d+)", text):
        return "ProxyCredentials" if refused[1] == "407" else "ProxyTunnel"
    return "Certificate" if "CERTIFICATE" in text else "NoConnection"
