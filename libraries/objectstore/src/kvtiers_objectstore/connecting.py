"""The connections of obstore: the options of its HTTP client, from those of a tier."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvtiers.api import ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

__all__ = ["NO_RETRIES", "ConnectionOptions", "client_options", "read_certificates"]

NO_RETRIES: "RetryConfig" = {"max_retries": 0, "retry_timeout": timedelta(0)}
"""Core retries, inside its deadline; obstore would wait beside it."""
# A server that closes an idle connection cuts off a request that was sent at this moment. Node and Apache wait for 5 s;
# the HTTP client would keep connections for 90.
_IDLE_SECONDS = 4.0


class ConnectionOptions(Protocol):
    """The options about connections that every such tier has; times in seconds."""

    @property
    def connect_timeout(self) -> float:
        """The longest time to establish a connection."""

    @property
    def timeout(self) -> float:
        """The longest time of one request, body included."""

    @property
    def connections(self) -> int:
        """How many connections are kept."""


def client_options(
    options: ConnectionOptions, endpoint: str, user_agent: str, certificates: bytes = b""
) -> "ClientConfig":
    """Return the options of obstore's HTTP client. ``certificates``: of a private authority, as PEM."""
    found: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        "timeout": timedelta(seconds=options.timeout),
        "pool_max_idle_per_host": str(options.connections),
        "pool_idle_timeout": timedelta(seconds=_IDLE_SECONDS),
        "user_agent": user_agent,
    }
    if certificates:
        found["root_certificate"] = certificates
    return found


def read_certificates(file: Path | None) -> bytes:
    """Return the certificates in this file, or ConfigError; empty without a file."""
    if file is None:
        return b""
    try:
        certificates = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"ca_file {str(file)!r} cannot be read: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise ConfigError(f"ca_file {str(file)!r} has no certificate in it; expected PEM")
    return certificates
