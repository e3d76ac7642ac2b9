from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore


class TestFsStore(ChunkStoreTests):
    store_class = FsStore

    @pytest.fixture
    def open_store(self, tmp_path):
        return partial(FsStore, FsConfig(type="fs", path=tmp_path / "values", capacity="1GiB", min_free=0))


class TestFsStoreWithDirectIoAndFsync(ChunkStoreTests):
    store_class = FsStore

    @pytest.fixture
    def open_store(self, tmp_path):
        config = FsConfig(type="fs", path=tmp_path / "values", capacity="256MiB", min_free=0, direct=True, fsync=True)
        return partial(FsStore, config)


class TestFsPlugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, tmp_path):
        return {"type": "fs", "path": str(tmp_path / "values"), "capacity": "1GiB", "mode": "0660"}
