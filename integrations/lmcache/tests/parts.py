"""Real memory objects on the CPU, and a server's use of an adapter: what LMCache's controllers do with one."""

import itertools
import os
import select
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator

SHAPE = (2, 4, 16, 128)
PATIENCE = 120.0  # seconds; a hang is loud
WEIGHTS = "0123abc"
_numbers = itertools.count()


class Layout:
    """The shapes and types of a group's objects."""

    def __init__(self, *shapes: Sequence[int], dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> None:
        self.shapes = [torch.Size(shape) for shape in (shapes or (SHAPE,))]
        self.dtypes = [*dtypes] * (len(self.shapes) // len(dtypes))
        self.desc = MemoryLayoutDesc(self.shapes, self.dtypes)


class Memory:
    """L1 without a name (``desc``): memory objects as LMCache's own allocator makes them; freed at the end."""

    desc: Any = None

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self._allocator = HostMemoryAllocator(nbytes)
        self._objects: list[Any] = []

    def take(self, count: int, layout: Layout) -> list[Any]:
        found = [self._allocator.allocate(layout.shapes, layout.dtypes) for _ in range(count)]
        assert None not in found, "L1 is full"
        self._objects += found
        return found

    def filled(self, count: int, layout: Layout, seed: int) -> list[Any]:
        objects = self.take(count, layout)
        rng = np.random.default_rng(seed)
        for it in objects:
            it.byte_array.cast("B")[:] = rng.integers(0, 256, it.get_size(), np.uint8).tobytes()
        return objects

    def close(self) -> None:
        for it in self._objects:
            it.ref_count_down()
        self._objects.clear()
        self._allocator.close()


class SharedMemory(Memory):
    """L1 as the server's own manager makes it, in shared memory with a name."""

    def __init__(self, nbytes: int = 64 << 20) -> None:
        name = f"kvtiers_tests_{os.getpid()}_{next(_numbers)}"
        self._l1 = L1MemoryManager(L1MemoryManagerConfig(nbytes, use_lazy=False, shm_name=name))
        self.desc = self._l1.get_l1_memory_desc()
        self._objects = []

    def take(self, count: int, layout: Layout) -> list[Any]:
        error, found = self._l1.allocate(layout.desc, count)
        assert error == L1Error.SUCCESS, error
        self._objects += found
        return found

    def close(self) -> None:
        self._allocator = self._l1
        super().close()


class Events(L2AdapterListener):
    """What an adapter reports to LMCache's eviction."""

    def __init__(self) -> None:
        self.stored: list[ObjectKey] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        assert len(keys) == len(sizes)
        self.stored += keys

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


class Server:
    """An adapter made by LMCache's factory, with objects of one layout."""

    def __init__(self, params: dict[str, Any], memory: Memory, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self.memory = memory
        spec = {"module_path": "kvtiers_lmcache", "class_name": "KvtiersL2Adapter", "adapter_params": params}
        self.adapter = create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict(spec), memory.desc)
        self.adapter.set_backend_identity("plugin")
        self.events = Events()
        self.adapter.register_listener(self.events)

    def close(self) -> None:
        self.adapter.close()

    # -- what the store controller does

    def put(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        """Store, wait for the descriptor, and return the result."""
        return self.stored(self.adapter.submit_store_task(keys, objects))

    def stored(self, task: int) -> Any:
        found: dict[int, Any] = {}
        while task not in found:
            wait(self.adapter.get_store_event_fd())
            found |= self.adapter.pop_completed_store_tasks()
        return found[task]

    # -- what the prefetch controller does

    def lookup(self, keys: list[ObjectKey], layout: Layout | None = None) -> list[bool]:
        """Look up and lock; return which keys are there."""
        descs = {key.object_group_id: (layout or self.layout).desc for key in keys}
        return self.found(self.adapter.submit_lookup_and_lock_task(keys, descs), len(keys))

    def found(self, task: int, count: int) -> list[bool]:
        while (bitmap := self.adapter.query_lookup_and_lock_result(task)) is None:
            wait(self.adapter.get_lookup_and_lock_event_fd())
        assert self.adapter.query_lookup_and_lock_result(task) is None, "a result is given once"
        return bits(bitmap, count)

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        return self.loaded(self.adapter.submit_load_task(keys, objects), len(keys))

    def loaded(self, task: int, count: int) -> list[bool]:
        while (bitmap := self.adapter.query_load_result(task)) is None:
            wait(self.adapter.get_load_event_fd())
        return bits(bitmap, count)

    # -- whole rounds

    def store(self, keys: list[ObjectKey], seed: int = 0) -> list[bytes]:
        """Store random bytes under keys, and return them."""
        objects = self.memory.filled(len(keys), self.layout, seed)
        result = self.put(keys, objects)
        assert result.is_successful(), self.adapter.report_status()
        assert result.bytes_transferred() == sum(it.get_size() for it in objects)
        return content(objects)

    def fetch(self, keys: list[ObjectKey]) -> list[bytes | None]:
        """Look up, load what is there, and unlock; return what was loaded. What was not loaded is left alone."""
        there = [key for key, is_there in zip(keys, self.lookup(keys), strict=True) if is_there]
        objects = self.memory.filled(len(there), self.layout, 99)
        before = content(objects)
        loaded = dict(zip(there, zip(self.load(there, objects), content(objects), before, strict=True), strict=True))
        self.adapter.submit_unlock(there)
        for is_loaded, now, old in loaded.values():
            assert is_loaded or now == old
        return [loaded[key][1] if key in loaded and loaded[key][0] else None for key in keys]


def wait(fd: int) -> None:
    """Wait for a descriptor as a controller does, and take its signal."""
    assert select.select([fd], [], [], PATIENCE)[0], "no signal"
    os.eventfd_read(fd)


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bool(bitmap.test(place)) for place in range(count)]


def content(objects: Sequence[Any]) -> list[bytes]:
    return [bytes(it.byte_array) for it in objects]


def keys_of(count: int, first: int = 0, **more: Any) -> list[ObjectKey]:
    facts = {"model_name": "test/model", "kv_rank": 0} | more
    return [ObjectKey(chunk_hash=bytes([place]) * 32, **facts) for place in range(first, first + count)]
