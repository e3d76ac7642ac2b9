"""redis-py's clients, made from the tier's options: they connect, log in, use TLS and follow Sentinels."""

import socket
import ssl
from typing import Any

from redis import ConnectionPool, Redis, SSLConnection
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelManagedConnection

from kvtiers.api import Secret
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.places import Address

__all__ = ["client_of", "client_over_socket", "cluster_of", "sentinel_of"]

_KEEPALIVE_PROBES = 3


class _LogIn(CredentialProvider):
    """User and password, read again at each connection."""

    def __init__(self, username: str, password: Secret) -> None:
        self._username, self._password = username, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.reveal()
        return (self._username, password) if self._username else (password,)


class _TlsConnection(SSLConnection):
    """Trusts the CA that it is given and no other, and spends no 20 ms a connection on reading the system's."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.ca_certs)
        context.check_hostname = self.check_hostname
        if self.certfile:
            context.load_cert_chain(self.certfile, self.keyfile)
        return context.wrap_socket(sock, server_hostname=self.host)


class _SentinelTlsConnection(SentinelManagedConnection, _TlsConnection):
    """The same to the master that Sentinels name."""


def _client_options(config: RedisConfig) -> dict[str, Any]:
    """Return redis-py's options for a connection to a server."""
    options = _connection_options(config) | _log_in(config.username, config.password)
    return options | ({"db": config.database_number} if config.database_number else {})


def client_of(address: Address, config: RedisConfig) -> Redis:
    """Return a client of the server at this address. Like the others it connects when it is used."""
    return _client_of(address, _client_options(config), tls=config.places.tls)


def client_over_socket(config: RedisConfig) -> Redis:
    """Return a client of the server behind a UNIX socket."""
    return Redis(unix_socket_path=config.places.path, **_client_options(config))


def sentinel_of(config: RedisConfig) -> tuple[Sentinel, Redis]:
    """Return a client of the Sentinels, and one that goes to the master that they name at each new connection."""
    tls = config.places.tls
    sentinel = Sentinel([], **_client_options(config))
    options = _connection_options(config) | _log_in(config.sentinel_username, config.sentinel_password)
    options["socket_timeout"] = config.connect_seconds  # one that hangs is passed over; asking them is connecting
    sentinel.sentinels = [_client_of(address, options, tls=tls) for address in config.places.addresses]
    more: dict[str, Any] = {"connection_class": _SentinelTlsConnection} if tls else {}
    return sentinel, sentinel.master_for(config.master, **more)


def cluster_of(config: RedisConfig) -> RedisCluster:
    """Return a client that has fetched the Cluster's nodes. ``disconnect_connection_pools`` closes it."""
    (host, port), *others = config.places.addresses
    options = _client_options(config)
    del options["retry"]  # it has one for all nodes
    options["socket_timeout"] = config.connect_seconds  # asking for the map is a part of connecting
    return RedisCluster(
        # It takes a connection class with a url alone, and with rediss:// its own, which trusts the system's CAs too.
        url=f"redis://{f'[{host}]' if ':' in host else host}:{port}",
        connection_class=_TlsConnection if config.places.tls else Connection,
        address_remap=config.reached_at,
        startup_nodes=[ClusterNode(*address) for address in others],
        require_full_coverage=False,  # some slots without a node are no reason to do without the others
        # It asks one node which commands there are, and another one if that does not answer.
        retry=Retry(NoBackoff(), len(config.places.addresses) + 1),
        **options,
    )


def _client_of(address: Address, options: dict[str, Any], *, tls: bool) -> Redis:
    host, port = address
    more: dict[str, Any] = {"connection_class": _TlsConnection} if tls else {}
    return Redis.from_pool(ConnectionPool(host=host, port=port, **options, **more))


def _log_in(username: str, password: Secret | None) -> dict[str, Any]:
    return {"credential_provider": _LogIn(username, password)} if password is not None else {}


def _connection_options(config: RedisConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,  # nothing but replies comes over the connection, in the order of the requests
        "retry": Retry(NoBackoff(), 0),  # core retries
        "driver_info": None,  # two more round trips a connection, and a permission that older servers do not have
        "socket_connect_timeout": config.connect_seconds,
        "socket_timeout": config.reply_seconds,
    }
    if not config.places.path:
        idle = round(config.keepalive)
        options["socket_keepalive_options"] = {
            socket.TCP_KEEPIDLE: idle,
            socket.TCP_KEEPINTVL: max(1, idle // _KEEPALIVE_PROBES),
            socket.TCP_KEEPCNT: _KEEPALIVE_PROBES,
        }
    if config.places.tls:
        options["ssl_check_hostname"] = config.tls_check_hostname
        files = {"ssl_ca_certs": config.tls_ca, "ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
        options |= {name: str(path) for name, path in files.items() if path is not None}
    return options
