"""A tier over a backend that does what the test says, on the test's own clock."""

import pytest
from tests.unit.secondary.store_tier.hand_backend import HandBackend, step

from kvtiers.api import TierConfig
from kvtiers.host.messages import Opened
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.store_tier import ChunkStoreTier


@pytest.fixture
def backend(caplog):
    backend = HandBackend()
    backend.caplog = caplog
    return backend


@pytest.fixture
def make(clock, backend):
    def make(rows=0, row_bytes=0, **options):
        config = TierConfig.model_validate({"type": "t", **options})
        tier = ChunkStoreTier(config, HostPool([PooledHost("t", backend)]), clock, rows=rows, row_bytes=row_bytes)
        backend.say(Opened())
        step(tier)
        return tier

    return make


@pytest.fixture
def tier(make):
    return make(breaker={"failures": 3, "delay": "1s"})


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(6)]
