"""Connections to one server: redis-py connects, logs in and speaks TLS; then its socket is ours."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.credentials import CredentialProvider
from redis.exceptions import ResponseError
from redis.retry import Retry

from kvtiers.api import Secret, TierUnavailable
from kvtiers_redis.link import Link, ReplyError
from kvtiers_redis.plugin import RedisConfig
from kvtiers_redis.windows import ask, command

__all__ = ["Server", "client_options", "sentinel_options"]

_MOST_IDLE = 16
_KEEPALIVE_PROBES = 3


class _LogIn(CredentialProvider):
    """User and password, read anew at each connection."""

    def __init__(self, username: str, password: Secret) -> None:
        self._username, self._password = username, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.reveal()
        return (self._username, password) if self._username else (password,)


def client_options(config: RedisConfig) -> dict[str, Any]:
    """Return redis-py's options for a client of a server."""
    options = _connection_options(config) | _log_in(config.username, config.password)
    return options | ({"db": config.database_number} if config.database_number else {})


def sentinel_options(config: RedisConfig) -> dict[str, Any]:
    """Return redis-py's options for a client of a Sentinel."""
    return _connection_options(config) | _log_in(config.sentinel_username, config.sentinel_password)


def _log_in(username: str, password: Secret | None) -> dict[str, Any]:
    return {"credential_provider": _LogIn(username, password)} if password is not None else {}


def _connection_options(config: RedisConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,  # nothing but replies comes over the connection, in the order of the requests
        "retry": Retry(NoBackoff(), 0),  # core retries
        "socket_connect_timeout": config.connect_timeout,
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
        options["ssl"] = True
        options["ssl_check_hostname"] = config.tls_check_hostname
        files = {"ssl_ca_certs": config.tls_ca, "ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
        options |= {name: str(path) for name, path in files.items() if path is not None}
    return options


class _Lent(NamedTuple):
    """redis-py's connection, which owns the socket, and our use of it."""

    connection: Connection
    link: Link


class Server:
    """One server: a redis-py client for what is rare, and links for values, as many as there are callers at a time.

    ``hold``: after it could not be reached, it counts as not reachable for so many seconds without being tried.
    """

    def __init__(self, client: Redis, config: RedisConfig, name: str, *, hold: float = 0.0) -> None:
        self.client = client
        self.name = name
        self._config = config
        self._hold = hold
        self._lock = threading.Lock()
        self._idle: list[_Lent] = []  # the last one used is the first to be used again
        self._closed = False
        self._unreachable: tuple[float, str] = (0.0, "")
        self.connects = 0
        """Connections made, ever."""

    @property
    def host(self) -> str:
        """The host of a server with an address; empty for one behind a UNIX socket or Sentinels."""
        return str(self.client.connection_pool.connection_kwargs.get("host", ""))

    @contextlib.contextmanager
    def link(self) -> Iterator[Link]:
        """Lend a link. It is closed if anything is raised meanwhile, with all idle ones: they may be as dead."""
        lent = self._take() or self._connect()
        try:
            yield lent.link
        except BaseException:
            lent.connection.disconnect()
            self.drop_idle()
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) < _MOST_IDLE
            if keep:
                self._idle.append(lent)
        if not keep:
            lent.connection.disconnect()

    def ping(self) -> None:
        """See that the server answers and lets us in."""
        with self.link() as link:
            (answer,) = ask(link, [command(b"PING")])
            if isinstance(answer, ReplyError) and answer.code != "NOPERM":  # whom it forbids PING it has let in
                raise TierUnavailable(f"{self.name}: {answer}")

    def drop_idle(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for lent in idle:
            lent.connection.disconnect()

    def close(self) -> None:
        """Close everything; what is in use is closed when it is given back."""
        self._closed = True
        self.drop_idle()
        self.client.close()

    def _take(self) -> _Lent | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                lent = self._idle.pop()
            if lent.link.is_idle():
                return lent
            lent.connection.disconnect()  # the server has closed it: restarted, most likely

    def _connect(self) -> _Lent:
        until, text = self._unreachable
        if time.monotonic() < until:
            raise TierUnavailable(text)
        pool = self.client.connection_pool
        options = {**pool.connection_kwargs, "socket_timeout": self._config.connect_timeout}
        connection: Connection = pool.connection_class(**options)
        try:
            connection.connect()
            self._set_name(connection)
        except BaseException as error:
            connection.disconnect()
            self._unreachable = (time.monotonic() + self._hold, str(error))
            raise
        self.connects += 1
        connected = connection._sock  # noqa: SLF001 -- redis-py lends it by no public name
        assert connected is not None
        return _Lent(connection, Link(connected, self._config.reply_seconds))

    def _set_name(self, connection: Connection) -> None:
        if self._config.client_name:
            connection.send_command("CLIENT", "SETNAME", self._config.client_name)
            with contextlib.suppress(ResponseError):  # an ACL may forbid it; values move all the same
                connection.read_response()
