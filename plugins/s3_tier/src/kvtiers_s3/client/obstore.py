"""The obstore client of values: HTTP in Rust, outside of the GIL."""

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from kvtiers_s3.client.base import Body
from kvtiers_s3.connection import Connection
from kvtiers_s3.failures import failure

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, PutMode

__all__ = ["ObstoreClient"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([\w.]+)\s*</Code>")
# Without an answer: obstore's debug text says how the connection failed. The first that matches.
_CAUSES = (
    (re.compile(r"non-partial response|Content-Range header not present"), "NoLength"),
    (re.compile(r"without LOCATION|BareRedirect"), "PermanentRedirect"),
    (re.compile(r"kind: Timeout"), "Timeout"),
    (re.compile(r"dns error"), "NoAddress"),
    (re.compile(r"InvalidCertificate|UnknownIssuer|certificate"), "Certificate"),
    (re.compile(r"InvalidContentType|InvalidMessage|tls"), "NotTls"),
    (re.compile(r"kind: Connect,"), "NoConnection"),
    (re.compile(r"kind: (ConnectionReset|Interrupted|Request|Decode|Unknown)"), "CutOff"),
)
_RELEASE_SECONDS = 1.0
# A body that is taken as a whole costs one turn of Python's lock, and memory of its size until it is in its row.
_AT_ONCE_BYTES = 8 << 20
_PIECE_BYTES = 256 << 10


class ObstoreClient:
    """The data path of choice."""

    name = "obstore"

    def __init__(self, connection: Connection) -> None:
        self._store: Any = connection.obstore()
        self._requests = connection.requests
        storage_class = connection.config.storage_class
        self._attributes = {"Storage-Class": storage_class} if storage_class else None

    def get(self, key: str, start: int, nbytes: int, total: int) -> Body | None:
        """Request a part of an object. The headers say the object's length: with another one, no body is read."""
        part: GetOptions | None = {"range": (start, start + nbytes)} if nbytes != total else None
        self._requests.count("get")
        try:
            found = obstore.get(self._store, key, options=part)
        except FileNotFoundError as error:
            if "<Code>NoSuchBucket<" not in str(error):
                return None
            raise self._failed("GET", key, error) from None  # it would be a miss for ever
        except BaseError as error:
            if _status(str(error)) == "416":  # the object ends before this part begins
                return None
            raise self._failed("GET", key, error) from None
        meta = found.meta
        return Body(meta["e_tag"] or "", self._pieces(key, found, nbytes)) if meta["size"] == total else None

    def _pieces(self, key: str, found: "GetResult", nbytes: int) -> Iterator[bytes | memoryview]:
        left = nbytes
        try:
            for piece in [memoryview(found.bytes())] if nbytes <= _AT_ONCE_BYTES else found.stream(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
        except BaseError as error:
            raise self._failed("GET", key, error) from None
        if left:
            raise failure(f"GET {key}", 0, "CutOff")
        self._requests.count_bytes(read=nbytes)

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put the object from ``src`` itself; nothing is copied."""
        exported = memoryview(src)
        mode: PutMode = "create" if only_new else "overwrite"
        self._requests.count("put")
        try:
            obstore.put(self._store, key, exported, mode=mode, use_multipart=False, attributes=self._attributes)
        except AlreadyExistsError:
            return False
        except (BaseError, FileNotFoundError) as error:
            raise self._failed("PUT", key, error) from None
        finally:
            _release(exported)
        self._requests.count_bytes(written=len(src))
        return True

    def size(self, key: str) -> int | None:
        """Request the headers alone."""
        self._requests.count("head")
        try:
            return obstore.head(self._store, key)["size"]
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise self._failed("HEAD", key, error) from None

    def close(self) -> None:
        """Release the store; its connections end with it."""
        self._store = None

    def _failed(self, method: str, key: str, error: Exception) -> Exception:
        raised = _translated(f"{method} {key}", str(error))
        self._requests.count_failed(raised)
        return raised


def _status(text: str) -> str:
    found = _STATUS.search(text)
    return found[1] if found else ""


def _translated(what: str, text: str) -> Exception:
    status = _status(text)
    if status:
        code = _CODE.search(text)
        return failure(what, int(status), code[1] if code else "")
    cause = next((code for pattern, code in _CAUSES if pattern.search(text)), "")
    return failure(what, 0, cause, text.partition("\n")[0])


def _release(exported: memoryview) -> None:
    """Wait until obstore's own thread has released a value whose request was answered or aborted half-way."""
    until = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            return exported.release()
        except BufferError:
            if time.monotonic() >= until:  # then core finds out, and keeps the row from being used
                return None
        time.sleep(0.0005)
