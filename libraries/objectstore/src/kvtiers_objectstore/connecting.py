"""The connections of obstore: the options of its HTTP client, from those of a tier."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from kvtiers.api import ConfigError
from kvtiers_objectstore.route import Route

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

__all__ = ["NO_RETRIES", "ConnectionOptions", "client_options", "making_a_client"]

NO_RETRIES: "RetryConfig" = {"max_retries": 0, "retry_timeout": timedelta(0)}
"""Core retries, inside its deadline; obstore would wait beside it."""
# A server that closes an idle connection cuts off a request that was sent at this moment. Node and Apache wait for 5 s;
# the HTTP client would keep connections for 90.
_IDLE_SECONDS = 4.0
# obstore's client takes the environment's proxy unless it is given one, and has no other way to be kept from it.
_ANY_PROXY = "http://127.0.0.1:9"


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
    options: ConnectionOptions, route: Route, user_agent: str, *, other_hosts: bool = False
) -> "ClientConfig":
    """Return the options of obstore's HTTP client for this route.

    ``other_hosts``: it also asks other hosts than the endpoint's, for tokens; then it finds each one's proxy by itself.
    """
    found: ClientConfig = {
        "allow_http": route.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        "timeout": timedelta(seconds=options.timeout),
        "pool_max_idle_per_host": str(options.connections),
        "pool_idle_timeout": timedelta(seconds=_IDLE_SECONDS),
        "user_agent": user_agent,
    }
    if route.certificates:
        found["root_certificate"] = route.certificates
    if not other_hosts:
        found["proxy_url"] = route.proxy or _ANY_PROXY
        if not route.proxy:
            found["proxy_excludes"] = route.host
    return found


@contextmanager
def making_a_client(what: str = "obstore's client cannot be made") -> Iterator[None]:
    """Translate what obstore raises while it makes a store into ConfigError. ``what``: how its line begins."""
    from obstore.exceptions import BaseError  # not at the top: obstore may not be installed, and is then not asked

    try:
        yield
    except BaseError as error:
        if "No CA certificates were loaded" in str(error):  # it makes none without, for http:// neither
            raise ConfigError(
                "no authorities' certificates are on this machine, and obstore makes no client without any; install "
                "the package ca-certificates, or name a file of them in SSL_CERT_FILE"
            ) from None
        raise ConfigError(f"{what}: {str(error).partition(chr(10))[0]}") from None
