"""vLLM's tests of its fs tier (``tiering/test_fs_tier.py``) over ``kvtiers-fs``, made by vLLM's factory.

A test that asks for a block's file gets that of kvtiers' value; one that has vLLM's write of a file fail has kvtiers'
write of that value fail.
"""

import dataclasses
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import vllm.v1.kv_offload.tiering.fs.manager as vllm_fs
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtiers.layout.storage_name import StorageNames, model_slug
from kvtiers_fs.paths import place_of
from kvtiers_fs.store import FsStore

__all__ = ["call"]

PATIENCE = 20.0
COMMON = {"locality", "enable_kv_events"}
"""The options that all tiers of vLLM's take."""


def make_tier(offloading_spec, primary_kv_view, tier_type, root_dir, **options):
    """Make the tier as vLLM would; of vLLM's options those of its own threads have no counterpart."""
    rows, row_bytes = primary_kv_view.shape[0], primary_kv_view.nbytes // primary_kv_view.shape[0]
    if not offloading_spec.config.groups:  # the tests' mock names no layers, which a real engine does
        group = OffloadingGroupConfig(group_id=0, tokens_per_block=16, layer_names=("layer",))
        offloading_spec.config = dataclasses.replace(
            offloading_spec.config, groups=(group,), worker_kv_bytes_per_block=row_bytes
        )
    waits = {"lookup_wait": "2s", "load_wait": "20s"}
    offloading_spec.extra_config = {"secondary_tiers": [{"type": "kvtiers-fs"}], "kvtiers": waits}
    own = {"path": root_dir, "capacity": "1GiB", "min_free": 0, "io": "thread", "required": True}
    common = {name: value for name, value in options.items() if name in COMMON}
    view = primary_kv_view.cast("B").cast("B", (rows, row_bytes))
    tier = SecondaryTierFactory.create_secondary_tier({"type": "kvtiers-fs", **own, **common}, view, offloading_spec)
    opened = tier.opened
    names = StorageNames(f"{opened.namespace}/{model_slug(opened.model)}-{opened.fingerprint}/", b"")
    tier.file_mapper = SimpleNamespace(
        get_file_name=lambda key: _file_of(root_dir, names.name(key)), base_path=f"{root_dir}/{names.prefix}"
    )
    return tier


_files = {}
"""By storage name, the files that a test has asked for."""


def _file_of(root, name):
    place = place_of(name)
    _files[name] = f"{root}/{place.folder}/{place.leaf}"
    return _files[name]


_write_many = FsStore.write_many


def _write_many_or_fail(store, names, srcs):
    vllm_fs.batch_store_block([_files[name] for name in names if name in _files])
    return _write_many(store, names, srcs)


def lookup_and_wait(tier, keys, ctx, timeout=PATIENCE):
    """Look up as vLLM's scheduler does: again in each step, until no answer is missing."""
    until = time.monotonic() + timeout
    while True:
        found = [tier.lookup(key, ctx) for key in keys]
        if LookupResult.RETRY not in found or time.monotonic() > until:
            return found
        _step(tier)


def _step(tier):
    tier.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
    list(tier.get_finished_jobs())
    time.sleep(0.005)


@contextmanager
def call(item):
    """Run a test with the lookups above: vLLM's own reaches into its tier for the moment when its answers have come."""
    module = item.module

    def look(tier, keys, ctx=module._CTX, timeout=PATIENCE):
        return lookup_and_wait(tier, keys, ctx, max(timeout, PATIENCE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "lookup_and_wait", look)
        yield


vllm_fs.FileSystemTierManager = make_tier
vllm_fs.batch_store_block = lambda _paths, *_rest: None
FsStore.write_many = _write_many_or_fail
