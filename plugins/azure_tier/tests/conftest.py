"""Containers on Azurite, stores over them, and a proxy between them that does what networks and servers do."""

import importlib.util
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvtiers_azure.config import AzureConfig
from kvtiers_objectstore.testing.proxy import Proxy

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "libraries" / "objectstore" / "tests"


def _load(name, file):
    """Import a file as a module of this name, so that tests can import it by that name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


servers = _load("azure_servers", HERE / "servers.py")
if SHARED.is_dir():  # not beside an installed plugin, where the tests of the plugin alone are run
    for name in ("service", "faults", "stores", "commands", "checks"):
        _load(f"objectstore_{name}", SHARED / f"{name}.py")


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
def between(azurite):
    with Proxy(azurite.port) as proxy:
        yield proxy


@pytest.fixture
def through():
    """Return a function that gives the options of a tier behind a proxy."""
    return lambda proxy: {"endpoint": f"{proxy.endpoint}/{servers.ACCOUNT}"}


@pytest.fixture(scope="module")
def proxied(azurite, container):
    """A tier whose server lies behind a proxy, and the proxy. Its breaker is out of the way of the faults."""
    from objectstore_service import service

    with Proxy(azurite.port) as proxy:
        config = configs(f"{proxy.endpoint}/{servers.ACCOUNT}", container)(
            threads=4,
            timeout="700ms",
            deadline="30s",
            retries=1,
            breaker={"failures": 10_000, "min_calls": 100_000},
        )
        with service(config, 16 * 4096, 8) as tier:
            yield tier, proxy
            proxy.script = lambda _request: None


class _Empty(BaseHTTPRequestHandler):
    """Answers that there is no such blob."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b"<Error><Code>BlobNotFound</Code></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def empty_server():
    """The URL of a server that has nothing."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Empty) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{servers.ACCOUNT}"
        server.shutdown()
        thread.join()


class TokenServer(ThreadingHTTPServer):
    """Gives out a token, or with ``status`` refuses. ``asked``: path and body of each request."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Tokens)
        self.status, self.asked = 200, []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class _Tokens(_Empty):
    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        self.server.asked.append((self.path, self.rfile.read(length).decode()))
        granted = b'{"access_token": "the-token", "expires_in": "3600", "expires_on": "4102444800", "resource": "r"'
        granted += b', "token_type": "Bearer"}'
        body = granted if self.server.status == 200 else b'{"error": "invalid_client"}'
        if "oauth2/v2.0" in self.path:
            body = body.replace(b'"3600"', b"3600")
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.do_GET()


@pytest.fixture
def token_server():
    """A server that gives out tokens, as Entra ID and a machine's metadata service do."""
    with TokenServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
