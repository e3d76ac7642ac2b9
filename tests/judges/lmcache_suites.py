"""pytest plugin: LMCache's tests of what an L2 adapter promises, over kvtiers in the place of its mock."""

import tempfile

import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as lmcache_mock
import pytest
from expected import mark_expected
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

FOLDER = tempfile.TemporaryDirectory()
PATIENCE = "20s"


class Config:
    """The mock's options; its bandwidth has no counterpart."""

    def __init__(self, max_size_gb, mock_bandwidth_gb):
        self.capacity = int(max_size_gb * (1 << 30))


def make_adapter(config):
    """Make an adapter as a server of LMCache's would, over an empty folder."""
    path = tempfile.mkdtemp(dir=FOLDER.name)
    tier = {"type": "fs", "path": path, "capacity": "1GiB", "min_free": 0, "io": "thread"}
    tiers = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": PATIENCE, "secondary": [tier]}
    waits = dict.fromkeys(("lookup_deadline", "deadline", "store_deadline"), PATIENCE)
    params = {"config": tiers, "weights": "judged", "bounce_bytes": "8MiB", "capacity": config.capacity, **waits}
    spec = {"module_path": "kvtiers_lmcache", "class_name": "KvtiersL2Adapter", "adapter_params": params}
    return create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict(spec))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_expected(items)


lmcache_mock.MockL2Adapter = make_adapter
lmcache_mock.MockL2AdapterConfig = Config
