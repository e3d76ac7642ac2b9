"""Buckets on fake-gcs-server, stores over them, and a proxy between them that does what networks and servers do."""

import importlib.util
import sys
import uuid
from pathlib import Path

import pytest

from kvtiers_gcs.config import GcsConfig
from kvtiers_objectstore.testing.answering import Answering
from kvtiers_objectstore.testing.proxy import Proxy

HERE = Path(__file__).parent
# Tests of the plugin alone are run where there is no repository around them.
spec = importlib.util.spec_from_file_location("gcs_servers", HERE / "servers.py")
servers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(servers)


def configs(endpoint, bucket):
    """Return a function that gives the options of a tier there, under a prefix of its own."""
    prefix = uuid.uuid4().hex

    def make(**options):
        where = {"endpoint": endpoint, "bucket": bucket, "prefix": prefix}
        who = {} if {"credentials", "credentials_file"} & options.keys() else {"anonymous": True}
        return GcsConfig(**{"type": "gcs", **where, **who, **options})

    return make


class Objects:
    """The objects of a bucket, as another program sees them."""

    def __init__(self, endpoint, bucket):
        self.where = endpoint, bucket

    def put(self, name, body):
        servers.put_object(*self.where, name, body)

    def get(self, name):
        return servers.get_object(*self.where, name)


@pytest.fixture(scope="session")
def fake_gcs():
    """fake-gcs-server and its gateway: one of each for the whole session."""
    with servers.FakeGcs() as server:
        yield server


@pytest.fixture(scope="session")
def bucket(fake_gcs):
    return servers.new_bucket(fake_gcs.endpoint)


@pytest.fixture
def config(fake_gcs, bucket):
    """Return a function that gives the options of a tier on fake-gcs-server."""
    return configs(fake_gcs.endpoint, bucket)


@pytest.fixture
def objects(fake_gcs, bucket):
    return Objects(fake_gcs.endpoint, bucket)


@pytest.fixture
def in_file():
    """Return a function that gives the options of a tier as they stand in a file."""

    def make(config):
        where = {"endpoint": config.endpoint, "bucket": config.bucket, "prefix": config.prefix}
        return {"type": "gcs", "anonymous": True, **where}

    return make


@pytest.fixture
def doomed(fake_gcs):
    """A bucket's name, and a function that deletes it."""
    name = servers.new_bucket(fake_gcs.endpoint)
    return name, lambda: servers.delete_bucket(fake_gcs.endpoint, name)


@pytest.fixture
def between(fake_gcs):
    with Proxy(fake_gcs.port) as proxy:
        yield proxy


@pytest.fixture
def through():
    """Return a function that gives the options of a tier behind a proxy."""
    return lambda proxy: {"endpoint": proxy.endpoint}


@pytest.fixture(scope="module")
def proxied(fake_gcs, bucket):
    """A tier whose server lies behind a proxy, and the proxy."""
    from libraries.objectstore.tests.service import behind_proxy

    def config_of(proxy, **options):
        return configs(proxy.endpoint, bucket)(**options)

    with behind_proxy(fake_gcs.port, config_of, timeout="2s") as both:
        yield both


@pytest.fixture
def empty_server():
    """The URL of a server that has nothing."""
    with Proxy() as server:
        yield server.endpoint


TOKEN = f'{{"access_token": "{servers.TOKEN}", "expires_in": 3600, "token_type": "Bearer"}}'.encode()


@pytest.fixture
def token_server():
    """A server that gives out tokens, as Google's do, and a machine's metadata service."""

    def answer(path):
        if path.startswith("/computeMetadata/v1/instance/service-accounts/") and "token" not in path:
            return 200, b'{"email": "of-the-machine", "scopes": [], "aliases": ["default"]}'
        return 200, TOKEN

    with Answering(answer) as server:
        yield server
