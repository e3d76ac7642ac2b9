"""The interface of the clients that move values, in four calls."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["Body", "ValueClient", "read_any_into", "read_into"]


class Body(NamedTuple):
    """The requested part of an object, ETag and bytes in order; ``pieces`` raises the errors of ``failures``."""

    etag: str
    pieces: Iterable[bytes | memoryview]


class ValueClient(Protocol):
    """One request a call; several threads at once. Raises the errors of ``failures``, never retries."""

    name: str

    def get(self, key: str, start: int, nbytes: int, total: int | None) -> Body | None:
        """Request this many bytes from byte ``start`` on of an object of ``total`` bytes.

        ``total`` None: the whole object, if it is no longer than ``nbytes``. None, before a byte of the body is read,
        if there is no such object or it has another length.
        """

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put an object. False, and nothing is changed, if ``only_new`` and there is one already."""

    def size(self, key: str) -> int | None:
        """Return an object's length in bytes; None: there is none."""

    def close(self) -> None:
        """Close the connections."""


def read_into(client: ValueClient, key: str, dst: memoryview, start: int, total: int) -> str | None:
    """Fill ``dst`` from byte ``start`` on of an object of ``total`` bytes; return its ETag, None if there is none."""
    body = client.get(key, start, len(dst), total)
    if body is None:
        return None
    _fill(dst, body)
    return body.etag


def read_any_into(client: ValueClient, key: str, dst: memoryview) -> int:
    """Fill the start of ``dst`` with an object; return its length, 0 if there is none or it is longer."""
    body = client.get(key, 0, len(dst), None)
    return 0 if body is None else _fill(dst, body)


def _fill(dst: memoryview, body: Body) -> int:
    at = 0
    for piece in body.pieces:
        dst[at : at + len(piece)] = piece
        at += len(piece)
    return at
