"""Buckets on real servers, stores over them, and a proxy between them that does what networks and servers do."""

import importlib.util
import mmap
import sys
import uuid
from pathlib import Path

import pytest

from kvtiers_objectstore.testing import proxy
from kvtiers_s3.config import S3Config

PAGE = 4096
HERE = Path(__file__).parent


def _load(name, file):
    """Import a file as a module of this name, so that tests can import it by that name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


servers = _load("s3_servers", HERE / "servers.py")
SHARED = HERE.parents[2] / "libraries" / "objectstore" / "tests"
if SHARED.is_dir():  # not beside an installed plugin, where the tests of the plugin alone are run
    _load("objectstore_service", SHARED / "service.py")
    _load("objectstore_checks", SHARED / "checks.py")
KEYS = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY, "region": "us-east-1"}


def configs(endpoint, bucket):
    """Return a function that gives the options of a tier there, under a prefix of its own."""
    prefix = uuid.uuid4().hex

    def make(**options):
        where = {"endpoint": endpoint, "bucket": bucket, "prefix": prefix}
        return S3Config(**{"type": "s3", **where, **KEYS, **options})

    return make


@pytest.fixture(scope="session")
def radosgw():
    """Ceph's gateway: one for the whole session."""
    with servers.Radosgw() as gateway:
        yield gateway


@pytest.fixture(scope="session")
def moto():
    """The URL of moto's server: one for the whole session."""
    with servers.moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ceph_bucket(radosgw):
    return servers.new_bucket(radosgw.endpoint)


@pytest.fixture(scope="session")
def moto_bucket(moto):
    return servers.new_bucket(moto)


@pytest.fixture
def config(radosgw, ceph_bucket):
    """Return a function that gives the options of a tier on Ceph's gateway."""
    return configs(radosgw.endpoint, ceph_bucket)


@pytest.fixture(scope="module", params=["obstore", "boto3"])
def proxied(request, radosgw, ceph_bucket):
    """A tier whose server lies behind a proxy, and the proxy."""
    from objectstore_service import behind_proxy

    def config_of(between, **options):
        return configs(between.endpoint, ceph_bucket)(client=request.param, **options)

    with behind_proxy(int(radosgw.endpoint.rpartition(":")[2]), config_of, timeout="2s") as both:
        yield both


@pytest.fixture
def moto_config(moto, moto_bucket):
    """The same on moto's server, which supports checksums."""
    return configs(moto, moto_bucket)


@pytest.fixture
def empty_server():
    """The URL of a server that has nothing: every object is absent."""
    with proxy.Proxy() as server:
        yield server.endpoint


@pytest.fixture
def value():
    """Return a function that gives a value of so many pages, page-aligned, each with the same bytes."""

    def make(byte: int, pages: int = 1) -> memoryview:
        memory = memoryview(mmap.mmap(-1, pages * PAGE))
        memory[:] = bytes([byte]) * len(memory)
        return memory

    return make
