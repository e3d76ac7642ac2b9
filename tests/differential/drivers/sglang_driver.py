"""The driver of SGLang: its real pools, factory and hashes on CPU tensors, as the integration's own tests have them."""

import sys
from importlib.metadata import version
from pathlib import Path

from common import Here, assert_mapped, compared

sys.path.insert(0, str(Path(__file__).parents[3] / "integrations" / "sglang"))

from tests import without_torchvision  # noqa: F401, I001 -- before anything of SGLang
from sglang.srt.plugins import load_plugins
from tests.parts import Server, mha_pool, published


PAGES = 4
load_plugins()
published().install()


def release():
    return f"SGLang {version('sglang')}"


class Engine(Here):
    def __init__(self, config, weights):
        self._tier = config["secondary"][0]
        options = {"config": config, "bounce_bytes": "4MiB", "weights": weights}
        options["deadline"] = config["secondary"][0]["deadline"]
        self._server = Server(mha_pool(allocator="shm"), options)  # as KVTIERS_CONFIG has it
        self._shift = sum(weights.encode())

    def _pages(self, slots):
        content = self._server.content(slots)
        each = len(content) // PAGES
        return [content[start : start + each] for start in range(0, len(content), each)]

    def _filled(self, seed):
        slots = self._server.take(PAGES)
        self._server.fill(slots, self._shift + seed)
        return slots

    def put(self, seed):
        slots = self._filled(seed)
        stored = self._server.backend.batch_set_v1(self._server.keys(PAGES, seed), slots)
        self._server.pool.free(slots)
        return sum(stored)

    def get(self, seed):
        server, keys = self._server, self._server.keys(PAGES, seed)
        slots = self._filled(seed)
        right = self._pages(slots)
        server.fill(slots, 99)
        there = server.backend.batch_exists(keys)
        found = server.backend.batch_get_v1(keys[:there], slots[: there * server.pool.page_size]) if there else []
        found = [*found, *[False] * (PAGES - there)]
        got = [page if is_there else None for page, is_there in zip(self._pages(slots), found, strict=True)]
        server.pool.free(slots)
        return compared(got, right)

    def close(self):
        assert_mapped(self._tier, [self._server.backend.stats()["kv"]])
        self._server.close()


open = Engine  # noqa: A001 -- the interface of drivers
