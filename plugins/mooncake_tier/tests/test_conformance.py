from contextlib import contextmanager
from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers.testing.chunk_store.life import FailureTests
from kvtiers_mooncake.config import MooncakeConfig
from kvtiers_mooncake.store import MooncakeStore


def open_mooncake(master: str, **options: object) -> MooncakeStore:
    return MooncakeStore(MooncakeConfig(type="mooncake", master=master, **options), region=memoryview(b""))


class TestMooncakeStore(ChunkStoreTests):
    store_class = MooncakeStore

    @pytest.fixture
    def open_store(self, shared_master):
        return partial(open_mooncake, shared_master.address)


class TestMooncakeStoreWithoutAMaster(FailureTests):
    store_class = MooncakeStore

    @pytest.fixture
    def open_store(self, master, contribute):
        contribute()
        return partial(open_mooncake, master.address)

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
