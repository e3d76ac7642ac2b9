"""What moves values: the same four calls by obstore and by boto3."""

from importlib.util import find_spec
from typing import Protocol

from kvtiers.api import ConfigError
from kvtiers_s3.connection import Connection

__all__ = ["ValueClient", "open_client"]


class ValueClient(Protocol):
    """One request a call; several threads at once. Raises what ``failures`` has, never tries again."""

    name: str

    def read(self, key: str, dst: memoryview, start: int, total: int) -> str | None:
        """Fill ``dst`` from byte ``start`` of an object of ``total`` bytes; return the object's ETag.

        None, before a byte is read, if there is no such object or it has another length.
        """

    def write(self, key: str, src: memoryview, *, only_new: bool) -> bool:
        """Put an object. False, and nothing is changed, if ``only_new`` and there is one already."""

    def size(self, key: str) -> int | None:
        """Return an object's length in bytes; None: there is none."""

    def close(self) -> None:
        """Close the connections."""


def open_client(connection: Connection) -> ValueClient:
    """Return the client that the options want; ConfigError if it is not installed."""
    wanted = connection.config.client
    if wanted != "boto3" and find_spec("obstore") is not None:
        from kvtiers_s3.obstore_client import ObstoreClient

        return ObstoreClient(connection)
    if wanted == "obstore":
        raise ConfigError("client 'obstore' is not installed; pip install obstore, or set 'client: boto3'")
    from kvtiers_s3.boto3_client import Boto3Client

    return Boto3Client(connection)
