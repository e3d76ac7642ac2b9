"""Buckets on real servers, stores over them, and a proxy between them that does what networks and servers do."""

import importlib.util
import sys
import uuid
from functools import cache
from pathlib import Path

import botocore.session
import pytest

from kvtiers_objectstore.testing.proxy import Proxy
from kvtiers_s3.config import S3Config

HERE = Path(__file__).parent
# Each store has a session of its own, which would read botocore's descriptions of AWS anew: .1 s of each of 500 tests.
botocore.session.create_loader = cache(botocore.session.create_loader)


# Tests of the plugin alone are run where there is no repository around them.
spec = importlib.util.spec_from_file_location("s3_servers", HERE / "servers.py")
servers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(servers)
KEYS = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY, "region": "us-east-1"}


def configs(endpoint, bucket):
    """Return a function that gives the options of a tier there, under a prefix of its own."""
    prefix = uuid.uuid4().hex

    def make(**options):
        where = {"endpoint": endpoint, "bucket": bucket, "prefix": prefix}
        return S3Config(**{"type": "s3", **where, **KEYS, **options})

    return make


class Objects:
    """The objects of a bucket, as another program sees them."""

    def __init__(self, endpoint, bucket):
        self.client = servers.client_of(endpoint)
        self.bucket = bucket

    def put(self, name, body):
        self.client.put_object(Bucket=self.bucket, Key=name, Body=body)

    def get(self, name):
        return self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()


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


@pytest.fixture
def in_file():
    """Return a function that gives the options of a tier as they stand in a file."""

    def make(config):
        where = {"endpoint": config.endpoint, "bucket": config.bucket, "prefix": config.prefix}
        return {"type": "s3", **where, **KEYS}

    return make


@pytest.fixture
def objects(radosgw, ceph_bucket):
    return Objects(radosgw.endpoint, ceph_bucket)


@pytest.fixture
def doomed(radosgw):
    """A bucket's name, and a function that deletes it."""
    name = servers.new_bucket(radosgw.endpoint)
    return name, lambda: servers.delete_bucket(radosgw.endpoint, name)


@pytest.fixture
def between(radosgw):
    with Proxy(int(radosgw.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def through():
    """Return a function that gives the options of a tier behind a proxy."""
    return lambda proxy: {"endpoint": proxy.endpoint}


@pytest.fixture(scope="module", params=["obstore", "boto3"])
def proxied(request, radosgw, ceph_bucket):
    """A tier whose server lies behind a proxy, and the proxy."""
    from libraries.objectstore.tests.service import behind_proxy

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
    with Proxy() as server:
        yield server.endpoint
