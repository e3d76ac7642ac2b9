"""Failures of object stores: each error of a service as one clear line and one of three kinds.

::

    ObjectStoreError                 a retry changes nothing: keys, rights, region, certificates
    └── ObjectStoreBusyError         the same request may succeed: time-outs, resets, 500s; core tries again
        └── ObjectStoreThrottledError    ... because there were too many requests
    NotKept (kvtiers)                a quota is used up

A service brings its own codes and what to do about them, as one ``Failures``.
"""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvtiers.api import NotKept

__all__ = ["Failures", "ObjectStoreBusyError", "ObjectStoreError", "ObjectStoreThrottledError"]


class ObjectStoreError(Exception):
    """A request that was refused. ``status``: of HTTP, 0 without an answer; ``code``: the service's word, or ours."""

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class ObjectStoreBusyError(ObjectStoreError):
    """A request that may succeed when it is retried."""


class ObjectStoreThrottledError(ObjectStoreBusyError):
    """The service asks for fewer requests."""


_CODE = re.compile(r"<Code>\s*([\w.]+)\s*</Code>")
_HINTS = {
    "Certificate": "the server's certificate is not trusted; give its authority's certificate as ca_file",
    "NotTls": "the server does not speak TLS there; check endpoint (http:// or https://, and its port)",
    "NoAddress": "the name of the endpoint has no address; check endpoint",
    "NoConnection": "no server answers there; check endpoint, and that the server runs",
    "Timeout": "no answer in time; the server is slow or far away (timeout, connect_timeout)",
    "CutOff": "the connection ended in the middle of an answer",
    "NoLength": "the answer does not say how long the object is, or which part of it this is; where a server "
    "cannot send parts, set part_size to the values' length or more",
    "Replaced": "the object was replaced while it was read",
    "ProxyRefused": "the answer is not the service's but a proxy's; allow the endpoint there, or name it in NO_PROXY",
    "ProxyCredentials": "a proxy wants credentials; write them into the variable that names it, as "
    "http://USER:PASSWORD@HOST:PORT, or name the endpoint in NO_PROXY",
    "ProxyTunnel": "a proxy opens no connection to the endpoint; allow it there, or name the endpoint in NO_PROXY",
}
_THROTTLES = frozenset({"SlowDown"})
_PASSING = frozenset({"NoConnection", "Timeout", "CutOff", "NoAddress", "NoToken", "Replaced", "ProxyTunnel"})
_ON_THE_WAY = frozenset({"NoConnection", "Timeout", "CutOff", "Certificate", "NotTls"})


@dataclass(frozen=True)
class Failures:
    """What one service's codes mean.

    ``hints``: what to do, by code. ``by_status``: the code of an answer without one. ``absent_place``: codes which say
    that the bucket itself is missing, not the object. ``full``, ``throttles``, ``passing``: codes by their kind.
    ``finer``: patterns of an answer's text, and the code of ours that says more than the service's. ``proxy``: the one
    between us and the service, without its credentials.
    """

    hints: Mapping[str, str]
    by_status: Mapping[int, str]
    absent_place: AbstractSet[str]
    full: AbstractSet[str] = field(default_factory=frozenset)
    throttles: AbstractSet[str] = field(default_factory=frozenset)
    passing: AbstractSet[str] = field(default_factory=frozenset)
    finer: Sequence[tuple[str, str]] = ()
    proxy: str = ""

    def code_of(self, answer: str) -> str:
        """Return the code in the text of an answer; empty: it has none."""
        for pattern, code in self.finer:
            if re.search(pattern, answer):
                return code
        found = _CODE.search(answer)
        return found[1] if found else ""

    def failure(self, what: str, status: int, code: str = "", detail: str = "") -> Exception:
        """Return what to raise for a request that failed.

        ``what``: the request, as ``GET KEY``. ``code``: the service's own, or without one of those one of ours:
        Certificate, NotTls, NoAddress, NoConnection, Timeout, CutOff, NoLength, Replaced, Credentials, NoToken,
        ProxyCredentials, ProxyTunnel. ``detail``: what is said without a hint.
        """
        may_be_the_proxys = code in _ON_THE_WAY if code else bool(status)
        code = self._code(what, status, code)
        answer = " ".join(part for part in (str(status or ""), code) if part)
        hint = self.hints.get(code) or _HINTS.get(code, detail)
        text = ": ".join(part for part in (what, answer, hint) if part)
        if self.proxy and (may_be_the_proxys or code.startswith("Proxy")):
            text += f" (through the proxy {self.proxy})"
        if code in self.full or status == 507:
            return NotKept(text)
        if code in self.throttles | _THROTTLES or status == 429:
            return ObjectStoreThrottledError(text, status, code)
        if code in self.passing | _PASSING or (status >= 500 and code != "NotImplemented"):
            return ObjectStoreBusyError(text, status, code)
        return ObjectStoreError(text, status, code)

    def _code(self, what: str, status: int, code: str) -> str:
        if status == 407:
            return "ProxyCredentials"
        # The answer to a HEAD has no body, whoever refuses.
        if self.proxy and status == 403 and not code and not what.startswith("HEAD "):
            return "ProxyRefused"
        return code or self.by_status.get(status, "")
