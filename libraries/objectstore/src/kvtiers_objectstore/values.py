"""The interface of the clients that move values, in four calls."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["Body", "ValueClient", "read_into"]


class Body(NamedTuple):
    """The requested part of an object; ``pieces``, its bytes in order, raises the errors of ``failures``.

    ``total``: the length of the whole object.
    """

    etag: str
    total: int
    pieces: Iterable[bytes | memoryview]


class ValueClient(Protocol):
    """One request a call; several threads at once. Raises the errors of ``failures``, never retries."""

    name: str

    def get(self, key: str, start: int, nbytes: int, longest: int) -> Body | None:
        """Request this many bytes from byte ``start`` on, or as many as there are, of an object.

        All of it where that is ``longest``, its longest length. None, before a byte of the body is read, if there is no
        such object, if it is longer, or if it ends before ``start``.
        """

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put an object. False, and nothing is changed, if ``only_new`` and there is one already."""

    def size(self, key: str) -> int | None:
        """Return an object's length in bytes; None: there is none."""

    def close(self) -> None:
        """Close the connections."""


def read_into(client: ValueClient, key: str, dst: memoryview, start: int, longest: int) -> Body | None:
    """Fill ``dst`` from byte ``start`` on of an object, as far as it goes; return what came, None if there is none.

    ``longest``: its longest length.
    """
    body = client.get(key, start, len(dst), longest)
    if body is None:
        return None
    at = 0
    for piece in body.pieces:
        dst[at : at + len(piece)] = piece
        at += len(piece)
    return body
