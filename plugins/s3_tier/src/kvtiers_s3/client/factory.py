"""The choice of the client that moves values."""

from importlib.util import find_spec

from kvtiers.api import ConfigError
from kvtiers_s3.client.base import ValueClient
from kvtiers_s3.connection import Connection

__all__ = ["open_client"]


def open_client(connection: Connection) -> ValueClient:
    """Return the client that the options want; ConfigError if it is not installed."""
    wanted = connection.config.client
    # Each is imported only where it is chosen: the other one may not be installed, and costs a host some MB.
    if wanted != "boto3" and find_spec("obstore") is not None:
        from kvtiers_s3.client.obstore import ObstoreClient

        return ObstoreClient(connection)
    if wanted == "obstore":
        raise ConfigError("client 'obstore' is not installed; pip install obstore, or set 'client: boto3'")
    from kvtiers_s3.client.boto3 import Boto3Client

    return Boto3Client(connection)
