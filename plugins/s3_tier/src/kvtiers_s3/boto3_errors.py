"""boto3's exceptions in the words of ``failures``."""

import urllib3.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    SSLError,
)

from kvtiers_s3.failures import failure

__all__ = ["translated"]


def translated(what: str, error: Exception) -> Exception:
    """Return what to raise for an error of boto3's."""
    if isinstance(error, ClientError):
        answer = error.response["Error"]
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(answer.get("Code", ""))
        return failure(what, status, "" if code.isdigit() else code, str(answer.get("Message") or ""))
    return failure(what, 0, _cause(error), f"{type(error).__name__}: {error}")


def _cause(error: Exception) -> str:
    text = str(error)
    match error:
        case SSLError():
            return "Certificate" if "CERTIFICATE" in text.upper() else "NotTls"
        case ConnectTimeoutError() | ReadTimeoutError() | TimeoutError() | urllib3.exceptions.TimeoutError():
            return "Timeout"
        case EndpointConnectionError():
            reason = error.kwargs.get("error")
            return "NoAddress" if isinstance(reason, urllib3.exceptions.NameResolutionError) else "NoConnection"
        case ConnectionClosedError() | HTTPClientError() | IncompleteReadError():
            return "CutOff"
        case BotoCoreError() | KeyError() | ValueError():
            # The latter two are of an answer that lacks a length, or has one that is no number.
            return "" if isinstance(error, BotoCoreError) else "NoLength"
    return "CutOff"  # by the system, or by urllib3 in the middle of a body
