"""The servers' addresses: the option ``url``, parsed."""

import re
from dataclasses import dataclass
from urllib.parse import unquote

__all__ = ["Address", "Places", "is_loopback", "parse_address", "parse_url"]

Address = tuple[str, int]
"""A host and its port."""

_PORT = 6379
_SENTINEL_PORT = 26379
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:@/]+))(?::([0-9]{1,5}))?")
_EXPECTED = "expected redis://HOST[:PORT][/DATABASE], rediss:// for TLS, or unix:///PATH; several hosts with commas"


@dataclass(frozen=True, slots=True)
class Places:
    """``addresses`` or ``path``: over TCP or over a UNIX socket. ``database``: only if the url names one."""

    tls: bool
    addresses: tuple[Address, ...]
    path: str
    database: int | None


def parse_url(url: str, *, sentinel: bool = False) -> Places:
    """Parse a url; ValueError with the problem, never with anything that could be a password."""
    scheme, found, rest = url.partition("://")
    if not found or scheme not in {"redis", "rediss", "unix"}:
        raise ValueError(_EXPECTED)
    if "@" in rest:
        raise ValueError("a url is shown in logs: give user and password as the options 'username' and 'password'")
    if "?" in rest or "#" in rest:
        raise ValueError("a url has no parameters here; each has an option of its own")
    if scheme == "unix":
        if not rest.startswith("/") or rest.endswith("/"):
            raise ValueError("expected unix:///PATH, an absolute path of a socket")
        return Places(tls=False, addresses=(), path=unquote(rest), database=None)
    hosts, _, database = rest.partition("/")
    if database and not database.isdecimal():
        raise ValueError(f"expected a database number behind the last '/', got {database!r}")
    port = _SENTINEL_PORT if sentinel else _PORT
    addresses = tuple(parse_address(host, port) for host in hosts.split(","))
    return Places(scheme == "rediss", addresses, "", int(database) if database else None)


def parse_address(text: str, port: int = _PORT) -> Address:
    """Parse ``HOST:PORT``, where the port may be left out; ValueError if it is none."""
    match = _HOST.fullmatch(text.strip())
    if match is None or not 0 < int(match[3] or port) < 1 << 16:
        raise ValueError(_EXPECTED)
    return match[1] or match[2], int(match[3] or port)


def is_loopback(host: str) -> bool:
    """Return whether this host is this machine."""
    return host in {"localhost", "::1"} or re.fullmatch(r"127(\.[0-9]+){3}", host) is not None
