"""Containers on Azurite, stores over them, and a proxy between them that does what networks and servers do."""

import importlib.util
import json
import sys
import uuid
from pathlib import Path

import pytest

from kvtiers_azure.config import AzureConfig
from kvtiers_objectstore.testing.answering import Answering
from kvtiers_objectstore.testing.proxy import Proxy

HERE = Path(__file__).parent
# Tests of the plugin alone are run where there is no repository around them.
spec = importlib.util.spec_from_file_location("azure_servers", HERE / "servers.py")
servers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(servers)


def configs(endpoint, container):
    """Return a function that gives the options of a tier there, under a prefix of its own."""
    prefix = uuid.uuid4().hex

    def make(**options):
        where = {"account": servers.ACCOUNT, "endpoint": endpoint, "container": container, "prefix": prefix}
        keys = {} if {"sas", "identity", "emulator"} & options.keys() else {"account_key": servers.ACCOUNT_KEY}
        return AzureConfig(**{"type": "azure", **where, **keys, **options})

    return make


class Objects:
    """The blobs of a container, as another program sees them."""

    def __init__(self, endpoint, container):
        self.where = endpoint, container

    def put(self, name, body):
        servers.put_blob(*self.where, name, body)

    def get(self, name):
        return servers.get_blob(*self.where, name)


@pytest.fixture(scope="session")
def azurite():
    """Azurite: one for the whole session."""
    with servers.Azurite() as server:
        yield server


@pytest.fixture(scope="session")
def container(azurite):
    return servers.new_container(azurite.endpoint)


@pytest.fixture
def config(azurite, container):
    """Return a function that gives the options of a tier on Azurite."""
    return configs(azurite.endpoint, container)


@pytest.fixture
def objects(azurite, container):
    return Objects(azurite.endpoint, container)


@pytest.fixture
def in_file():
    """Return a function that gives the options of a tier as they stand in a file."""

    def make(config):
        where = {"endpoint": config.endpoint, "container": config.container, "prefix": config.prefix}
        return {"type": "azure", "account": servers.ACCOUNT, "account_key": servers.ACCOUNT_KEY, **where}

    return make


@pytest.fixture
def doomed(azurite):
    """A container's name, and a function that deletes it."""
    name = servers.new_container(azurite.endpoint)
    return name, lambda: servers.delete_container(azurite.endpoint, name)


@pytest.fixture
def between(azurite):
    with Proxy(azurite.port) as proxy:
        yield proxy


@pytest.fixture
def through():
    """Return a function that gives the options of a tier behind a proxy."""
    return lambda proxy: {"endpoint": f"{proxy.endpoint}/{servers.ACCOUNT}"}


@pytest.fixture(scope="module")
def proxied(azurite, container):
    """A tier whose server lies behind a proxy, and the proxy."""
    from libraries.objectstore.tests.service import behind_proxy

    def config_of(proxy, **options):
        return configs(f"{proxy.endpoint}/{servers.ACCOUNT}", container)(**options)

    with behind_proxy(azurite.port, config_of, timeout="2s") as both:
        yield both


@pytest.fixture
def empty_server():
    """The URL of a server that has nothing."""
    with Proxy() as server:
        yield f"{server.endpoint}/{servers.ACCOUNT}"


@pytest.fixture
def token_server():
    """A server that gives out tokens, as Entra ID and a machine's metadata service do."""

    def answer(path):
        seconds = 3600 if "oauth2/v2.0" in path else "3600"
        token = {"access_token": "the-token", "expires_in": seconds, "token_type": "Bearer"}
        return 200, json.dumps(token | {"expires_on": "4102444800", "resource": "r"}).encode()

    with Answering(answer) as server:
        yield server
