"""The topology: which server has a key: one server, the master that Sentinels name, or the node of a Cluster."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from redis.exceptions import RedisError

from kvtiers.api import TierUnavailable
from kvtiers_redis.clients import client_of, client_over_socket, cluster_of, sentinel_of
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.places import Address
from kvtiers_redis.servers import Server

__all__ = ["Topology", "open_topology"]

_REFRESH_SECONDS = 0.25  # a failover takes seconds; all threads together look no oftener than this
_HOLD_SECONDS = 1.0


class Topology(ABC):
    """The servers of one tier. Used by several threads."""

    is_split = False
    """Whether the loss of one server leaves others that have values."""

    @abstractmethod
    def server_of(self, key: bytes) -> Server:
        """Return the server that has this key, as far as is known. TierUnavailable if none has."""

    @abstractmethod
    def masters(self) -> Sequence[Server]:
        """Return every server that has values of its own."""

    def servers(self) -> Sequence[Server]:
        """Return every server that was ever asked."""
        return self.masters()

    def server_at(self, address: Address) -> Server | None:  # noqa: ARG002 -- what a Cluster needs
        """Return the server at the address that a redirection names; None: this topology has no redirections."""
        return None

    def reach(self) -> None:
        """Connect to any one of the servers; if none can be reached, raise the error of the last one."""
        masters = self.masters()
        for server in masters:
            try:
                server.ping()
            except TierUnavailable:
                if server is masters[-1]:
                    raise
            else:
                return

    def refresh(self) -> None:
        """Fetch the map of keys again, because a server does not answer, or no longer has a key."""

    def close(self) -> None:
        """Close all connections."""
        for server in self.servers():
            server.close()


def open_topology(config: RedisConfig) -> Topology:
    """Return what the config describes. Nothing is connected yet, except that a Cluster is asked for its nodes."""
    if config.topology == "cluster":
        return _Cluster(config)
    if config.topology == "sentinel":
        return _Sentinels(config)
    if config.places.path:
        return _Single(Server(client_over_socket(config), config, config.places.path))
    (address,) = config.places.addresses
    return _Single(_server_at(address, config))


def _server_at(address: Address, config: RedisConfig, *, hold: float = 0.0) -> Server:
    return Server(client_of(address, config), config, f"{address[0]}:{address[1]}", hold=hold)


class _Single(Topology):
    def __init__(self, server: Server) -> None:
        self._server = server

    def server_of(self, key: bytes) -> Server:  # noqa: ARG002 -- all keys are there
        return self._server

    def masters(self) -> Sequence[Server]:
        return [self._server]

    def refresh(self) -> None:
        """Close the old connections, which is all that a failover takes: new ones lead to the new master."""
        self._server.drop_idle()


class _Sentinels(_Single):
    """The master: redis-py asks the Sentinels for it at each new connection."""

    def __init__(self, config: RedisConfig) -> None:
        self._sentinel, client = sentinel_of(config)
        super().__init__(Server(client, config, f"master {config.master!r}"))

    def close(self) -> None:
        super().close()
        self._sentinel.close()


class _Cluster(Topology):
    """redis-py keeps the map of the slots; connections are ours, by address, and outlive changes of the map."""

    is_split = True

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._refreshing = threading.Lock()
        self._refreshed = 0.0
        self._cluster = cluster_of(config)

    def server_of(self, key: bytes) -> Server:
        try:
            node = self._cluster.get_node_from_key(key)
        except RedisError as error:
            raise TierUnavailable(str(error)) from None
        return self._reached((node.host, node.port))

    def server_at(self, address: Address) -> Server:
        return self._reached(self._config.reached_at(address))

    def _reached(self, address: Address) -> Server:
        server = self._servers.get(address)
        if server is None:
            with self._lock:
                server = self._servers.get(address)
                if server is None:
                    server = self._servers[address] = _server_at(address, self._config, hold=_HOLD_SECONDS)
        return server

    def servers(self) -> Sequence[Server]:
        return list(self._servers.values())

    def masters(self) -> Sequence[Server]:
        return [self._reached((node.host, node.port)) for node in self._cluster.get_primaries()]

    def refresh(self) -> None:
        with self._refreshing:
            if time.monotonic() < self._refreshed + _REFRESH_SECONDS:
                return
            try:
                self._cluster.nodes_manager.initialize()
            except (RedisError, OSError):  # no node answers; the map stays, and the next request fails in the same way
                return
            finally:
                self._refreshed = time.monotonic()

    def close(self) -> None:
        super().close()
        self._cluster.disconnect_connection_pools()
