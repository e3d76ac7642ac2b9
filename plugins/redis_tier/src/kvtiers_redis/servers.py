"""The connections to one server: redis-py opens them and logs in; then this module uses their sockets."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from redis import Redis
from redis.connection import Connection
from redis.exceptions import RedisError, ResponseError

from kvtiers.api import TierUnavailable
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.link import Link, ReplyError
from kvtiers_redis.places import is_loopback
from kvtiers_redis.windows import ask, command, to_the_end

__all__ = ["Server", "warn_of_clear_text"]

_log = logging.getLogger("kvtiers_redis")
# Its other replies to a PING (NOPERM, MISCONF of one that cannot save) mean that the log-in has succeeded.
_NOT_LET_IN = frozenset({"NOAUTH", "LOADING"})


class _Leased(NamedTuple):
    """redis-py's connection, which owns the socket, and the link over it."""

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
        self._idle: list[_Leased] = []  # the last one used is the first to be used again
        self._closed = False
        self._unreachable: tuple[float, str] = (0.0, "")
        self.is_local = not self.host or is_loopback(self.host)
        """Whether it is on this machine: by its name, and once it has been connected to by its address."""
        self.connects = 0
        """Connections made, ever."""

    @property
    def host(self) -> str:
        """The host of a server with an address; empty for one behind a UNIX socket or Sentinels."""
        return str(self.client.connection_pool.connection_kwargs.get("host", ""))

    @contextlib.contextmanager
    def link(self) -> Iterator[Link]:
        """Yield a link. It is closed if anything is raised meanwhile, with all idle ones, which may be dead too."""
        leased = self._take() or self._connect()
        try:
            yield leased.link
        except BaseException:
            leased.connection.disconnect()
            self.drop_idle()
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) <= self._config.threads
            if keep:
                self._idle.append(leased)
        if not keep:
            leased.connection.disconnect()

    def ping(self) -> None:
        """Check that the server answers and accepts the log-in; raise TierUnavailable with the problem otherwise."""
        try:
            with self.link() as link:
                [[answer]] = to_the_end([ask(link, [command(b"PING")])])
        except (OSError, RedisError) as error:
            raise TierUnavailable(f"{self.name}: {error}") from None
        if isinstance(answer, ReplyError) and answer.code in _NOT_LET_IN:
            raise TierUnavailable(f"{self.name}: {answer}")

    def drop_idle(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for leased in idle:
            leased.connection.disconnect()

    def close(self) -> None:
        """Close everything; connections in use are closed when they are released."""
        self._closed = True
        self.drop_idle()
        self.client.close()

    def _take(self) -> _Leased | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                leased = self._idle.pop()
            if leased.link.is_idle():
                return leased
            leased.connection.disconnect()  # the server has closed it: restarted, most likely

    def _connect(self) -> _Leased:
        until, text = self._unreachable
        if time.monotonic() < until:
            raise TierUnavailable(text)
        pool = self.client.connection_pool
        options = {**pool.connection_kwargs, "socket_timeout": self._config.connect_seconds}
        connection: Connection = pool.connection_class(**options)
        try:
            connection.connect()
            self._set_name(connection)
            connected = connection._sock  # noqa: SLF001 -- redis-py has no public name for it
            assert connected is not None
            # Sentinels and Clusters name servers that the url does not.
            self.is_local = connected.family == socket.AF_UNIX or is_loopback(connected.getpeername()[0])
            if self.is_local and connected.family != socket.AF_UNIX:
                _do_not_pace(connected)
        except BaseException as error:
            connection.disconnect()
            self._unreachable = (time.monotonic() + self._hold, str(error))
            raise
        self.connects += 1
        if not self._config.places.tls and not self.is_local:
            warn_of_clear_text(self._config.url)
        return _Leased(connection, Link(connected, self._config.reply_seconds))

    def _set_name(self, connection: Connection) -> None:
        if self._config.client_name:
            connection.send_command("CLIENT", "SETNAME", self._config.client_name)
            with contextlib.suppress(ResponseError):  # an ACL may forbid it; values move all the same
                connection.read_response()


def _do_not_pace(loopback: socket.socket) -> None:
    """Have the kernel send at once what goes to this machine.

    BBR, where it is the system's default, spaces packets by timers also there: values of 1 MiB took a third more of the
    processors' time and arrived at 0.7 of the rate. Reno, which every Linux has, does not.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or an administrator has forbidden it
        loopback.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


@cache  # a tier makes many connections, and one that cannot be opened is opened again and again
def warn_of_clear_text(url: str) -> None:
    """Warn once in this process that this tier's values travel in clear text."""
    _log.warning("values travel in clear text to other machines (%s); use rediss:// for TLS", url, extra={"once": True})
