"""pytest plugin: vLLM's suites of its KV offloading, each over the part of kvtiers that takes the place of its own."""

import pytest
import vllm_cache_policies
import vllm_fs_tier
import vllm_scheduler
from expected import mark_expected

from kvtiers_vllm.plugin import register

register()
_CALLS = {"test_fs_tier.py": vllm_fs_tier.call, "test_scheduler.py": vllm_scheduler.call}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_expected(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with _CALLS.get(item.path.name, vllm_cache_policies.call)(item):
        return (yield)
