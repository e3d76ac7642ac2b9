"""Credentials: Google's own library finds them and gives out tokens, with which obstore asks.

obstore has a chain of its own, which lacks workload identity federation.
"""

import json
import threading
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any

import google.auth
from google.auth import aws, identity_pool, impersonated_credentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, RefreshError, TransportError
from google.auth.transport.requests import Request
from google.oauth2 import credentials as oauth2_credentials
from google.oauth2 import service_account

from kvtiers.api import ConfigError, TierUnavailable
from kvtiers_gcs.config import GcsConfig
from kvtiers_gcs.failures import CLOCK, NO_CREDENTIALS

if TYPE_CHECKING:
    from obstore.store import GCSCredential

__all__ = ["Tokens"]

_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]


class Tokens:
    """Tokens of the credentials that the options name, for obstore, which asks again before one expires.

    The first one is requested at once, so that what is wrong is said at once: ConfigError, or TierUnavailable where
    there is no answer.
    """

    refresh_threshold = timedelta(minutes=3, seconds=45)
    """With this much left obstore asks again. A machine's metadata service gives out no new token much sooner."""

    def __init__(self, config: GcsConfig) -> None:
        self._lock = threading.Lock()
        self._credentials = None if config.anonymous else _load(config)
        try:
            self()
        except RefreshError as error:
            raise ConfigError(f"credentials cannot be obtained: {_text(error)}{_cure(error)}") from None
        except GoogleAuthError as error:
            raise TierUnavailable(f"no token can be obtained: {_text(error)}") from None

    def __call__(self) -> "GCSCredential":
        """Return a token that is valid for some minutes."""
        if self._credentials is None:
            return {"token": "anonymous", "expires_at": None}
        with self._lock:
            try:
                if not self._credentials.valid:  # by google-auth's own threshold, which is the same
                    self._credentials.refresh(Request())
            except (TransportError, RefreshError) as error:
                if isinstance(error, TransportError) or error.retryable:
                    raise TransportError(f"token request: {_text(error)}") from None  # type: ignore[no-untyped-call]  # obstore's word: it may pass
                raise
            expiry = self._credentials.expiry
            return {"token": self._credentials.token, "expires_at": expiry.replace(tzinfo=UTC) if expiry else None}


def _load(config: GcsConfig) -> Any:
    try:
        if config.credentials is not None:
            return _of_type(json.loads(config.credentials.reveal()))
        if config.credentials_file is not None:
            return _of_type(json.loads(config.credentials_file.read_text(encoding="utf-8")))
        return google.auth.default(scopes=_SCOPES)[0]
    except json.JSONDecodeError:
        raise ConfigError("the credentials are not JSON; give a service account's key file, or its text") from None
    except OSError as error:
        raise ConfigError(
            f"credentials_file {str(config.credentials_file)!r} cannot be read: {error.strerror}"
        ) from None
    except (DefaultCredentialsError, ValueError, KeyError) as error:
        raise ConfigError(f"credentials cannot be obtained: {_text(error)}; {NO_CREDENTIALS}") from None


def _of_type(info: Any) -> Any:
    """Return the credentials of a file that ``gcloud`` or the console has made. ValueError: it is another file."""
    kind = info.get("type", "") if isinstance(info, dict) else ""
    source = info.get("credential_source") or {} if kind else {}
    match kind:
        case "service_account":
            return service_account.Credentials.from_service_account_info(info, scopes=_SCOPES)  # type: ignore[no-untyped-call]
        case "authorized_user":
            return oauth2_credentials.Credentials.from_authorized_user_info(info, _SCOPES)  # type: ignore[no-untyped-call]
        case "impersonated_service_account":
            return impersonated_credentials.Credentials.from_impersonated_service_account_info(  # type: ignore[no-untyped-call]
                info, scopes=_SCOPES
            )
        case "external_account" if str(source.get("environment_id", "")).startswith("aws"):
            return aws.Credentials.from_info(info, scopes=_SCOPES)  # type: ignore[no-untyped-call]
        case "external_account":
            return identity_pool.Credentials.from_info(info, scopes=_SCOPES)  # type: ignore[no-untyped-call]
    raise ValueError(
        f"type {kind!r} is none of service_account, external_account, impersonated_service_account, authorized_user"
    )


def _text(error: Exception) -> str:
    return str(error.args[0] if error.args else error).partition("\n")[0].rstrip(".")


def _cure(error: RefreshError) -> str:
    text = str(error)
    if "reasonable timeframe" in text or "iat and exp" in text:
        return f"; {CLOCK}"
    if "invalid_grant" in text or "invalid_client" in text:
        return "; the key is not known any more, or the login has ended: issue another one"
    return f"; {NO_CREDENTIALS}"
