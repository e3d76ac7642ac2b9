"""The store over a bucket: an object a value, for many processes and machines at once."""

import errno
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from kvtiers.api import ChunkStore, ConfigError, Finding, StoreEntry, TierUnavailable
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError
from kvtiers_objectstore.parts import Parts
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.values import ValueClient, read_into

__all__ = ["Access", "Bucket", "ObjectStore", "StoreOptions"]

_NO_OBJECT = "_kvtiers/absent"


class StoreOptions(Protocol):
    """The options that every such tier has; its config class declares them."""

    @property
    def prefix(self) -> str:
        """What all keys start with, without the ``/`` at its end."""

    @property
    def part_size(self) -> int:
        """Larger values are written and read in parts of this many bytes."""

    @property
    def conditional_put(self) -> bool:
        """Whether an object of the same length is left as it is."""


class Bucket(Protocol):
    """What is done with a bucket beside moving values. Keys are whole keys, the prefix included."""

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Yield key, length and time of the last write of every object whose key starts with this."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these objects; one that is absent is no error."""


class Access(NamedTuple):
    """The ways into one bucket: what moves values, what moves large ones, the rest, and what counts the requests."""

    client: ValueClient
    parts: Parts
    bucket: Bucket
    requests: Requests


class ObjectStore(ChunkStore):
    """Values as objects under one prefix. Opening it makes one request, for an object that is not there.

    A service's own store makes its ``Access``, and says where the bucket is and how its settings are.
    """

    transient_errors = (ObjectStoreBusyError,)
    asks_one_by_one = True

    def __init__(self, options: StoreOptions, access: Access, *, read_only: bool = False) -> None:
        self._options = options
        self._read_only = read_only
        self._prefix = f"{options.prefix}/" if options.prefix else ""
        self._client, self._parts, self._bucket, self._requests = access
        try:
            # Not a HEAD: its answers have no body, and so do not say what is wrong.
            read_into(self._client, self._prefix + _NO_OBJECT, memoryview(b""), 0, 0)
        except ObjectStoreBusyError as error:
            self.close()
            raise TierUnavailable(f"{self.where()}: {error}") from None
        except ObjectStoreError as error:
            more = self.more_of(error)
            self.close()
            raise ConfigError(f"{self.where()}: {error}{more}") from None

    @abstractmethod
    def where(self) -> str:
        """Return which bucket this is and where, as the start of a line."""

    def more_of(self, _error: ObjectStoreError) -> str:
        """Return what else can be said of an error while the store is being opened."""
        return ""

    @abstractmethod
    def settings(self) -> Iterable[Finding]:
        """Examine the bucket's settings."""

    def read_into(self, name: str, dst: memoryview) -> int:
        """Read the object, in ranges where there is room for a large one."""
        key = self._prefix + name
        if len(dst) > self._options.part_size:
            return self._parts.read(key, dst)
        body = read_into(self._client, key, dst, 0, len(dst))
        return 0 if body is None else body.total

    def reads_in_pieces(self, nbytes: int) -> bool:
        """Return whether a value is read in pieces: large ones are read in parallel ranges, straight into the row."""
        return nbytes <= self._options.part_size

    def read_pieces(self, name: str, nbytes: int) -> Iterable[bytes | memoryview] | None:
        """Read the object in one request."""
        body = self._client.get(self._prefix + name, 0, nbytes, nbytes)
        return None if body is None or body.total != nbytes else body.pieces

    def write(self, name: str, src: memoryview) -> None:
        """Put the object, a large one as an upload in parts. NotKept when a quota is used up."""
        self._expect_writable()
        key = self._prefix + name
        put = self._parts.write if len(src) > self._options.part_size else self._client.write
        only_new = self._options.conditional_put
        # One of another length would be a miss for ever: it is no reason to leave it there.
        if not put(key, src, only_new=only_new) and self._client.size(key) != len(src):
            put(key, src, only_new=False)

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask for the head of each object."""
        return [self._client.size(self._prefix + name) is not None for name in names]

    def delete(self, names: Sequence[str]) -> None:
        """Delete the objects, many in one request where the service can do that."""
        self._expect_writable()
        self._bucket.delete([self._prefix + name for name in names])

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """List the objects, a page in one request; ``modified`` is when a value was written."""
        for key, nbytes, modified in self._bucket.objects(self._prefix + prefix):
            yield StoreEntry(key.removeprefix(self._prefix), nbytes, modified.timestamp())

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the bucket's rules, and the cost of a request compared with the bytes that it moves."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_objectstore.speed import speed_findings

        findings = list(self.settings())
        if not self._read_only:
            findings += speed_findings(self, value_bytes)
        return findings

    def stats(self) -> Mapping[str, float]:
        """Return the requests by kind, the bytes, and what the requests cost."""
        return self._requests.figures()

    def close(self) -> None:
        """End the threads and the connections."""
        self._parts.close()
        self._client.close()

    def _expect_writable(self) -> None:
        if self._read_only:
            raise PermissionError(errno.EROFS, "this tier is read-only", self.where())
