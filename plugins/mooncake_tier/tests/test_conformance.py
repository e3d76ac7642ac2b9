from contextlib import contextmanager
from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers.testing.chunk_store.life import FailureTests
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_mooncake.store import MooncakeStore


def open_mooncake(address: str, http: str) -> MooncakeStore:
    config = MooncakeConfig(type="mooncake", master=address, master_http=http)
    return MooncakeStore(config, region=memoryview(b""))


class TestMooncakeStore(ChunkStoreTests):
    store_class = MooncakeStore

    @pytest.fixture
    def open_store(self, shared_master):
        return partial(open_mooncake, shared_master.address, shared_master.http)


class TestMooncakeStoreWithoutAMaster(FailureTests):
    store_class = MooncakeStore

    @pytest.fixture
    def open_store(self, master, contribute):
        contribute()
        return partial(open_mooncake, master.address, master.http)

    @pytest.fixture
    def break_backend(self, master):
        @contextmanager
        def without_a_master(_):
            master.kill()
            yield
            master.start()

        return without_a_master


class TestMooncakePlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, shared_master):
        return {"type": "mooncake", "master": shared_master.address, "segment": "64MiB"}
