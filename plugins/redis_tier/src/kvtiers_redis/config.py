"""Options of the tier type ``redis``."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvtiers.api import Duration, Secret, Size, TierConfig
from kvtiers.api.units import format_duration
from kvtiers_redis.places import Address, Places, parse_address, parse_url

__all__ = ["RedisConfig"]

# A small window stays in the processor's cache on its way; a large one hides a round trip of a millisecond and more.
_LOCAL_WINDOW, _REMOTE_WINDOW = 512 << 10, 4 << 20
_TLS_OPTIONS = ("tls_ca", "tls_cert", "tls_key")


class RedisConfig(TierConfig):
    """The options of a ``redis`` tier."""

    url: str = Field(
        description="redis://HOST:PORT/DATABASE, rediss:// with TLS, unix:///PATH; with commas, several Cluster nodes "
        "or all Sentinels"
    )
    topology: Literal["single", "cluster", "sentinel"] = Field(
        default="single", description="kind of the servers in the url: one server, nodes of a Cluster, or Sentinels"
    )
    address_map: dict[str, str] = Field(
        default_factory=dict,
        description="where nodes of a Cluster behind NAT are reached: HOST:PORT by the HOST:PORT that they announce",
    )
    master: str = Field(default="mymaster", min_length=1, description="the name that Sentinels have for the master")
    database: int = Field(default=0, ge=0, description="number of the database, where the url names none")
    username: str = Field(default="", description="ACL user; default: the server's default user")
    password: Secret | None = Field(
        default=None, description="of the user; one in a file is read again at every connection"
    )
    sentinel_username: str = Field(default="", description="ACL user at the Sentinels")
    sentinel_password: Secret | None = Field(default=None, description="of the user at the Sentinels")
    tls_ca: Path | None = Field(
        default=None,
        description="PEM file of the server certificate's authority; default: those the system trusts",
    )
    tls_cert: Path | None = Field(default=None, description="PEM file of the client's certificate, if one is asked for")
    tls_key: Path | None = Field(default=None, description="PEM file of the client's key, if not in 'tls_cert'")
    tls_check_hostname: bool = Field(
        default=True, description="refuse a certificate that is for another host than the url's"
    )
    prefix: str = Field(default="", pattern=r"^[\x21-\x7e]*$", description="put before every key")
    ttl: Duration | None = Field(
        default=None, ge=0.001, description="a value expires this long after it was written; default: never"
    )
    refresh_ttl: bool = Field(default=False, description="a value that is read lives for another 'ttl' (Redis 6.2)")
    set_nx: bool = Field(
        default=False,
        description="leave a value of the same length as it is: saves replicas and an append-only file a rewrite",
    )
    window: Size | None = Field(
        default=None,
        gt=0,
        description="most bytes of values in flight on one connection, or one value; default: 512KiB on this machine, "
        "4MiB across a network",
    )
    connect_timeout: Duration = Field(
        default=2.0,
        gt=0,
        description="longest time of each step to a connection (TCP, TLS, log-in); never more than the deadline",
    )
    timeout: Duration = Field(
        default=10.0, gt=0, description="longest time of one call's replies; never more than the tier's deadline"
    )
    keepalive: Duration = Field(
        default=30.0, ge=1, le=32767, description="an idle connection is probed after this long; nine hours at most"
    )
    client_name: str = Field(
        default="kvtiers", pattern=r"^[\x21-\x7e]*$", description="name of the connections in CLIENT LIST"
    )
    scan_rate: int = Field(default=100_000, ge=1000, description="keys a second that listing asks each server for")

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        parse_url(url)
        return url

    @field_validator("address_map")
    @classmethod
    def _has_addresses(cls, addresses: dict[str, str]) -> dict[str, str]:
        for text in (*addresses, *addresses.values()):
            try:
                parse_address(text)
            except ValueError:
                raise ValueError(f"{text!r} is no address; expected 'HOST:PORT' on both sides") from None
        return addresses

    @field_validator("tls_ca", "tls_cert", "tls_key")
    @classmethod
    def _is_file(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        found = Path(os.path.expanduser(path))  # noqa: PTH111 -- Path's raises RuntimeError for a user without a home
        if not found.is_file():
            raise ValueError(f"no file {str(path)!r}; expected a PEM file")
        return found

    @model_validator(mode="after")
    def _fits_a_cluster(self) -> "RedisConfig":
        if self.topology == "cluster" and self.database_number:
            raise ValueError("a Cluster has database 0 only")
        if self.address_map and self.topology != "cluster":
            raise ValueError("'address_map' needs 'topology: cluster', whose nodes announce addresses")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "RedisConfig":
        places = self.places
        if self.topology != "single" and places.path:
            raise ValueError(f"topology {self.topology!r} needs redis:// or rediss://, not a UNIX socket")
        if self.topology == "single" and len(places.addresses) > 1:
            raise ValueError("several hosts need 'topology: cluster' or 'topology: sentinel'")
        if places.database is not None and self.database not in {0, places.database}:
            raise ValueError(f"the url names database {places.database}, the option 'database' {self.database}")
        if not places.tls and (unused := [name for name in _TLS_OPTIONS if getattr(self, name) is not None]):
            raise ValueError(f"{unused[0]!r} needs a url that begins with rediss://")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("'tls_key' needs 'tls_cert'")
        if self.username and self.password is None:
            raise ValueError("'username' needs 'password'")
        if self.sentinel_username and self.sentinel_password is None:
            raise ValueError("'sentinel_username' needs 'sentinel_password'")
        if self.refresh_ttl and self.ttl is None:
            raise ValueError("'refresh_ttl' needs 'ttl'")
        return self

    @property
    def places(self) -> Places:
        """The url, taken apart."""
        return parse_url(self.url, sentinel=self.topology == "sentinel")

    def reached_at(self, announced: Address) -> Address:
        """Return where the node of a Cluster that announces this address is reached: there, if nothing else is said."""
        return {parse_address(at): parse_address(to) for at, to in self.address_map.items()}.get(announced, announced)

    @property
    def place(self) -> str:
        """The servers, the database and the prefix; with Sentinels, the master's name."""
        places = self.places
        servers = places.path or ",".join(sorted(f"{host}:{port}" for host, port in places.addresses))
        master = f" master {self.master}" if self.topology == "sentinel" else ""
        prefix = f" prefix {self.prefix}" if self.prefix else ""
        return f"{servers}{master} database {self.database_number}{prefix}"

    @property
    def shared_limits(self) -> dict[str, str]:
        """How long values live, besides what every tier limits."""
        if self.ttl is None:
            return super().shared_limits
        refreshed = ", refreshed by reads" if self.refresh_ttl else ""
        return super().shared_limits | {"ttl": format_duration(self.ttl) + refreshed}

    @property
    def database_number(self) -> int:
        """The database that the url or the option names."""
        return self.places.database or self.database

    def window_bytes(self, *, local: bool) -> int:
        """Return the window, or the one that suits the way to the servers, which are on this machine or not."""
        return self.window or (_LOCAL_WINDOW if local else _REMOTE_WINDOW)

    @property
    def connect_seconds(self) -> float:
        """The longest time to connect: ``connect_timeout``, inside the tier's deadline."""
        return min(self.connect_timeout, self.deadline)

    @property
    def reply_seconds(self) -> float:
        """The longest time of one call's replies: ``timeout``, inside the tier's deadline."""
        return min(self.timeout, self.deadline)
