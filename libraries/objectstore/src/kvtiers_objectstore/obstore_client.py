"""The obstore client of values: HTTP in Rust, outside of the GIL."""

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from kvtiers_objectstore.failures import Failures
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.values import Body

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, PutMode

__all__ = ["ObstoreClient"]

_STATUS = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")  # of an answer, and in one to a batch
_NO_TOKEN = re.compile(r"token request")
# Without an answer: obstore's debug text says how the connection failed. The first that matches.
_CAUSES = (
    (re.compile(r"non-partial response|Content-Range header not present"), "NoLength"),
    (re.compile(r"without LOCATION|BareRedirect"), "PermanentRedirect"),
    (re.compile(r"ProxyAuthRequired"), "ProxyCredentials"),
    (re.compile(r"TunnelUnsuccessful"), "ProxyTunnel"),
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
    """The data path of choice.

    ``store``: obstore's, which never retries by itself. ``attributes``: of each new object.
    """

    name = "obstore"

    def __init__(
        self, store: Any, requests: Requests, failures: Failures, attributes: Mapping[str, str] | None = None
    ) -> None:
        self.store = store
        self._requests = requests
        self._failures = failures
        self._attributes: Any = attributes or None

    def get(self, key: str, start: int, nbytes: int, longest: int) -> Body | None:
        """Request a part of an object. The headers say the object's length: of a longer one no body is read."""
        part: GetOptions | None = {"range": (start, start + nbytes)} if nbytes != longest else None
        self._requests.count("get")
        try:
            found = obstore.get(self.store, key, options=part)
        except (BaseError, FileNotFoundError) as error:
            # 416: the object ends before this part begins.
            if self.says_absent(error) or _status(str(error)) == "416":
                return None
            raise self.failed(f"GET {key}", error) from None
        total = found.meta["size"]
        if total > longest:
            return None
        return Body(found.meta["e_tag"] or "", total, self._pieces(key, found, min(nbytes, total - start)))

    def _pieces(self, key: str, found: "GetResult", nbytes: int) -> Iterator[bytes | memoryview]:
        left = nbytes
        try:
            for piece in [memoryview(found.bytes())] if nbytes <= _AT_ONCE_BYTES else found.stream(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
        except BaseError as error:
            raise self.failed(f"GET {key}", error) from None
        if left:
            raise self._failures.failure(f"GET {key}", 0, "CutOff")
        self._requests.count_bytes(read=nbytes)

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put the object from ``src`` itself; nothing is copied."""
        mode: PutMode = "create" if only_new else "overwrite"
        self._requests.count("put")
        return self._put(key, src, mode=mode, use_multipart=False)

    def write_parts(self, key: str, src: memoryview, part_size: int, at_a_time: int) -> bool:
        """Put the object in one upload of parts of this size, several at a time; as a whole it is there or not."""
        self._requests.count("put", -(-len(src) // part_size))
        self._requests.count("post", 2)  # that begin and end it
        return self._put(key, src, use_multipart=True, chunk_size=part_size, max_concurrency=at_a_time)

    def _put(self, key: str, src: memoryview, **how: Any) -> bool:
        exported = memoryview(src)
        try:
            obstore.put(self.store, key, exported, attributes=self._attributes, **how)
        except (BaseError, FileNotFoundError) as error:
            # Without the condition a conflict (409) is a refusal: of Azure, a blob that is archived or leased.
            if isinstance(error, AlreadyExistsError) and how.get("mode") == "create":
                return False
            raise self.failed(f"PUT {key}", error) from None
        finally:
            _release(exported)
        self._requests.count_bytes(written=len(src))
        return True

    def size(self, key: str) -> int | None:
        """Request the headers alone."""
        self._requests.count("head")
        try:
            return obstore.head(self.store, key)["size"]
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise self.failed(f"HEAD {key}", error) from None

    def close(self) -> None:
        """Release the store; its connections end with it."""
        self.store = None

    def says_absent(self, error: Exception) -> bool:
        """Return whether an error of obstore's says that there is no such object, and not that there is no bucket."""
        # Of a missing bucket every object would be a miss for ever.
        return isinstance(error, FileNotFoundError) and (
            self._failures.code_of(str(error)) not in self._failures.absent_place
        )

    def failed(self, what: str, error: Exception) -> Exception:
        """Count an error of obstore's; return it in the words of ``failures``."""
        return self.count(self._translated(what, str(error)))

    def count(self, error: Exception) -> Exception:
        """Count a failed request; return the error."""
        self._requests.count_failed(error)
        return error

    def _translated(self, what: str, text: str) -> Exception:
        failure, status = self._failures.failure, _status(text)
        first = text.partition("\n")[0]
        cause = next((code for pattern, code in _CAUSES if pattern.search(text)), "")
        if _NO_TOKEN.search(first):  # refused for good, or for now, by who gives out tokens
            refused = status.startswith("4") and status != "429"
            return failure(what, 0, "Credentials" if refused else "NoToken", first)
        if status:
            return failure(what, int(status), self._failures.code_of(text))
        return failure(what, 0, cause, first)


def _status(text: str) -> str:
    found = _STATUS.search(text)
    return (found[1] or found[2]) if found else ""


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
