from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers_fs.config import FsConfig
from kvtiers_fs.slab.store import SlabStore


class TestSlabStore(ChunkStoreTests):
    store_class = SlabStore

    @pytest.fixture
    def open_store(self, tmp_path):
        config = FsConfig(type="fs", path=tmp_path / "values", capacity="512MiB", min_free=0, layout="slab")
        return partial(SlabStore, config)


class TestSlabStoreWithDirectIoAndFsync(ChunkStoreTests):
    store_class = SlabStore

    @pytest.fixture
    def open_store(self, tmp_path):
        options = {"path": tmp_path / "values", "capacity": "256MiB", "min_free": 0, "layout": "slab"}
        return partial(SlabStore, FsConfig(type="fs", direct=True, fsync=True, **options))


class TestSlabPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, tmp_path):
        return {"type": "fs", "path": str(tmp_path / "values"), "capacity": "1GiB", "layout": "slab"}
