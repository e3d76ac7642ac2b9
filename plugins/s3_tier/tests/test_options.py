"""Options: what is refused before anything is opened, with what was expected."""

import contextlib
import socket
import time

import pytest
from libraries.objectstore.tests.options import OptionsTests
from plugins.s3_tier.tests.differences import CLIENTS, S3

from kvtiers.api import ConfigError, TierUnavailable
from kvtiers_objectstore.requests import Requests
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection
from kvtiers_s3.store import S3Store, open_client


class TestS3Options(OptionsTests):
    differences = S3

    def test_the_place_is_the_endpoint_the_bucket_and_the_prefix(self):
        assert self.config().place == self.config(name="two", threads=3).place == "s3://some-bucket/"
        places = {
            self.config(prefix="a").place,
            self.config(endpoint="https://minio:9000/").place,
            self.config(bucket="other").place,
        }
        assert places == {"s3://some-bucket/a", "https://minio:9000//some-bucket/", "s3://other/"}


def config(**options):
    return S3Config.model_validate({"type": "s3", "bucket": "some-bucket", **options})


def connection(**options):
    keys = {"access_key": "A", "secret_key": "S"}
    return Connection(config(**keys, **options), Requests(0, 0))


def test_secrets_come_from_the_environment_or_a_file_and_never_print(monkeypatch, tmp_path):
    monkeypatch.setenv("THE_KEY", "canary-1")
    (tmp_path / "secret").write_text("canary-2\n")
    options = config(access_key="${THE_KEY}", secret_key={"file": str(tmp_path / "secret")})
    assert (options.access_key.reveal(), options.secret_key.reveal()) == ("canary-1", "canary-2")
    assert "canary" not in repr(options)


def test_what_moves_values_is_obstore_unless_boto3_is_wanted():
    assert [open_client(connection(client=client)).name for client in ("auto", "obstore", "boto3")] == [
        "obstore",
        "obstore",
        "boto3",
    ]


def test_where_obstore_is_not_installed_boto3_moves_values_unless_obstore_is_wanted(monkeypatch):
    monkeypatch.setattr("kvtiers_s3.store.find_spec", lambda _name: None)
    assert [open_client(connection(client=client)).name for client in ("auto", "boto3")] == ["boto3", "boto3"]
    with pytest.raises(ConfigError, match="client 'obstore' is not installed; pip install obstore, or set"):
        open_client(connection(client="obstore"))


def test_both_clients_keep_as_many_connections_as_are_wanted():
    few = connection(connections=7, endpoint="http://127.0.0.1:1")
    assert few.boto3_client(attempts=1).meta.config.max_pool_connections == 7
    assert few.obstore().client_options["pool_max_idle_per_host"] == "7"


@pytest.fixture
def full_listener():
    """The URL of a port where connections are never made: none is accepted, and there is no room to wait."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_connection_that_is_not_made_is_given_up_before_a_request_would_be(full_listener, client):
    times = {"connect_timeout": "300ms", "timeout": "25s"}
    begin = time.monotonic()
    with pytest.raises(TierUnavailable, match="Timeout: no answer in time"):
        S3Store(config(access_key="A", secret_key="S", endpoint=full_listener, client=client, **times))
    assert time.monotonic() - begin < 20
