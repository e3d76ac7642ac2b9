"""boto3's exceptions in the words of ``failures``."""

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
    ResponseStreamingError,
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
        case ConnectTimeoutError() | ReadTimeoutError():
            return "Timeout"
        case EndpointConnectionError():
            return "NoAddress" if "resolution" in text or "Name or service" in text else "NoConnection"
        case ConnectionClosedError() | ResponseStreamingError() | HTTPClientError() | ConnectionError():
            return "CutOff"
        case BotoCoreError():
            return ""
    return "CutOff"
