"""A pool for the tests of the ``mooncake`` tier."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtiers_mooncake.config import MooncakeConfig


def _load(name):
    """Import a module of this folder as ``mooncake_NAME``, so that tests can import it by that name."""
    spec = importlib.util.spec_from_file_location(f"mooncake_{name}", Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pool = _load("pool")


@pytest.fixture(scope="session")
def client_library() -> None:
    """Skip where there is no build of the client for this Python; elsewhere one that is missing is a failure."""
    if sys.version_info >= (3, 14) and importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake has no client for this release of Python")


@pytest.fixture(scope="module")
def shared_master(client_library, tmp_path_factory) -> Iterator[pool.Master]:
    """A master with one segment in another process, for the tests of a module that break nothing."""
    with pool.shared_pool(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


_load("hosted")


@pytest.fixture
def master(client_library, tmp_path) -> Iterator[pool.Master]:
    """A master of the test's own, that notices within seconds what is gone."""
    master = pool.Master(tmp_path, "--client_ttl=2", "--default_kv_lease_ttl=1000").start()
    yield master
    master.kill()


@pytest.fixture
def contribute(master):
    """Start a process with a segment in the test's own pool."""
    owners = []

    def start(segment: int = 64 << 20) -> pool.SegmentOwner:
        owners.append(pool.SegmentOwner(master.address, segment))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()


@pytest.fixture
def open_store():
    """Open stores that are closed at the end."""
    from kvtiers_mooncake.store import MooncakeStore

    stores = []

    def start(master: str, *, region: memoryview = memoryview(b""), **options: object) -> MooncakeStore:  # noqa: B008
        config = MooncakeConfig(type="mooncake", master=master, **options)
        stores.append(MooncakeStore(config, region=region))
        return stores[-1]

    yield start
    for store in stores:
        store.close()
