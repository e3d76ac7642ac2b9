"""Routes: the way to an endpoint, resolved once from the options and the environment for all HTTP clients of a tier.

A tier has several clients: obstore for values, the service's own library or Python's for the rest. Each of them reads
the environment's proxies and certificates by rules of its own, so that values would leave by another way, and trust
others, than lists and deletes. What a route says is given to each of them instead.
"""

import os
import ssl
import urllib.request
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, urlsplit

from kvtiers.api import ConfigError

__all__ = ["Route", "find_route"]

_PORTS = {"http": 80, "https": 443}
_SYSTEM_FILES = (  # where distributions keep their authorities; obstore looks there, too
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True)
class Route:
    """The way to one endpoint.

    ``proxy``: the URL of the proxy in between, with its credentials; empty: there is none. ``authorities``: the file
    (or, by SSL_CERT_DIR, the folder) of the authorities that are trusted; empty: none is known. ``named_by``: what
    names it. ``certificates``: those in it, where they are to be trusted beside the system's.
    """

    endpoint: str
    proxy: str = field(default="", repr=False)
    authorities: str = ""
    named_by: str = ""
    certificates: bytes = field(default=b"", repr=False)

    @property
    def host(self) -> str:
        """The endpoint's host, without its port."""
        return urlsplit(self.endpoint).hostname or ""

    @property
    def shown_proxy(self) -> str:
        """The proxy without its credentials, for people."""
        return _without_credentials(self.proxy)

    @property
    def proxies(self) -> dict[str, str]:
        """The proxies by the scheme of a request, as Python's clients take them; empty: they shall use none."""
        return dict.fromkeys(_PORTS, self.proxy) if self.proxy else {}

    def __str__(self) -> str:
        """Return the way as a part of a sentence."""
        way = f"through the proxy {self.shown_proxy}" if self.proxy else "without a proxy"
        if not self.endpoint.startswith("https://"):
            return f"{way}, without TLS"
        by = f" ({self.named_by})" if self.named_by else ""
        return f"{way}; trusts {self.authorities or 'what its clients bring'}{by}"

    def open(self, request: urllib.request.Request, *, timeout: float) -> IO[bytes]:
        """Send a request by Python's own client; raises as ``urllib.request.urlopen``."""
        context = ssl.create_default_context()  # heeds SSL_CERT_FILE and SSL_CERT_DIR by itself
        if self.certificates:
            context.load_verify_locations(cafile=self.authorities)
        handlers = urllib.request.ProxyHandler(self.proxies), urllib.request.HTTPSHandler(context=context)
        answer: IO[bytes] = urllib.request.build_opener(*handlers).open(request, timeout=timeout)
        return answer


def find_route(endpoint: str, *bundles: tuple[str, str | Path | None]) -> Route:
    """Return the way to this URL. ConfigError: a proxy or certificates are named that no client could use.

    ``bundles``: files of a private authority's certificates, each after what names it, by precedence; an option first.
    Those that variables name only count where there is TLS.
    """
    proxy = _proxy_for(endpoint)
    uses_tls = "https://" in (endpoint[:8], proxy[:8])
    for named_by, file in bundles:
        if file and (uses_tls or isinstance(file, Path)):
            return Route(endpoint, proxy, str(file), named_by, _read_certificates(named_by, Path(file)))
    if named := os.environ.get("SSL_CERT_FILE"):
        _read_certificates("SSL_CERT_FILE", Path(named))  # obstore makes no client without, for http:// neither
        return Route(endpoint, proxy, named, "SSL_CERT_FILE")
    if uses_tls and (named := os.environ.get("SSL_CERT_DIR")):
        return Route(endpoint, proxy, named, "SSL_CERT_DIR")
    return Route(endpoint, proxy, next((file for file in _SYSTEM_FILES if Path(file).is_file()), ""))


def _read_certificates(named_by: str, file: Path) -> bytes:
    try:
        certificates = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{named_by} {str(file)!r} cannot be read: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise ConfigError(f"{named_by} {str(file)!r} has no certificate in it; expected PEM")
    return certificates


def _proxy_for(endpoint: str) -> str:
    """Return the URL of the proxy that the environment names for this endpoint; empty: none."""
    url = urlsplit(endpoint)
    named = urllib.request.getproxies()
    proxy = named.get(url.scheme) or named.get("all", "")
    if not proxy or _is_excluded(url, named.get("no", "")):
        return ""
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        found = urlsplit(proxy)
        is_usable = found.scheme in _PORTS and bool(found.hostname) and (found.port is None or found.port > 0)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"the environment names {_without_credentials(proxy)!r} as the proxy for {endpoint}, expected "
            "'http://HOST:PORT' or 'https://HOST:PORT'; set HTTP_PROXY, HTTPS_PROXY or ALL_PROXY to such a one, or "
            f"name {url.hostname} in NO_PROXY"
        )
    return proxy


def _is_excluded(url: SplitResult, no_proxy: str) -> bool:
    """Return whether NO_PROXY names this host: by name, suffix, HOST:PORT, address, network (CIDR) or ``*``."""
    host = url.hostname or ""
    entries = [entry.strip().strip("[]") for entry in no_proxy.split(",")]
    if "*" in entries or urllib.request.proxy_bypass(f"{host}:{url.port or _PORTS[url.scheme]}"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return any(address in network for entry in entries for network in _networks(entry))


def _networks(entry: str) -> list[IPv4Network | IPv6Network]:
    try:
        return [ip_network(entry, strict=False)]
    except ValueError:
        return []


def _without_credentials(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2].partition('/')[0]}"
