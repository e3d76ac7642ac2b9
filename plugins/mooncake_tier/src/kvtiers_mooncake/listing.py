"""The listing of what the pool holds, by the master's HTTP server: the client library has no call for it.

``/get_all_keys`` gives all names, ``/batch_query_keys`` the lengths of some of them. Neither counts as a read, so that
a listing keeps nothing from being evicted or removed; the library's ``get_size`` and ``batch_get_replica_desc``, which
give lengths too, take a lease on each object.
"""

import http.client
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtiers.api import ConfigError, StoreEntry, TierUnavailable
from kvtiers_mooncake.config import MooncakeConfig

__all__ = ["list_values"]

_NAMES_PER_CALL = 256  # of at most 250 characters each: the address of a call has 64 KiB
_NAME = re.compile(r"[a-z0-9._/-]{1,250}")
"""What a value of ours may be called: another user of the pool may have any bytes there, commas and line ends too."""
_LENGTHS = {"values": "size_", "nof_values": "size_", "disk_values": "object_size", "local_disk_values": "object_size"}
"""Of each kind of place where a copy may lie, the field with its length."""


def list_values(config: MooncakeConfig, prefix: str) -> Iterator[StoreEntry]:
    """Yield each value whose name starts with ``prefix``; the master records no times.

    ConfigError if the master cannot be asked with these options, TierUnavailable if it does not answer.
    """
    address = config.http_address
    if address is None:
        raise ConfigError(f"with 'master: {config.master}' a listing needs 'master_http': HOST:PORT of its HTTP server")
    if config.tenant != "default":
        raise ConfigError(f"'tenant: {config.tenant}': the master lists the values of its tenant 'default' alone")
    server = _HttpServer(address, config.patience)
    try:
        names = server.names(prefix)
        for start in range(0, len(names), _NAMES_PER_CALL):
            yield from server.entries(names[start : start + _NAMES_PER_CALL])
    finally:
        server.close()


class _HttpServer:
    """The HTTP server of a master (its ``--metrics_port``), by one connection.

    The server closes one that is idle for a while, as it is while the caller works on what has been listed.
    """

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        host, port = address
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._connection = http.client.HTTPConnection(*address, timeout=timeout)

    def close(self) -> None:
        self._connection.close()

    def names(self, prefix: str) -> list[str]:
        """Return the names of all whole values that start with this; of others' names, one at a time is in memory."""
        begins = prefix.encode()
        try:
            with self._get("/get_all_keys") as answer:
                found = [line.decode("ascii", "replace").rstrip("\n") for line in answer if line.startswith(begins)]
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        if answer.length:  # reading by lines does not notice it
            raise self._unavailable("its answer to /get_all_keys ends too early")
        return [name for name in found if _NAME.fullmatch(name)]

    def entries(self, names: Sequence[str]) -> Iterator[StoreEntry]:
        """Yield those of these values that are still there, each with its length."""
        try:
            with self._get(f"/batch_query_keys?keys={','.join(names)}") as answer:
                found = json.load(answer)["data"]
            lengths = {name: _length(found[name]) for name in names}
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        except (ValueError, LookupError, TypeError):
            raise self._unavailable("its answer to /batch_query_keys has no lengths") from None
        for name, length in lengths.items():
            if length:
                yield StoreEntry(name, length)

    def _get(self, path: str) -> http.client.HTTPResponse:
        was_open = self._connection.sock is not None
        try:
            response = self._ask(path)
        except ConnectionError:  # before the answer has begun
            if not was_open:
                raise
            self._connection.close()  # the next request opens a fresh one
            response = self._ask(path)
        if response.status != http.client.OK:
            response.read()
            what = path.partition("?")[0]
            raise http.client.HTTPException(f"status {response.status} ({response.reason}) for {what}")
        return response

    def _ask(self, path: str) -> http.client.HTTPResponse:
        self._connection.request("GET", path)
        return self._connection.getresponse()

    def _unavailable(self, why: object) -> TierUnavailable:
        return TierUnavailable(
            f"the master's HTTP server {self._address}, which lists values, does not answer as expected: {why}; set "
            "'master_http' to where mooncake_master listens (--metrics_port), and let this machine reach it"
        )


def _length(answer: Mapping[str, Any]) -> int:
    """Return the length of a value, whose copies are all as long; 0 if it has none any more."""
    for places, field in _LENGTHS.items():
        for place in answer.get(places) or ():
            return int(place[field])
    return 0
