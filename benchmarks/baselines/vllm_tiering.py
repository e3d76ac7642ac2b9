"""vLLM's `TieringOffloadingManager`, driven through the same life of a chunk as ours, for comparison.

From an installed vLLM, or from the Python files of its wheel alone, unpacked somewhere
(`pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl 'vllm/*.py' -d FOLDER`): what its offloading code imports
besides itself, torch above all, is then replaced by empty stand-ins, none of which is used on the paths measured here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OFFLOADING = "vllm.v1.kv_offload"
_REAL = (
    _OFFLOADING,
    "vllm.v1.metrics.cache_hit_source",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
)


class _Anything(type):
    """A class with whatever attribute is asked for, so that annotations and base classes can be evaluated."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: object) -> Any:
        return cls


class _StandIn(types.ModuleType):
    """A module with whatever name is imported from it."""

    __path__: list[str] = []  # noqa: RUF012 -- a module attribute that marks a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return logging.getLogger if name == "init_logger" else _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's offloading code in a folder, and stand-ins for all else of vLLM, and for torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.partition(".")[0] not in {"vllm", "torch"}:
            return None
        place = self._folder.joinpath(*name.split("."))
        if name.startswith(_REAL):
            if (place / "__init__.py").exists():
                folders = [str(place)]
                return importlib.util.spec_from_file_location(
                    name, place / "__init__.py", submodule_search_locations=folders
                )
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Return at once: a stand-in is complete as it is."""


def prepare(folder: str | None) -> str:
    """Make vLLM's offloading code importable, installed or from a folder; return "" or why it is not."""
    if folder is not None:
        if not Path(folder, *_OFFLOADING.split("."), "tiering", "manager.py").exists():
            return f"{folder}: no vllm/v1/kv_offload/tiering/manager.py in it"
        sys.meta_path.insert(0, _Finder(Path(folder)))
    elif importlib.util.find_spec("vllm") is None:
        return "not installed, and no --vllm FOLDER with its wheel's Python files"
    return ""


class VllmLife:
    """vLLM's manager over a primary of ``resident`` rows and two tiers that answer at once."""

    def __init__(self, resident: int, batch: int) -> None:
        import numpy as np
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        class Region:
            def create_kv_memoryview(self) -> memoryview:
                return memoryview(np.zeros((resident, 16), np.int8))

            def cleanup(self) -> None:
                """There is nothing to clean up."""

        self.batch = batch
        self._hit, self._context = LookupResult.HIT, ReqContext
        self._end = ScheduleEndContext([], [])
        self._primary = CPUPrimaryTierOffloadingManager(resident, Region())
        tier = _instant_tier()
        tiers = [tier(None, self._primary.get_kv_memoryview(), name) for name in ("a", "b")]
        self._manager = TieringOffloadingManager(self._primary, tiers)
        self._stored: list[list[bytes]] = []
        self._requests = 0

    def free_rows(self) -> int:
        """Return the rows that nothing has been stored in yet."""
        return int(self._primary._get_num_free_chunks())  # noqa: SLF001 -- it does not say otherwise

    def one(self, keys: list[bytes], timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Lead one batch of new chunks through its life, and an old one through a hit."""
        manager = self._manager
        ctx = self._request(keys)
        timed("end", lambda: manager.on_new_request(ctx))
        timed("miss", lambda: [manager.lookup(key, ctx) for key in keys])
        timed("store", lambda: manager.prepare_store(keys, ctx))
        timed("store", lambda: manager.complete_store(keys, ctx))
        timed("cascade", lambda: manager.on_schedule_end(self._end))
        timed("touch", lambda: manager.touch(keys, ctx))
        timed("end", lambda: manager.on_request_finished(ctx))
        self._stored.append(keys)
        old = self._any_resident()
        reader = self._request(old)
        timed("end", lambda: manager.on_new_request(reader))
        timed("hit", lambda: [manager.lookup(key, reader) for key in old])
        timed("load", lambda: manager.prepare_load(old, reader))
        timed("load", lambda: manager.complete_load(old, reader))
        timed("end", lambda: manager.on_request_finished(reader))
        timed("cascade", lambda: manager.on_schedule_end(self._end))

    def _request(self, keys: list[bytes]) -> Any:
        self._requests += 1
        ctx = self._context(f"r{self._requests}")
        for place, key in enumerate(keys, 1):  # its scheduler's work, so not timed
            ctx.set_offload_key_position(key, 16 * place)
        return ctx

    def _any_resident(self) -> list[bytes]:
        while True:
            index = random.randrange(len(self._stored))
            keys = self._stored[index]
            if all(self._primary.lookup(key, None) is self._hit for key in keys):
                return keys
            self._stored[index] = self._stored[-1]
            self._stored.pop()


def _instant_tier() -> type:
    from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    class InstantTier(SecondaryTierManager):
        """Has nothing, takes everything, and has ended each job when it is asked."""

        medium = Medium.CPU

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._finished: list[Any] = []

        def lookup(self, key: bytes, req_context: Any) -> Any:
            del key, req_context
            return LookupResult.MISS

        def submit_store(self, job: Any) -> None:
            self._finished.append(
                JobResult(job.job_id, success=True, transfer_time=0.001, transfer_bytes=4096 * len(job.keys))
            )

        submit_load = submit_store

        def get_finished_jobs(self) -> list[Any]:
            finished, self._finished = self._finished, []
            return finished

        def on_new_request(self, req_context: Any) -> Any:
            del req_context
            return RequestOffloadingContext()

        def drain_jobs(self) -> None:
            """Nothing is ever left."""

    return InstantTier
