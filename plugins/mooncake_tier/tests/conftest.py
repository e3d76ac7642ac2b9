"""A pool for the tests of the ``mooncake`` tier."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def _load(name):
    """Import a module of this folder as ``mooncake_NAME``, so that tests can import it by that name."""
    spec = importlib.util.spec_from_file_location(f"mooncake_{name}", Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pool = _load("pool")


@pytest.fixture(scope="module")
def shared_master(tmp_path_factory) -> Iterator[pool.Master]:
    """A master with one segment in another process, for the tests of a module that break nothing."""
    master = pool.Master(tmp_path_factory.mktemp("mooncake")).start()
    owner = pool.SegmentOwner(master.address, 1 << 30)
    yield master
    owner.kill()
    master.kill()
