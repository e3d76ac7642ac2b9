"""The conformance kit, run on a real store as an engine has it: in real hosts, two of them.

A row of the kit's has no room for a seal, so values lie beside the rows, as they do in vLLM's memory.
"""

import mmap
import os

import pytest

from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import create_memfd
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.testing import SecondaryTierTests
from kvtiers_fs.config import FsConfig

NAMES = StorageNames("test/model-0123456789abcdef01234567/", b"layout-1")
PAGE = 4096


class HostedTier(ChunkStoreTier):
    """A tier that ends its hosts when it is closed, and takes its events before each answer, as under the manager."""

    def __init__(self, config, region):
        self._processes = TierHosts(region, "test", lambda: NAMES)
        self._kept = []
        super().__init__(config, self._processes.pool(config, load_tier(config.type)))
        assert not (error := self.wait_open(60.0)), error

    def poll(self):
        kept, self._kept = self._kept, []
        return [*kept, *super().poll()]

    def is_available(self):
        self._kept = self.poll()
        return super().is_available()

    def close(self):
        super().close()
        self._processes.close(60.0)


class TestTierInHosts(SecondaryTierTests):
    @pytest.fixture
    def open_tier(self, tmp_path, monkeypatch):
        """The kit's rows are anonymous, and hosts need memory that they can map."""
        fds = []

        def mapped(_fd, nbytes):
            fds.append(create_memfd("kvtiers-kit", nbytes))
            return honest(fds[-1], nbytes)

        honest = mmap.mmap
        monkeypatch.setattr("kvtiers.testing.secondary_tier.engine.mmap.mmap", mapped)
        config = FsConfig(type="fs", path=tmp_path / "values", capacity="1GiB", min_free=0, processes=2)

        def open_tier(context):
            nbytes, stride = len(context.region), context.row_stride
            region = HostedRegion(fds[-1], nbytes, nbytes, stride, [(stride, stride + PAGE)])
            try:
                return HostedTier(config, region)
            finally:
                os.close(fds.pop())

        return open_tier
