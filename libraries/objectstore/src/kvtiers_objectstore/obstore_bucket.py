"""The bucket by obstore alone, without a client library of the service: listing, deleting, uploads in parts."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import obstore
from obstore.exceptions import BaseError

from kvtiers_objectstore.failures import Failures
from kvtiers_objectstore.obstore_client import ObstoreClient
from kvtiers_objectstore.parts import Parts
from kvtiers_objectstore.requests import Requests

__all__ = ["ObstoreBucket", "ObstoreParts"]


class ObstoreParts(Parts):
    """Large values by obstore's own uploads in parts, which aborts those that fail."""

    def __init__(
        self, client: ObstoreClient, failures: Failures, *, part_size: int, connections: int, label: str
    ) -> None:
        super().__init__(client, failures, part_size=part_size, connections=connections, label=label)
        self._obstore = client
        self._connections = connections

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Write an object in one upload; under a condition in one request, since obstore has none for parts."""
        if only_new:
            return self._obstore.write(key, src, only_new=True)
        return self._obstore.write_parts(key, src, self._size, self._connections)


class ObstoreBucket:
    """The bucket of one store. Keys are whole keys, the prefix included.

    ``page``: how many objects a request lists. ``deleted_at_once``: how many a request deletes, 1 where the service
    has no such request; the threads of ``parts`` make several requests at a time.
    """

    def __init__(
        self, client: ObstoreClient, parts: Parts, requests: Requests, *, page: int, deleted_at_once: int
    ) -> None:
        self._client = client
        self._parts = parts
        self._requests = requests
        self._page = page
        self._at_once = deleted_at_once

    def objects(self, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Yield key, length and time of the last write of every object whose key starts with this."""
        # obstore lists what lies in a folder; the rest of the prefix is ours to compare.
        folder = prefix.rpartition("/")[0]
        try:
            for page in obstore.list(self._client.store, folder or None, chunk_size=self._page):
                self._requests.count("list")
                for entry in page:
                    if entry["path"].startswith(prefix):
                        yield entry["path"], entry["size"], entry["last_modified"]
        except (BaseError, FileNotFoundError) as error:
            raise self._client.failed(f"LIST {prefix}", error) from None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these objects; one that is absent is no error."""
        runs = [keys[start : start + self._at_once] for start in range(0, len(keys), self._at_once)]
        self._parts.each(self._delete_run, runs)

    def _delete_run(self, keys: Sequence[str]) -> None:
        if len(keys) > 1 and self._are_deleted_at_once(keys):
            return
        for key in keys:
            self._requests.count("delete")
            self.delete_one(key)

    def delete_one(self, key: str) -> None:
        """Delete this object; one that is absent is no error."""
        try:
            obstore.delete(self._client.store, key)
        except (BaseError, FileNotFoundError) as error:
            if not self._client.says_absent(error):
                raise self._client.failed(f"DELETE {key}", error) from None

    def _are_deleted_at_once(self, keys: Sequence[str]) -> bool:
        """Return whether one request has deleted all. What it says of one hides the others: then each is asked for."""
        self._requests.count("post")
        try:
            obstore.delete(self._client.store, list(keys))
        except (BaseError, FileNotFoundError):
            return False
        return True
